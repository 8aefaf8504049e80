"""What a model file is, for people who think of serving it."""

import math
from collections import Counter
from dataclasses import dataclass

from nightmill.jobs.errors import ChatTemplateError
from nightmill.jobs.printable import printable
from nightmill.worker.link.loading import LoadedModel
from nightmill.worker.model.gguf.file import GgufFile

EXAMPLE = "Hello"
_LEAST_SHARE = 0.005  # of a file's bytes, for a type of tensor to be named
_LONGEST_EXAMPLE = 200
_MOST_ENDS = 12


@dataclass(frozen=True, slots=True)
class Inspection:
    """A model's file. `chat` is what its template makes of one message, `no_chat` why there is none."""

    family: str
    parameters: int
    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    files: list[str]
    size: int
    quantisation: dict[str, float]
    context: int
    tokenizer: str
    tokens: int
    ends: dict[int, str]
    """Tokens that end a text, by their ids."""
    chat: str | None
    no_chat: str | None
    dropped: list[str]
    """Roles whose messages the template leaves out."""

    def lines(self) -> dict[str, str]:
        """What there is to say, by a word for each line."""
        ends = [f"{text} ({token})" for token, text in self.ends.items()]
        if len(ends) > _MOST_ENDS:
            ends[_MOST_ENDS:] = [f"{len(ends) - _MOST_ENDS:,} more"]
        chat = f"plain prompts only ({self.no_chat})"
        if self.chat is not None:
            shown = printable(self.chat, _LONGEST_EXAMPLE)
            chat = f'a chat template, which makes of the message "{EXAMPLE}": {shown}'
            if self.dropped:
                chat += f"; it leaves out messages of {' and '.join(self.dropped)}: jobs with such fail"
        count = "1 file" if len(self.files) == 1 else f"{len(self.files)} parts"
        return {
            "model": f"{self.family}, {_rounded(self.parameters, 'million', 'billion')} parameters, "
            f"{self.layers} layers of width {self.width:,}, FFN {self.feed_forward:,}, {self.heads} heads on "
            f"{self.kv_heads} KV heads of {self.head_dim}, vocabulary {self.vocabulary:,}",
            "file": f"{_rounded(self.size, 'MB', 'GB')} in {count}: {', '.join(shares(self.quantisation))}",
            "text": f"context {self.context:,}; tokenizer {self.tokenizer}, {self.tokens:,} tokens, of which "
            f"these end a text: {', '.join(ends) or 'none'}",
            "chat": chat,
        }


def inspect(model: LoadedModel) -> Inspection:
    """Look at a model. Its process that renders chats is asked once."""
    file, spec, vocabulary = model.file, model.spec, model.vocabulary
    layer = spec.layers[0]
    attention = layer.attention
    model_of_tokens, pre = (file.string(f"tokenizer.ggml.{key}", default=None) for key in ("model", "pre"))
    chat, no_chat = _example(model)
    return Inspection(
        family=spec.family,
        parameters=sum(math.prod(weight.shape) for _, weight in spec.all_weights()),
        layers=len(spec.layers),
        width=spec.width,
        feed_forward=layer.feed_forward.width,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        vocabulary=spec.vocab,
        files=[str(path) for path in file.paths],
        size=sum(path.stat().st_size for path in file.paths),
        quantisation=quantisation_of(file),
        context=spec.context_length,
        tokenizer=" ".join(filter(None, (model_of_tokens, pre))),
        tokens=len(vocabulary.tokens),
        ends={token: vocabulary.text_of(token) for token in sorted(vocabulary.eos_ids)},
        chat=chat,
        no_chat=no_chat,
        dropped=[] if isinstance(model.chat, str) else sorted(model.chat.contents().dropped),
    )


def quantisation_of(file: GgufFile) -> dict[str, float]:
    """The types of a file's tensors with their share of its bytes, the largest first."""
    by_kind: Counter[str] = Counter()
    for info in file.tensors.values():
        by_kind[info.kind.name] += info.nbytes
    return {kind: size / by_kind.total() for kind, size in by_kind.most_common()}


def shares(quantisation: dict[str, float]) -> list[str]:
    """The same in words: `Q4_K 81%`; without types that hardly occur."""
    return [f"{kind} {share:.0%}" for kind, share in quantisation.items() if share >= _LEAST_SHARE]


def _example(model: LoadedModel) -> tuple[str | None, str | None]:
    if isinstance(model.chat, str):
        return None, model.chat
    try:
        return model.chat.render([{"role": "user", "content": EXAMPLE}]), None
    except ChatTemplateError as error:
        return None, str(error)


def _rounded(number: int, million: str, billion: str) -> str:
    return f"{number / 1e9:.3g} {billion}" if number >= 1e9 else f"{number / 1e6:.3g} {million}"
