"""What a file holds that was uploaded: its rows, those that cannot be run, and how long it may take."""

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats import InputFile
from nightmill.jobs.server.inputs import file_error
from nightmill.jobs.sql.looking import Looking

_MOST_ERRORS = 20
_MOST_ROWS = 20_000  # that are read; of larger files the rest is told from these
_LATELY = timedelta(minutes=10)
_FEWEST_ROWS = 20  # that ended lately, for their pace to say anything


@dataclass(slots=True)
class Checked:
    """A file as far as it was read."""

    format: str = ""
    rows: int = 0
    bad: int = 0
    errors: list[tuple[int, str]] = field(default_factory=list)  # lines, and what is wrong there
    answers: int = 0  # of all rows that can be run
    most_tokens: int = 0  # that these answers may have together
    characters: int = 0  # of prompts
    whole: bool = True  # False: there are more rows than were read
    broken: str | None = None  # why it cannot be read at all
    seconds: float | None = None  # at the pace of rows lately, if that is known

    @property
    def good(self) -> int:
        """Rows that can be run."""
        return self.rows - self.bad


def check(path: Path, looking: Looking) -> Checked:
    """Read a file as it would be when it is handed in; never raises for what is in it."""
    found = Checked()
    try:
        file = InputFile(path, label="the file")
        found.format = str(file.format)
        for row in file.rows():
            if found.rows == _MOST_ROWS:
                found.whole = False
                break
            found.rows += 1
            if row.spec is None:
                found.bad += 1
                if row.error is not None and len(found.errors) < _MOST_ERRORS:
                    found.errors.append((row.number, row.error.message))
                continue
            params = row.spec.params
            found.answers += params.n
            found.most_tokens += params.n * params.max_tokens
            found.characters += len(str(row.prompt))
    except BatchFileError as error:
        found.broken = str(file_error(error, path)["message"])
        return found
    now = looking.now()
    (lately,) = looking.minutes(now - _LATELY, now, _LATELY)
    if lately.rows >= _FEWEST_ROWS:
        found.seconds = found.good * _LATELY.total_seconds() / lately.rows
    return found
