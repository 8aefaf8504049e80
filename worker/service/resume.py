"""Ties saved tokens to what they were drawn by and from, so that nothing else goes on from them."""

import hashlib
from array import array
from collections.abc import Sequence

from nightmill.jobs.base.arithmetic import DIGITS, Arithmetic
from nightmill.jobs.sql.partials import SavedTokens

SAVE_TOKENS = 8
"""A job is saved once it has so many tokens more than before: less is not worth a row."""
SAVE_GROUP = 128
"""Jobs that are read from the engine and written together: 1 ms of the engine's time at 400 tokens each."""


def prompt_digest(prompt_ids: Sequence[int]) -> str:
    """Return a digest of the prompt's token ids, which tells it from others (`DIGITS` hexadecimal digits)."""
    return marks(b"", prompt_ids)[1]


def fingerprint(arithmetic: Arithmetic, prompt_ids: Sequence[int]) -> str:
    """Return a digest of all that saved tokens depend on beside the job's own row (64 hexadecimal digits).

    They depend on the arithmetic, model and all, and on the prompt. Tokens of one kind of GPU that another
    went on from would be a text that neither of them gives.
    """
    return marks(f"{arithmetic}\x00".encode(), prompt_ids)[0]


def marks(arithmetic: bytes, prompt_ids: Sequence[int]) -> tuple[str, str]:
    """Return a prompt's fingerprint under an arithmetic, whose name ends with a zero byte, and its digest."""
    prompt = array("i", prompt_ids).tobytes()
    return hashlib.sha256(arithmetic + prompt).hexdigest(), hashlib.sha256(prompt).hexdigest()[:DIGITS]


def tokens_to_resume(saved: SavedTokens | None, wanted: str) -> tuple[int, ...]:
    """The tokens to go on from: none where arithmetic or prompt were others."""
    return saved.token_ids if saved is not None and saved.fingerprint == wanted else ()
