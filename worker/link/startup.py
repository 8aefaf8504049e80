"""Waits for an engine to be built, for as long as it has news of the step that it is in."""

from collections.abc import Callable
from multiprocessing.connection import Connection

from nightmill.jobs.base.silence import Silence
from nightmill.worker.link.messages import Answer, Failed, Loading
from nightmill.worker.runners.starting import StartStep

__all__ = ["first_answer"]

_LOOK_SECONDS = 0.2  # how soon a worker that loads sees that it shall end
_REMEDY = "if it happens again, --weights 16bit loads without kernels for packed weights"


def first_answer(
    connection: Connection, while_loading: Callable[[str | None], None], about: str = ""
) -> Answer:
    """Wait for an engine's answer, once built or unable to be; Failed, too, if it ends or a step has no news.

    while_loading  called a few times a second, with the news or None; what it raises ends the waiting
    about          model, weights and GPU, for messages

    The process itself is left as it is: whoever waits ends it.
    """
    last = Loading(StartStep.OPENING)
    silence = Silence(last.step.seconds, 10 * _LOOK_SECONDS)
    of_what = f" ({about})" if about else ""
    try:
        while not silence.too_long():
            if not connection.poll(_LOOK_SECONDS):
                while_loading(None)
                continue
            answer: Answer = connection.recv()
            if not isinstance(answer, Loading):
                return answer
            last, silence = answer, Silence(answer.step.seconds, 10 * _LOOK_SECONDS)
            while_loading(answer.shown)
    except (EOFError, OSError):
        return Failed(
            f"the engine's process ended before it was ready, after {last.words!r}{of_what}; its output "
            "tells more",
            last.step.computes,
        )
    return Failed(
        f"the engine has not gone on loading for {silence.limit:.0f} s, after {last.words!r}: is the disk "
        f"too slow, or does the GPU hang? It is ended{of_what}; {_REMEDY}",
        last.step.computes,
    )
