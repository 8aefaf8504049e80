"""Settings for launches, and the launches whose tokens are not collected yet."""

from dataclasses import dataclass

from nightmill.worker.runners.base import DrawArray, StepBatch
from nightmill.worker.runners.gpu.step_inputs import StepInputs, StepShape

__all__ = ["USUAL_LAUNCHING", "Launching", "PendingLaunch"]


@dataclass(frozen=True, slots=True)
class PendingLaunch:
    """A launch that was not collected yet."""

    turn: int
    draws: DrawArray
    inputs: StepInputs
    shape: StepShape
    adjusted: bool  # the logits of some draws are
    logprobs: bool  # some draws want log-probabilities
    sums: int = 0  # embeddings that are complete
    batch: StepBatch | None = None  # what the block that predicts further tokens is to follow
    guesses: int = 0  # sequences behind whose draws is guessed


@dataclass(frozen=True, slots=True)
class Launching:
    """Settings for the launching of steps.

    graphs  replay decode steps from CUDA graphs
    tune    time the algorithms of products at start-up, else take the library's first guess
    """

    graphs: bool = True
    tune: bool = True


USUAL_LAUNCHING = Launching()
