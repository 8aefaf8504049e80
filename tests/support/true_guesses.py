"""Guesses that are mostly right, for texts that are known: random weights make texts that hardly repeat."""

from collections.abc import Mapping

import numpy as np
import pytest

from nightmill.worker.engine.drafting import Drafter
from nightmill.worker.engine.request import Sequence

__all__ = ["guess_truly"]


def guess_truly(
    patch: pytest.MonkeyPatch, answers: Mapping[str, tuple[int, ...]], *, vocab: int, seed: int = 0
) -> None:
    """Have drafts guess the tokens of these answers, by job id; one token of four is another one."""
    rng = np.random.default_rng(seed)

    def guesses(drafter: Drafter, sequence: Sequence, most: int) -> tuple[int, ...]:
        if most < 1 or not sequence.may_be_guessed:
            return ()
        right = answers[sequence.request.job_id][sequence.generated : sequence.generated + most]
        return tuple(token if rng.random() < 0.75 else int(rng.integers(vocab)) for token in right)

    patch.setattr(Drafter, "guesses", guesses)
