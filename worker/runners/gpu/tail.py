"""The rows of a step that draw, as a step of their own: layers that keep nothing are for these alone."""

from nightmill.worker.runners.base import StepBatch
from nightmill.worker.runners.gpu.attention.plans import AttentionPlans
from nightmill.worker.runners.gpu.step_inputs import StepInputs, StepShape
from nightmill.worker.runners.gpu.steps import StepBuffers, drawing_rows

__all__ = ["TailSteps"]


class TailSteps:
    """Writes them.

    steps  buffers for them
    slots  sequences at once
    """

    def __init__(self, steps: StepBuffers, plans: AttentionPlans, slots: int) -> None:
        self._steps = steps
        self._plans = plans
        self._slots = slots

    def write(self, turn: int, batch: StepBatch, shape: StepShape) -> tuple[StepInputs, StepShape] | None:
        """Queue the copy of the rows that draw, of a step of this shape; None: all rows do."""
        own = drawing_rows(batch, self._slots) if shape.gathers else None
        if own is None:
            return None
        tiles, pieces, ((first, cut, _), *further) = self._plans.divide(turn, own)
        rows = len(own.tokens)
        sizes = StepShape(
            tokens=rows, sequences=rows, drawn=own.drawn, draws=0, tiles=first, pieces=cut,
            again=shape.again, further=tuple(further),
        )  # fmt: skip
        return self._steps.write(turn, own, sizes, tiles, pieces), sizes
