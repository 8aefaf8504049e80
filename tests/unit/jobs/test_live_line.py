"""The line that is kept up to date on a terminal, and what is printed while it is there."""

import io

import pytest
from rich.console import Console

from nightmill.jobs.commands.terminal import LiveLine, ProgressLine


@pytest.mark.parametrize("estimate", [False, True])
def test_a_paused_line_is_wiped_first_and_drawn_again_below(estimate: bool) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60)
    with (
        LiveLine(ProgressLine(name="texts", total=2), console=console, estimate=estimate) as live,
        live.paused(),
    ):
        before = screen.getvalue()
        screen.write("an answer\n")
    after = screen.getvalue().partition("an answer\n")[2]
    assert before.endswith("\x1b[2K")  # the line is erased, and the cursor at its beginning
    assert "texts" in after
    assert after.endswith("\x1b[2K") is estimate  # an estimate goes at the end, a count stays


def test_a_line_that_is_not_shown_can_be_paused() -> None:
    screen = io.StringIO()
    with LiveLine(ProgressLine(name="texts"), console=Console(file=screen)) as live, live.paused():
        pass
    assert screen.getvalue() == ""
