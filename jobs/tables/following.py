"""A batch whose rows follow those of another batch, one each: its table is that batch's, with its answers."""

import base64
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import BatchConflictError
from nightmill.jobs.formats.dialect import Dialect
from nightmill.jobs.formats.rows import FileFormat, InputRow
from nightmill.jobs.request.following import Held, Parts, held_chat, held_text, parts_of
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.request.template import PRIOR, Empty, Slot, Template
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.tables.arrow_files import pyarrow
from nightmill.jobs.tables.columns import ANSWERS, Columns, Table
from nightmill.jobs.tables.kinds import TEXT
from nightmill.jobs.tables.options import ANSWER, TableOptions
from nightmill.jobs.tables.rows import RowMaker
from nightmill.jobs.tables.shape import TABLE, Shape

_CUSTOM_ID = "custom_id"
_BEFORE = "prior_"


class FollowingRows:
    """The followers of a batch's rows.

    Their columns are those that came back of that batch, then its answers. Raises BatchNotFoundError,
    InvalidParameterError, and BatchConflictError for a batch that may still grow.
    """

    def __init__(self, store: BatchStore, options: TableOptions) -> None:
        self.after = str(options.after)
        self.label = f"batch {self.after}"
        self._store = store
        record = store.get(self.after)
        if record.format is None or record.row_count is None:
            why = "was filled by enqueue" if record.format is None else "is still being submitted"
            raise BatchConflictError(
                f"after: batch {self.after!r} {why}, so its rows may be more tomorrow; name one that was "
                "submitted as a whole",
                field="after",
            )
        self.format = FileFormat(record.format)
        if self.format is FileFormat.OPENAI:
            self.format = FileFormat.JSONL
        self.dialect = Dialect.of(record.settings)
        said = f"{record.name}\n{record.created_at.isoformat()}"
        self.fingerprint = hashlib.sha256(said.encode()).hexdigest()
        shape = Shape.read(record.settings)
        kinds = {_CUSTOM_ID: TEXT} if shape is None else dict(shape.kept)
        self._table_of_prior = shape is not None
        self.answer = ANSWER if shape is None else shape.column
        while self.answer in kinds or self.answer == options.column:
            self.answer = _BEFORE + self.answer
        table: Any = (record.settings or {}).get(TABLE, {})
        self._late = tuple(table.get(ANSWERS, ()))
        columns = Columns(
            {**kinds, self.answer: TEXT}, _schema(shape, self.answer), answers=(*self._late, self.answer)
        )
        self.table = Table(columns, options)

    def rows(self, defaults: JobSpec) -> Iterator[InputRow]:
        """A row for each of the batch, its prompt held."""
        sources = {self.answer: f"{PRIOR}content"} | {name: f"{PRIOR}column.{name}" for name in self._late}
        maker = _FollowerMaker(self.table, defaults, sources)
        for prior in self._store.priors(self.after):
            values: JsonObject = {_CUSTOM_ID: prior.custom_id}
            if self._table_of_prior:
                values = prior.metadata or {}
            row = maker.row(prior.row, values, prior.custom_id)
            if row is not None:
                yield replace(row, prior=prior.job_id)


def _schema(shape: Shape | None, answer: str) -> Any:
    """Arrow's schema of the columns that came back, if it has one, and of the answers."""
    if shape is None or shape.schema is None:
        return None
    arrow = pyarrow()
    schema = arrow.ipc.read_schema(arrow.py_buffer(base64.b64decode(shape.schema)))
    return schema.append(arrow.field(answer, arrow.string()))


class _FollowerMaker(RowMaker):
    """Makes rows with held prompts.

    sources  the columns that are known once the row before has ended, and what of it they are
    """

    def __init__(self, table: Table, defaults: JobSpec, sources: Mapping[str, str]) -> None:
        kept = [name for name, _ in table.shape.kept]
        super().__init__(table.options, tuple(name for name in kept if name not in sources), defaults)
        self._sources = sources
        self._columns = {name: sources[name].removeprefix(PRIOR) for name in kept if name in sources}

    def _spec(self, values: Mapping[str, Any], custom_id: str) -> JobSpec:
        held = replace(self._held(values), columns=self._columns)
        spec = JobSpec.parse(held.skeleton() | {_CUSTOM_ID: custom_id}, self._defaults)
        return spec.following(held)

    def _held(self, values: Mapping[str, Any]) -> Held:
        options = self._options
        empty = Empty.KEEP if options.empty is Empty.KEEP else Empty.ERROR
        if options.template.messages is not None:
            chat = self._prompt(values)  # a column with a chat, which waits all the same
            return held_chat([(message, (str(message["content"]),)) for message in chat], empty)
        parts = self._parts(options.template, values)
        if options.plain:
            return held_text(parts, empty)
        messages: list[tuple[JsonObject, Parts]] = [({"role": "user"}, parts)]
        if options.system is not None:
            messages.insert(0, ({"role": "system"}, self._parts(options.system, values)))
        return held_chat(messages, empty)

    def _parts(self, template: Template, values: Mapping[str, Any]) -> Parts:
        parts = tuple(
            part._replace(column=self._sources.get(part.column, part.column))
            if isinstance(part, Slot)
            else part
            for part in template.parts
        )
        return parts_of(replace(template, parts=parts), values, self._options.empty)
