"""What the scripted runner draws, and what an engine must answer, by definition: one request, no cache.

The next token is a hash of the seed and of all tokens before it.
"""

import codecs
from hashlib import blake2b

import numpy as np

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.embeddings import normalised
from nightmill.worker.engine.logprobs import of_nothing
from nightmill.worker.engine.request import Request
from nightmill.worker.runners.base import (
    FOUND,
    IntArray,
    SumArray,
)

# Two bytes of "é", three of "€" and overlapping words, so that borders fall everywhere.
PIECES = [
    b"a",
    b"b",
    b"ab",
    b"ba",
    b" ",
    b"\xc3",
    b"\xa9",
    b"\xe2",
    b"\x82",
    b"\xac",
    "é".encode(),
    b"STOP",
    b"ST",
    b"OP",
    b"!",
]
EOS = len(PIECES) - 1
LOOPING = range(0, 100, 5)
"""Seeds of texts that repeat."""
VOCAB = len(PIECES)


class PieceStream:
    """Decodes PIECES."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(PIECES[token_id])

    @property
    def whole(self) -> bool:
        return not self._decoder.getstate()[0]

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def hashed(key: int, tokens: list[int]) -> int:
    """A pseudo-random number of 32 bits that depends on every token."""
    digest = blake2b(bytes(tokens), key=key.to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def next_token(seed: int, tokens: list[int], allowed: list[int] | None = None) -> int:
    """A pseudo-random token that depends on every token before it; EOS about one time in twenty.

    allowed: what a mask leaves, one of which it is. With a seed of LOOPING it depends on the last two alone.
    """
    number = hashed(seed, tokens[-2:] if seed in LOOPING else tokens)
    if allowed is not None:
        return allowed[number % len(allowed)]
    return EOS if number % 20 == 0 else number // 20 % EOS


def found_for(tokens: list[int], token: int) -> np.void:
    """A pseudo-random log-probability of a token after others, and likeliest tokens, as a runner tells."""
    found = np.zeros((), dtype=FOUND)
    found["logprob"] = -hashed(token, tokens) / 1e8
    found["tokens"] = [hashed(VOCAB + place, tokens) % VOCAB for place in range(len(found["tokens"]))]
    found["logprobs"] = found["tokens"] - 0.5
    return found[()]


def hidden_state(tokens: list[int]) -> SumArray:
    """A pseudo-random hidden state (3,) behind these tokens."""
    return np.array([hashed(VOCAB + 40 + place, tokens) / 2**31 - 1 for place in range(3)])


def expected_embedding(request: Request) -> bytes:
    """The embedding of a request by definition."""
    assert request.embeds is not None
    states = [hidden_state([*request.prompt_ids[: place + 1]]) for place in request.embeds]
    total = np.zeros(3)
    for state in states:
        total = total + state
    return normalised(total, request.params.dimensions)


def expected_records(request: Request, answer: tuple[int, ...], likely: int) -> bytes:
    """What a request is to be told that has drawn these tokens."""
    first = len(request.prompt_ids) if request.prompt_logprobs_from is None else request.prompt_logprobs_from
    tokens = [*request.prompt_ids, *answer]
    records = b""
    for place in range(first, len(tokens)):
        one = found_for(tokens[:place], tokens[place])
        parts = (one["logprob"], one["tokens"][:likely], one["logprobs"][:likely])
        records += b"".join(part.tobytes() for part in parts) if place else of_nothing(likely)
    return records


NARROW = range(4, 8)
"""Keys of constraints that mostly allow one token."""


class Rule:
    """A constraint: about half of the tokens may be next, which hangs on all that were drawn.

    Now and then none at all. Accepts nothing that it did not allow. A key of NARROW mostly allows one token,
    which hangs on the last one.
    """

    def __init__(self, key: int) -> None:
        self.key = key
        self.drawn: list[int] = []

    def allowed(self, drawn: list[int]) -> list[int]:
        """What may follow these."""
        number = hashed(self.key, drawn)
        if self.key in NARROW and number % 8:
            return [hashed(self.key, drawn[-1:]) % EOS]
        return [] if number % 31 == 0 else [token for token in range(VOCAB) if number >> token & 1]

    def mask(self, row: IntArray, /) -> None:
        assert row.tolist() == [0]
        row[0] = sum(1 << token for token in self.allowed(self.drawn))

    def accept(self, token_id: int, /) -> None:
        assert token_id in self.allowed(self.drawn)
        self.drawn.append(token_id)


def text_of(tokens: list[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode("utf-8", errors="replace")


def first_stop(text: str, stop: tuple[str, ...], after: int = 0) -> int | None:
    """Where the first stop string begins that ends past `after` characters, reading one by one."""
    for end in range(after + 1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return min(starts)
    return None


def stable_prefix(tokens: list[int]) -> str:
    """The text that no later token can change."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(b"".join(PIECES[t] for t in tokens))


def after(answer: list[int], params: GenerationParams) -> int:
    """How much of the text is there before anything may stop it."""
    return len(stable_prefix(answer[: params.min_tokens])) if params.min_tokens else 0


def expected(
    request: Request, context: int, poison: int | None = None
) -> tuple[tuple[int, ...], str, StopReason]:
    """The answer by definition: one request, no cache, the whole text looked at anew after each token."""
    tokens, params = list(request.prompt_ids), request.params
    answer: list[int] = []
    if request.embeds is not None:
        return (), "", StopReason.ERROR if poison in tokens else StopReason.EOS
    ends = {*params.stop_token_ids} if params.ignore_eos else {EOS, *params.stop_token_ids}
    while True:
        if poison in tokens:
            reason, visible = StopReason.ERROR, text_of(answer)
            break
        allowed = None if request.constraint is None else request.constraint.allowed(answer)
        if allowed == []:
            reason, visible = StopReason.ERROR, text_of(answer)
            break
        if ends and len(answer) < params.min_tokens:
            possible = range(VOCAB) if allowed is None else allowed
            allowed = [token for token in possible if token not in ends] or list(possible)
        token = next_token(request.seed, tokens, allowed)
        tokens.append(token)
        answer.append(token)
        if token == EOS and not params.ignore_eos:
            reason, visible = StopReason.EOS, text_of(answer[:-1])
            break
        if token in params.stop_token_ids:
            reason, visible = StopReason.STOP_SEQUENCE, text_of(answer[:-1])
            break
        cut = first_stop(stable_prefix(answer), params.stop, after(answer, params))
        if cut is not None:
            return tuple(answer), stable_prefix(answer)[:cut], StopReason.STOP_SEQUENCE
        if len(answer) == params.max_tokens:
            reason, visible = StopReason.LENGTH, text_of(answer)
            break
        if len(tokens) == context:
            reason, visible = StopReason.CONTEXT_FULL, text_of(answer)
            break
    pushed = answer[:-1] if reason in (StopReason.EOS, StopReason.STOP_SEQUENCE) else answer
    silent = len(visible) if len(pushed) <= params.min_tokens else after(pushed, params)
    cut = first_stop(visible, params.stop, silent)  # bytes that never became a character may complete one
    if cut is not None:
        reason = StopReason.ERROR if reason is StopReason.ERROR else StopReason.STOP_SEQUENCE
    return tuple(answer), visible[:cut], reason
