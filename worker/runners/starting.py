"""The steps in which an engine starts, and how long each may go on without news before it counts as hung."""

from collections.abc import Callable
from enum import Enum

from nightmill.jobs.errors import RunnerError

__all__ = ["Progress", "SelfTestError", "StartStep", "no_progress"]


class StartStep(Enum):
    """A step: what it does, for people, and seconds without news after which it counts as hung.

    Each is reported before it begins. News restart the clock: a compiled kernel, a percent of the weights, a
    batch size.
    """

    OPENING = ("opening the model file", 300.0)
    STARTING = ("starting the runner", 300.0)
    """Taking the GPU into use, planning its memory."""
    COMPILING = ("compiling kernels", 900.0)
    """One file takes seconds, or minutes on a busy machine."""
    LOADING = ("loading weights", 900.0)
    """Reading a tensor of some GB from a slow disk takes minutes."""
    TUNING = ("timing ways to multiply", 120.0)
    CAPTURING = ("capturing steps as graphs", 120.0)
    SELF_TEST = ("testing products of the weights", 60.0)
    PROBING = ("computing the first prompts", 600.0)
    """With NumPy, 16 tokens through 7 billion weights take minutes; on a GPU, seconds."""

    @property
    def words(self) -> str:
        """Description of the step for people."""
        return self.value[0]

    @property
    def seconds(self) -> float:
        """Most seconds that it may go on without news."""
        return self.value[1]

    @property
    def computes(self) -> bool:
        """True for steps that run kernels which multiply weights for the first time."""
        return self in (StartStep.TUNING, StartStep.CAPTURING, StartStep.SELF_TEST)


Progress = Callable[[StartStep, str], None]
"""Is told the step that begins or goes on, and how far it is in words, or ""."""


def no_progress(step: StartStep, news: str = "") -> None:
    """Ignore progress: the default, if nobody waits."""


class SelfTestError(RunnerError):
    """A product of the model's weights is wrong on this GPU."""
