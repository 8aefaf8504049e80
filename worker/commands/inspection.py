"""Describe a model file, for people who consider serving it."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from nightmill.jobs.base.contract import CallFormat
from nightmill.jobs.base.printable import printable
from nightmill.jobs.errors import ChatTemplateError
from nightmill.worker.assembly.model import LoadedModel
from nightmill.worker.model.chat import ChatTemplate
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Attention, LatentAttention

EXAMPLE = "Hello"
_LEAST_SHARE = 0.005  # of a file's bytes, for a type of tensor to be named
_LONGEST_EXAMPLE = 200
_LONGEST_PROMPT = 2000
_MOST_ENDS = 12


@dataclass(frozen=True, slots=True)
class Shown:
    """A conversation of all roles as the model sees it, and the form of its answers.

    prompt    the conversation, with each special token as ‹token›
    refused   why the template takes no messages of a role, by roles; `tools`: no tools at all
    calls     the format in which the model calls tools, None if it is not known
    thoughts  the marks around thoughts, if the template has such
    opened    a prompt begins them
    fault     which special tokens the template writes that stay out of reach, and what to do
    """

    prompt: str
    refused: dict[str, str]
    calls: str | None
    thoughts: tuple[str, str] | None
    opened: bool
    fault: str | None

    def lines(self) -> dict[str, str]:
        """The lines to show, each under a word that names it."""
        lines = {"prompt": f"a conversation as the model sees it: {printable(self.prompt, _LONGEST_PROMPT)}"}
        if self.fault is not None:
            lines["tokens"] = self.fault
        roles = {role: reason for role, reason in self.refused.items() if role != "tools"}
        if roles:
            why = "; ".join(f"{role}: {reason}" for role, reason in roles.items())
            lines["roles"] = printable(f"the template refuses messages of some: {why}", _LONGEST_PROMPT)
        if self.calls is None:
            lines["tools"] = printable(self.refused.get("tools", "not known").removeprefix("tools: "))
        else:
            lines["tools"] = f"called as {_CALLS[CallFormat(self.calls)]} ({self.calls})"
        lines["thoughts"] = "none that the template marks"
        if self.thoughts is not None:
            begun = ", which the prompt opens" if self.opened else ""
            lines["thoughts"] = f"between {self.thoughts[0]} and {self.thoughts[1]}{begun}"
        return lines


_CALLS: Final = {
    CallFormat.HERMES: '<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>',
    CallFormat.LLAMA: '{"name": NAME, "parameters": OBJECT}',
    CallFormat.MISTRAL: '[TOOL_CALLS][{"name": NAME, "arguments": OBJECT}]',
    CallFormat.MISTRAL_NAMED: "[TOOL_CALLS]NAME[ARGS]OBJECT",
    CallFormat.QWEN_XML: "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>",
    CallFormat.GLM_XML: "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
    CallFormat.GEMMA: '<|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>}<tool_call|>',
    CallFormat.PYTHONIC: "[NAME(KEY=VALUE)]",
    CallFormat.LFM2: "<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>",
    CallFormat.GRANITE: '<|tool_call|>[{"name": NAME, "arguments": OBJECT}]',
    CallFormat.GIGACHAT: '<|function_call|>{"name": NAME, "arguments": OBJECT}',
    CallFormat.PHI: '<|tool_call|>[{"name": NAME, "arguments": OBJECT}]<|/tool_call|>',
    CallFormat.NEMOTRON: '<TOOLCALL>[{"name": NAME, "arguments": OBJECT}]</TOOLCALL>',
    CallFormat.TOOL_CALLS: '<tool_calls>[{"name": NAME, "arguments": OBJECT}]</tool_calls>',
    CallFormat.HARMONY: "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>OBJECT",
    CallFormat.DEEPSEEK: "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>OBJECT<｜tool▁call▁end｜>",
    CallFormat.DEEPSEEK_R1: (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME ```json OBJECT ```<｜tool▁call▁end｜>"
    ),
    CallFormat.KIMI: "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>OBJECT<|tool_call_end|>",
    CallFormat.MINIMAX: '<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>',
    CallFormat.SEED: "<seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function>",
    CallFormat.COHERE: '<|START_ACTION|>[{"tool_name": NAME, "parameters": OBJECT}]<|END_ACTION|>',
    CallFormat.JSON: '{"name": NAME, "arguments": OBJECT}',
}
_FAULTY: Final = ("tokens", "roles")
"""Lines that say what may be wrong."""


def is_note(part: str, found: "Inspection") -> bool:
    """True if a line of `Inspection.lines` is not to be relied on."""
    no_calls = found.shown is not None and found.shown.calls is None
    return part in _FAULTY or (part == "chat" and found.chat is None) or (part == "tools" and no_calls)


@dataclass(frozen=True, slots=True)
class Inspection:
    """A model's file. `chat` is what its template makes of one message, `no_chat` why there is none."""

    family: str
    parameters: int
    active: int
    """Parameters that a token is computed with."""
    experts: list[str]
    """Which experts a token goes through, for each kind of layer with a mixture."""
    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    mixers: dict[str, int]
    """Numbers of layers, by how they mix tokens."""
    state_bytes: int
    """The state that a sequence keeps beside keys and values, in bytes."""
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
    shown: "Shown | None"
    """A conversation as the model sees it; None without a template."""

    def lines(self) -> dict[str, str]:
        """The lines to show, each under a word that names it."""
        ends = [f"{text} ({token})" for token, text in self.ends.items()]
        if len(ends) > _MOST_ENDS:
            ends[_MOST_ENDS:] = [f"{len(ends) - _MOST_ENDS:,} more"]
        chat = f"plain prompts only ({self.no_chat})"
        if self.chat is not None:
            shown = printable(self.chat, _LONGEST_EXAMPLE)
            chat = f'a chat template, which makes of the message "{EXAMPLE}": {shown}'
            if self.dropped:
                chat += f"; it leaves out messages of {' and '.join(self.dropped)}: jobs with such fail"
        lines = {} if self.shown is None else self.shown.lines()
        count = "1 file" if len(self.files) == 1 else f"{len(self.files)} parts"
        return {
            "model": f"{self.family}, {_rounded(self.parameters, 'million', 'billion')} parameters"
            f"{self._active()}, {self.layers} layers of width {self.width:,}, FFN {self.feed_forward:,}, "
            f"{self.heads} heads on {self.kv_heads} KV heads of {self.head_dim}, "
            f"vocabulary {self.vocabulary:,}{self._states()}",
            "file": f"{_rounded(self.size, 'MB', 'GB')} in {count}: {', '.join(shares(self.quantisation))}",
            "text": f"context {self.context:,}; tokenizer {self.tokenizer}, {self.tokens:,} tokens, of which "
            f"these end a text: {', '.join(ends) or 'none'}",
            "chat": chat,
        } | lines

    def _active(self) -> str:
        """Say how many parameters a token is computed with, if not with all."""
        if self.active == self.parameters:
            return ""
        active = _rounded(self.active, "million", "billion")
        why = f"a token goes through {' or '.join(self.experts)}"
        if not self.experts:
            why = "of the embeddings of layers a token has a row"
        return f" ({active} active: {why})"

    def _states(self) -> str:
        """Say which layers keep a state, if any do."""
        if not self.state_bytes:
            return ""
        mixers = ", ".join(f"{mixer} in {count}" for mixer, count in self.mixers.items())
        return f"; {mixers}; a sequence keeps a state of {_rounded(self.state_bytes, 'MB', 'GB')}"


