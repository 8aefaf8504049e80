"""The rows of a file as far as they can be checked without a model: which are bad, and how that is shown."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.base.printable import printable
from nightmill.jobs.commands.printing import counted
from nightmill.jobs.formats import FileFormat, InputFile, InputRow
from nightmill.jobs.request.spec import JobSpec

SHOWN_ROWS = 20
_LONGEST_LINE = 1000
_BY_LINE = (FileFormat.OPENAI, FileFormat.JSONL)
"""Formats whose rows are counted by lines; those of CSV may have several."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be run."""

    line: int
    custom_id: str | None
    code: str
    field: str | None
    message: str

    @classmethod
    def of(cls, row: InputRow) -> "BadRow | None":
        """Describe the error that the checks of a row found; None for a good row."""
        error = row.error
        if error is None:
            return None
        return cls(row.number, row.custom_id, error.code, error.field, error.message)


@dataclass(slots=True)
class CheckedRows:
    """The rows of a file, checked without a model, which alone can count tokens."""

    file: InputFile
    rows: int = 0
    bad: list[BadRow] = field(default_factory=list)
    models: Counter[str] = field(default_factory=Counter)
    """Numbers of good rows, by the model that they name."""
    unnamed: int = 0
    """Good rows that name no model."""
    in_turn: Sequence[str] = ()
    """Models that a worker loads in turn; empty: nobody asked about these."""

    @property
    def loads(self) -> dict[str, int]:
        """The models that a worker with those `in_turn` loads, each once, and the rows that each answers.

        Rows without a model are answered by one that is loaded for others, or by the first of the list.
        """
        found = {model: self.models[model] for model in self.in_turn if self.models[model]}
        if self.unnamed and self.in_turn:
            found = found or {self.in_turn[0]: 0}
            found[next(iter(found))] += self.unnamed
        return found

    @property
    def elsewhere(self) -> dict[str, int]:
        """Rows for models that are not in the list, by model."""
        return {model: count for model, count in self.models.most_common() if model not in self.in_turn}

    def as_json(self) -> JsonObject:
        """The keys of a plan that are known."""
        return {
            "file": str(self.file.path),
            "format": str(self.file.format),
            "model": None,
            "rows": self.rows,
            "good": self.rows - len(self.bad),
            "bad": [asdict(row) for row in self.bad],
            "bad_by_code": bad_by_code(self.bad),
            "rows_for_models": dict(self.models.most_common()),
            "estimate": None,
        } | ({"loads": self.loads, "rows_for_other_models": self.elsewhere} if self.in_turn else {})


def check_rows(
    file: InputFile, defaults: JobSpec, on_row: Callable[[], None], in_turn: Sequence[str] = ()
) -> CheckedRows:
    """Read and check the whole file, for models that a worker loads `in_turn`; raises BatchFileError."""
    found = CheckedRows(file, in_turn=in_turn)
    for row in file.rows(defaults):
        found.rows += 1
        if (bad := BadRow.of(row)) is not None:
            found.bad.append(bad)
        elif row.spec is not None and row.spec.model is not None:
            found.models[row.spec.model] += 1
        else:
            found.unnamed += 1
        on_row()
    return found


def bad_by_code(bad: Sequence[BadRow]) -> dict[str, int]:
    """Numbers of bad rows, the most frequent first."""
    return dict(Counter(row.code for row in bad).most_common())


def describe_rows(file: InputFile, rows: int, good: int, bad: Sequence[BadRow]) -> Iterator[str]:
    """Lines for a terminal: how many rows there are, and which are bad."""
    name = printable(file.path)
    yield f"{name}: {counted(rows, 'row')} ({file.format}), {good:,} good, {len(bad):,} bad"
    for row in bad[:SHOWN_ROWS]:
        yield f"  {_describe_row(row, 'line' if file.format in _BY_LINE else 'row')}"
    if len(bad) > SHOWN_ROWS:
        yield f"  ... and {len(bad) - SHOWN_ROWS:,} more: --json lists all"
    for code, count in bad_by_code(bad).items():
        yield f"  {count:>10,}  {code}"


def describe_checked(found: CheckedRows) -> Iterator[str]:
    """The same for a file that was checked without a model."""
    yield from describe_rows(found.file, found.rows, found.rows - len(found.bad), found.bad)
    if found.in_turn:
        yield from _describe_loads(found)
        return
    for model, count in found.models.most_common():
        yield f"note: {counted(count, 'row')} ask for model {printable(model)!r}"
    yield (
        "note: no model is named, so no tokens are counted and no time is estimated: give --model FILE or "
        "set NIGHTMILL_MODEL"
    )


def _describe_loads(found: CheckedRows) -> Iterator[str]:
    loads = found.loads
    each = ", ".join(f"{printable(model)} for {counted(rows, 'row')}" for model, rows in loads.items())
    yield f"loads          {len(loads)}{': ' if loads else ''}{each}"
    for model, count in found.elsewhere.items():
        yield f"note: {counted(count, 'row')} ask for model {printable(model)!r}, which is not in the list"
    yield "note: no time is estimated for several models: plan with --model FILE, one after another"


def _describe_row(row: BadRow, what: str) -> str:
    name = "" if row.custom_id is None else f" {row.custom_id!r}"
    return printable(f"{what} {row.line}{name}: {row.message} [{row.code}]", _LONGEST_LINE)
