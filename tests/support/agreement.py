"""How far a runner's logits are from those of the reference runner, for the same tokens of one model.

A prompt is computed whole, and again in chunks, and after each the same tokens are decoded one by one.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from tests.support.driving import BLOCK, Chunk, HasLogits, Logits, Pages, Reference, logits_of

__all__ = ["CLEAR", "CONTEXT", "MEAN_KL", "Agreement", "agreement", "compared"]

PROMPT, DECODED = 320, 32
CHUNKS = (100, 24, 196)
CONTEXT = PROMPT + DECODED
MEAN_KL = 1e-4
"""The bar of the mean divergence, in half."""
CLEAR = 4 * (4 * MEAN_KL) ** 0.5
"""How far apart the best two logits of a row are if its best token has to be the same, in half: 0.08.

Errors of logits with variance s^2 make a divergence of about s^2 / 2, and the distance of two of them has the
variance 2 s^2: so these are four standard deviations of what the bar allows.
"""

ENTROPY = 0.4, 0.9  # of the largest there can be: bounds of the mean of a model that shows faults

Make = Callable[[GgufFile, ModelSpec], HasLogits]


@dataclass(frozen=True)
class Agreement:
    """Of the rows (positions) of both passes; divergences are of the distributions, in nats."""

    rows: int
    entropy: float  # mean, of the reference's distributions, in nats
    mean_kl: float  # KL(reference || runner)
    largest_kl: float
    same_top: float  # share of rows with the same best token
    clear_rows: int  # rows whose best two logits are clearly apart
    same_clear: float  # share of these with the same best token
    largest_gap: float  # between the best two of a row whose best token is another


def agreement(make: Make, file: GgufFile, spec: ModelSpec, *, clear: float = CLEAR) -> Agreement:
    """Hold the runner that `make` makes against the reference runner; its `slots` may be 1.

    Raises ValueError for a model of which no fault would show: it is nearly certain of the next token, or
    nearly indifferent.
    """
    text = np.random.default_rng(5).integers(0, spec.vocab, CONTEXT).tolist()
    reference = Reference(file, spec, kv_pages=CONTEXT // BLOCK, page_size=BLOCK, slots=1)
    with closing(reference.runner):
        expected = _logits(reference, text, (PROMPT,))
    subject = make(file, spec)
    with closing(subject.runner):
        ours = [_logits(subject, text, chunks) for chunks in ((PROMPT,), CHUNKS)]
    found = compared(np.concatenate(ours), np.concatenate([expected, expected]), clear)
    least, most = (share * np.log(spec.vocab) for share in ENTROPY)
    if not least < found.entropy < most:
        raise ValueError(
            f"the model says little: an entropy of {found.entropy:.2f}, not {least:.2f} to {most:.2f}"
        )
    return found


def _logits(subject: HasLogits, text: list[int], chunks: Sequence[int]) -> Logits:
    """Of every position, (CONTEXT, vocab): the prompt in such chunks, then token by token."""
    ends = list(accumulate(chunks))
    steps = [Chunk(0, text, end - length, length, length) for end, length in zip(ends, chunks, strict=True)]
    steps += [Chunk(0, text, position, 1, drawn=True) for position in range(PROMPT, CONTEXT)]
    pages = Pages(1, CONTEXT // BLOCK)
    return np.concatenate([logits_of(subject, pages, [step], admit=step.start == 0) for step in steps])


def compared(actual: Logits, expected: Logits, clear: float = CLEAR) -> Agreement:
    """Logits (rows, vocab) against those expected; rows are clear if their best two are this far apart."""
    p, q = _log_softmax(expected), _log_softmax(actual)
    divergence = (np.exp(p) * (p - q)).sum(axis=1)
    second, best = np.sort(np.partition(expected, -2, axis=1)[:, -2:], axis=1).T
    same, gap = actual.argmax(axis=1) == expected.argmax(axis=1), best - second
    is_clear = gap > clear
    return Agreement(
        rows=len(same),
        entropy=float(-(np.exp(p) * p).sum(axis=1).mean()),
        mean_kl=float(divergence.mean()),
        largest_kl=float(divergence.max()),
        same_top=float(same.mean()),
        clear_rows=int(is_clear.sum()),
        same_clear=float(same[is_clear].mean()) if is_clear.any() else 1.0,
        largest_gap=float(gap[~same].max(initial=0.0)),
    )


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
