"""Which tokens end an answer: those that the metadata declares, and those that are known by their text.

The texts and rules are those of llama.cpp (`special_eog_ids` in src/llama-vocab.cpp) but for `</s>`.
"""

from collections.abc import Collection, Sequence
from typing import Final

from gguf import TokenType

__all__ = ["DECLARED_ENDS", "ends_by_text", "without_steps"]

DECLARED_ENDS: Final = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Tokens that end an answer, by their keys `tokenizer.ggml.NAME_token_id`."""

_END_TEXTS: Final = frozenset(
    {
        "</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>",
        "<|im_end|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|EOT|>", "<EOT>", "_<EOT>", "[EOT]",
        "<end_of_turn>", "<|end_of_turn|>", "<turn|>", "<end_of_utterance>", "[e~[",
        "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>",
        # What pads a completed middle, or begins the next file or repository.
        "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>",
        "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>",
    }
)  # fmt: skip


def ends_by_text(tokens: Sequence[str], kinds: Sequence[int], bos_id: int | None) -> set[int]:
    """The ids of tokens whose text ends an answer, whatever else the file says about them.

    `</s>` is one if it is declared as control, or if `<s>` begins a text. Else it is HTML, the end of struck
    text, as for Gemma. llama.cpp takes it for an end even so, and cuts Gemma 2 and 3 short.
    """

    def is_end(index: int, text: str) -> bool:
        return text != "</s>" or paired or kinds[index] == TokenType.CONTROL

    paired = any(
        text == "<s>" and (index == bos_id or kinds[index] == TokenType.CONTROL)
        for index, text in enumerate(tokens)
    )
    return {index for index, text in enumerate(tokens) if text in _END_TEXTS and is_end(index, text)}


def without_steps(ends: Collection[int], tokens: Sequence[str]) -> frozenset[int]:
    """`ends`, without the token that ends a step of an answer and not all of it.

    That is `<|end|>` beside `<|return|>` and `<|call|>` (gpt-oss) or `<|flush|>` and `<|calls|>` (Solar).
    """
    texts = {tokens[index] for index in ends}
    has_steps = {"<|return|>", "<|call|>"} <= texts or (
        "<|flush|>" in texts and not texts.isdisjoint({"<|call|>", "<|calls|>"})
    )
    return frozenset(index for index in ends if not (has_steps and tokens[index] == "<|end|>"))
