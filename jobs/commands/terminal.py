"""The only output path to a terminal: nothing printed here is markup or can steer the terminal.

ruff forbids `print`, `click.echo` and rich elsewhere (see pyproject.toml), so that no command prints
untrusted text unescaped. To keep a value on one line, pass it through `printable`, too.
"""

import atexit
import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

from nightmill.jobs.base.printable import json_printable, printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_GAP = "  "  # between columns
_LONGEST_CELL = 100
_SHORTEST_CELL = 10
_LINES = "\n\t"  # allowed in a text of several lines
_BARS = (24, 10)
_SHORT_NAME = 24


def echo(text: object = "", *, err: bool = False, mark: tuple[str, str] | None = None) -> None:
    """Print lines for people; `mark` is a word of our own with its colour, printed before them."""
    stream = sys.stderr if err else sys.stdout
    before = "" if mark is None else click.style(mark[0], fg=mark[1]) + " "
    _write(before + _encodable(printable(text, keep=_LINES), stream), err=err)


def echo_err(text: object) -> None:
    """Print lines on standard error."""
    echo(text, err=True)


def _write(text: str, *, err: bool = False, **more: Any) -> None:
    with _writing(err=err):
        click.echo(text, err=err, **more)


@contextmanager
def _writing(*, err: bool) -> Iterator[None]:
    """Write to standard output or error in this block.

    Standard error on a full disk ends no work: what finds no room by the end is lost. Raises ClickException
    for standard output. That a reader has gone is for click to handle.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        atexit.register(_give_up, sys.stderr if err else sys.stdout)
        if not err:
            said = f"standard output cannot be written: {error.strerror or error}"
            raise click.ClickException(said) from error


def _give_up(stream: Any) -> None:
    """Write what a stream still holds, or nowhere: Python would end with an exit code of its own."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def echo_text(text: str) -> None:
    """Print a generated text: unchanged into a file or another program, escaped on a terminal."""
    if sys.stdout.isatty():
        echo(text)
    else:
        # Otherwise click would strip sequences that look like colours.
        _write(_encodable(text, sys.stdout), color=True)


def type_text(piece: str) -> None:
    """Print a piece of a generated text at once, in the way of `echo_text`."""
    shown = printable(piece, keep=_LINES) if sys.stdout.isatty() else piece
    _write(_encodable(shown, sys.stdout), nl=False, color=True)


def echo_json(value: object, *, err: bool = False) -> None:
    """Print a value as one line of JSON."""
    line = to_json(value)
    if _encodable(line, sys.stderr if err else sys.stdout) != line:  # Python's escapes differ from JSON's
        line = json.dumps(value, default=plain)
    _write(line, color=True, err=err)


def to_json(value: object) -> str:
    """Format one line of JSON, with control characters as JSON's escapes."""
    return json_printable(json.dumps(value, default=plain, ensure_ascii=False))


def plain(value: object) -> str:
    """Convert a value of a type that JSON lacks."""
    return value.isoformat() if isinstance(value, datetime) else str(value)


