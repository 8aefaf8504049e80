"""What a job's text must be: a function of prompt, parameters and seed alone, computed without Nightmill.

The campaign's model draws each token from a checksum of everything before it, so that a token lost, doubled
or taken from another job changes all that follow. Its vocabulary has no merges: a token is a byte of UTF-8.
"""

import codecs
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

END_OF_TEXT, TURN_START, TURN_END = 256, 257, 258
CONTEXT = 512
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""The parameters that a runner is given, with their defaults."""

_DRAW = struct.Struct("<qI5d")


@dataclass(frozen=True)
class Answer:
    """How a job must end that nothing disturbs."""

    text: str
    stop_reason: str
    tokens: int


def checksum(token_ids: Iterable[int], begun: int = 0) -> int:
    """Of a sequence of tokens; `begun` is that of the tokens before them."""
    for token in token_ids:
        begun = zlib.crc32(token.to_bytes(4, "little"), begun)
    return begun


def draw(before: int, seed: int, sampling: Sequence[float]) -> int:
    """The token that follows tokens of this checksum: mostly a letter, at times any byte or the end."""
    drawn = zlib.crc32(_DRAW.pack(seed, before, *sampling))
    if drawn % 89 == 0:
        return TURN_END
    return (drawn >> 8) % 256 if drawn % 17 == 0 else 32 + (drawn >> 8) % 95


def prompt_ids(prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens of a plain prompt, or of a chat in the words of the campaign's template."""
    if isinstance(prompt, str):
        return list(prompt.encode())
    ids: list[int] = []
    for message in prompt:
        ids += [TURN_START, *f"{message['role']}\n{message['content']}".encode(), TURN_END, 10]
    return [*ids, TURN_START, *b"assistant\n"]


def answer(prompt: str | Sequence[Mapping[str, str]], seed: int, params: Mapping[str, Any]) -> Answer:
    """The whole answer to a prompt; `params` as given to `enqueue`."""
    ids = prompt_ids(prompt)
    sampling = [float(params.get(name, default)) for name, default in SAMPLING.items()]
    stops: Sequence[str] = params.get("stop", ())
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    before, text, count = checksum(ids), "", 0
    while True:
        token = draw(before, seed, sampling)
        before, count = checksum([token], before), count + 1
        ended = token == TURN_END
        if ended and not params.get("ignore_eos"):
            return _ended(text + decoder.decode(b"", final=True), stops, "eos", count)
        text += decoder.decode(b"" if ended else bytes([token]))
        if (place := _stopped(text, stops)) is not None:
            return Answer(_storable(text[:place]), "stop_sequence", count)
        if count >= params.get("max_tokens", 256):
            return _ended(text + decoder.decode(b"", final=True), stops, "length", count)
        if len(ids) + count >= CONTEXT:
            return _ended(text + decoder.decode(b"", final=True), stops, "context_full", count)


def begins(whole: str, text: str) -> bool:
    """Whether `text` may be what a job had when it was ended early."""
    return whole.startswith((text, text.rstrip("\ufffd")))


def _ended(text: str, stops: Sequence[str], reason: str, count: int) -> Answer:
    place = _stopped(text, stops)
    return Answer(_storable(text[:place]), reason if place is None else "stop_sequence", count)


def _stopped(text: str, stops: Sequence[str]) -> int | None:
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def _storable(text: str) -> str:
    return text.replace("\0", "\ufffd")