def inspect(model: LoadedModel) -> Inspection:
    """Look at a model. Its process that renders chats is asked once."""
    file, spec, vocabulary = model.file, model.spec, model.vocabulary
    attention = next(
        one for layer in spec.layers if isinstance(one := layer.mixer, Attention | LatentAttention)
    )
    mixers = Counter(layer.mixer.title for layer in spec.layers if layer.mixer is not None)
    model_of_tokens, pre = (file.string(f"tokenizer.ggml.{key}", default=None) for key in ("model", "pre"))
    chat, no_chat = _example(model)
    shown = None if chat is None or isinstance(model.chat, str) else _shown(model, model.chat)
    return Inspection(
        family=spec.family,
        parameters=spec.parameters,
        active=spec.active_parameters,
        experts=[f"{one.used} of {one.count} experts of {one.width:,}" for one in spec.experts],
        layers=len(spec.layers),
        width=spec.width,
        feed_forward=max(layer.feed_forward.width for layer in spec.layers),
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        mixers=dict(mixers),
        state_bytes=spec.state_bytes,
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
        shown=shown,
    )


def _shown(model: LoadedModel, chat: ChatTemplate) -> Shown:
    said = chat.conversation()
    prompt_ids = chat.encode(said.messages, said.rendering)
    greeting = chat.encode([{"role": "user", "content": EXAMPLE}])
    markup = chat.markup(None, greeting)
    calls = None
    with suppress(ChatTemplateError):
        calls = chat.tool_use().calls.value
    return Shown(
        prompt=_visible(model, prompt_ids),
        refused=dict(said.refused),
        calls=calls,
        thoughts=None if markup is None else markup.thinking,
        opened=markup is not None and markup.opened,
        fault=model.template_fault(),
    )


def _visible(model: LoadedModel, token_ids: Sequence[int]) -> str:
    """The text of these tokens, with each special one as ‹token›; what only looks like one stays bare."""
    special = set(model.tokenizer.markers.values())
    parts: list[str] = []
    for apart, run in groupby(token_ids, special.__contains__):
        ids = list(run)
        parts.append(
            "".join(f"‹{model.vocabulary.text_of(one)}›" for one in ids)
            if apart
            else model.tokenizer.decode(ids, continues=bool(parts))
        )
    return "".join(parts)


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