def confirm(question: str) -> None:
    """Ask on stderr; raises click.Abort unless the answer is yes, click.UsageError if there is none."""
    try:
        agreed = click.confirm(printable(question), err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise click.UsageError("standard input has no answer: give --yes to go on") from None
    if not agreed:
        raise click.Abort


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    cut: str = "",
    whole: Mapping[str, int] | None = None,
) -> None:
    """Print a table with cells of at most 100 characters. An empty list of headings omits them.

    On a narrow terminal, the column `cut` is shortened first, then the others, but those in `whole` keep at
    least this many characters.
    """
    from rich.cells import cell_len

    lines = [[printable(cell, _LONGEST_CELL) for cell in row] for row in ([headings] if headings else [])]
    lines += [[printable(cell, _LONGEST_CELL) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    if sys.stdout.isatty():
        _shrink(widths, [(whole or {}).get(heading, _SHORTEST_CELL) for heading in headings], headings, cut)
    for line in lines:
        echo(_GAP.join(_sized(cell, width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _shrink(widths: list[int], least: Sequence[int], headings: Sequence[str], cut: str) -> None:
    """Make columns narrower until they fit the terminal, `cut` first, then always the widest."""
    room = shutil.get_terminal_size().columns - len(_GAP) * (len(widths) - 1)
    while sum(widths) > room:
        spare = [index for index, width in enumerate(widths) if index < len(least) and width > least[index]]
        if not spare:
            return
        widths[max(spare, key=lambda index: (headings[index] == cut, widths[index]))] -= 1


def _sized(text: str, width: int) -> str:
    from rich.cells import cell_len, set_cell_size

    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressLine:
    """A line about work in progress; empty parts are omitted."""

    name: str
    done: int = 0
    total: int | None = None  # None: nothing to count
    count: str = ""  # by default `done` of `total`
    state: str = ""
    failed: str = ""
    load: str = ""
    speed: str = ""
    end: str = ""
    note: str = ""
    elapsed: str = ""

    def facts(self) -> str:
        """The parts besides the numbers."""
        parts = (self.state, self.failed, self.load, self.speed, self.end, self.note)
        return ", ".join(printable(part) for part in parts if part)

    def fit(self, width: int, *, ascii_only: bool = False) -> str:
        """Format as much as fits into `width` cells; the count is always included.

        Bar and name are shortened first; then these are dropped in order: speed, running and waiting rows,
        elapsed time, end, note, bar, number of failures, state; finally the name is cut.
        """
        from rich.cells import cell_len, set_cell_size

        line, bar = self, _BARS[0]
        for step in ("", "shorter", "speed", "load", "elapsed", "end", "note", "bar", "failed", "state"):
            if step == "shorter":
                bar, line = _BARS[1], replace(line, name=printable(line.name, _SHORT_NAME))
            elif step == "bar":
                bar = 0
            elif step:
                line = replace(line, **{step: ""})  # type: ignore[arg-type]
            name, after = line._parts(bar, ascii_only)
            room = width - cell_len(after)
            if cell_len(name) <= room:
                break
        return (name if cell_len(name) <= room else set_cell_size(name, max(room, 0))) + after

    def _parts(self, bar: int, ascii_only: bool) -> tuple[str, str]:
        """Return the name, and the rest."""
        count, drawn = self.count, ""
        if self.total is not None:
            count = count or f"{self.done:,}/{self.total:,}"
            full = bar * min(self.done, self.total) // max(self.total, 1)
            marks = "#-" if ascii_only else "━─"
            drawn = marks[0] * full + marks[1] * (bar - full)
        after = " ".join(part for part in (drawn, count, self.facts(), self.elapsed) if part)
        name = printable(self.name)
        return name, f" {after}" if name and after else after


class LiveLine:
    """A line on stderr that is updated in place on a terminal, and omitted elsewhere."""

    def __init__(
        self,
        line: ProgressLine,
        *,
        show: bool = True,
        console: "Console | None" = None,
        estimate: bool = False,
    ) -> None:
        self.console = console or _stderr()
        self.shown = show and self.console.is_terminal
        self.line = line
        self._estimate = estimate
        self._began = time.monotonic()
        self._live: Any = None

    def update(self, line: ProgressLine) -> None:
        """Display this line from now on."""
        self.line = line

    def say(self, text: str) -> None:
        """Print a separate line above."""
        from rich.text import Text

        with _writing(err=True):
            self.console.print(Text(printable(text, keep=_LINES)), soft_wrap=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hide the line in this block, so that output on stdout does not mix with it."""
        live = self._live
        if live is None:
            yield
            return
        live.transient = True
        live.stop()
        try:
            yield
        finally:
            live.transient = self._estimate
            live.start()

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        seconds = time.monotonic() - self._began
        line = replace(self.line, elapsed=clock(seconds))
        if self._estimate and line.total is not None and line.done:
            line = replace(line, end=f"{clock(seconds * (line.total - line.done) / line.done)} left")
        yield Text(line.fit(options.max_width, ascii_only=options.ascii_only), no_wrap=True)

    def __enter__(self) -> Self:
        if self.shown:
            from rich.live import Live

            self._live = Live(self, console=self.console, transient=self._estimate)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def clock(seconds: float) -> str:
    """Format seconds as 1:02:03."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _stderr() -> "Console":
    from rich.console import Console

    return Console(stderr=True, markup=False, emoji=False, highlight=False)


def _encodable(text: str, stream: Any) -> str:
    """Escape characters that the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
