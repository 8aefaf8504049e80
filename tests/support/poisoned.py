"""Forty requests, some with a token that a model cannot compute; and who was computed again for it."""

from typing import Any

import numpy as np
import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.request import Request
from nightmill.worker.engine.scheduler import Scheduler
from tests.support.ggufs import byte_vocabulary

__all__ = ["EMBEDDING", "PARAMS", "POISON", "VOCAB", "forty", "note_acquittals"]

VOCAB = len(byte_vocabulary().tokens)
POISON = 65
EMBEDDING = "token_embd.weight"
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "stop": "7 1"},
    {"temperature": 0.0, "repetition_penalty": 0.7},
]


def forty(*, poison: bool = True) -> list[Request]:
    """Of three kinds of beginnings, 9 with the poison: behind the beginning, in it, at the end."""
    rng = np.random.default_rng(5)
    beginnings = [rng.integers(66, VOCAB, length).tolist() for length in (0, 37, 70)]
    requests = []
    for n in range(40):
        own = rng.integers(66, VOCAB, int(rng.integers(1, 30))).tolist()
        if n % 9 in (0, 1) and poison:
            own.insert((0, len(own))[n % 2], POISON)
        prompt = (*beginnings[n % 3], *own)
        params = GenerationParams.parse({"max_tokens": 24, "ignore_eos": True} | PARAMS[n % 4])
        requests.append(Request(f"j{n}", 1, prompt, params, seed=n))
    return requests


def note_acquittals(patch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each sequence whose logits were not numbers was given another chance, as it comes to that."""
    said: list[bool] = []
    retry_unshared_after_nan = Scheduler.retry_unshared_after_nan

    def noted(scheduler: Scheduler, sequence: Any) -> bool:
        said.append(retry_unshared_after_nan(scheduler, sequence))
        return said[-1]

    patch.setattr(Scheduler, "retry_unshared_after_nan", noted)
    return said
