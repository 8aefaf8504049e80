"""The options with which a table becomes a batch: the template and what goes with it, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from nightmill.jobs.base.contract import Constrained, unstorable
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.request.fields import OF_A_BATCH, BatchSettings
from nightmill.jobs.request.following import check_slots
from nightmill.jobs.request.prompts import json_type
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.request.template import Empty, Template
from nightmill.jobs.tables.spreading import spread_columns

ANSWER, EMBEDDING, RELEVANCE = "answer", "embedding", "relevance"
"""The name of the column of answers, of embeddings or of relevance, unless another is given."""
ALL, NONE = "all", "none"
_LONGEST_NAME = 256  # characters of a column of ours


class TableSettings(BatchSettings, total=False):
    """Keywords of submit_batch for a table, beside those for its rows."""

    template: str | None
    system: str | None
    plain: bool | None
    keep: str | Sequence[str] | None
    column: str | None
    spread: bool | None
    empty: str | None
    after: str | None


TABLE_KEYS = tuple(TableSettings.__annotations__.keys() - BatchSettings.__annotations__.keys())


class OfRows(NamedTuple):
    """Settings of all rows that decide which columns results have."""

    constrained: Constrained | None = None
    several: bool = False
    tools: bool = False
    embeds: bool = False
    ranks: bool = False


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options that say how rows become prompts, and which columns come back."""

    template: Template
    system: Template | None = None
    plain: bool = False
    """The template's text is the whole prompt, not a message of a chat."""
    keep: str | tuple[str, ...] = ALL
    column: str = ANSWER
    spread: tuple[tuple[str, str], ...] = ()
    """The columns of JSON answers, and their types."""
    empty: Empty = Empty.ERROR
    after: str | None = None
    """The batch whose rows these follow, one each."""
    rows: OfRows

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self | None:
        """Read the options from a batch's settings; None without a template. Raises InvalidParameterError."""
        said = {name: settings[name] for name in TABLE_KEYS if settings.get(name) not in (None, False)}
        if "template" not in said:
            if "after" in said:
                said_of_after = "needs a template, such as 'Rate 1 to 5: {{ prior.content }}'"
                raise _wrong("after", said_of_after)
            if said:
                first = min(said)
                raise InvalidParameterError(
                    f"{first}: is for tables with a template; give one, such as 'Classify: {{{{ review }}}}'",
                    field=first,
                )
            return None
        defaults = JobSpec.defaults(without_table(settings), OF_A_BATCH)
        params = defaults.params
        rows = OfRows(
            defaults.constrained,
            several=params.n > 1 or params.logprobs is not None or bool(params.score),
            tools=defaults.tools is not None,
            embeds=params.embed,
            ranks=params.rerank is not None,
        )
        return cls._checked(said, rows)

    @classmethod
    def _checked(cls, said: Mapping[str, Any], rows: OfRows) -> Self:
        template = Template.parse(said["template"])
        system = Template.parse(said["system"], "system") if "system" in said else None
        plain = said.get("plain", rows.embeds or rows.ranks)
        if not isinstance(plain, bool):
            raise _wrong("plain", f"must be true or false, not {json_type(plain)}")
        if plain and system is not None:
            raise _wrong("plain", "contradicts system, which a chat has; put it into the template")
        if plain and template.messages is not None:
            raise _wrong("plain", "contradicts a template of messages, which are a chat; leave it out")
        if system is not None and system.messages is not None:
            raise _wrong("system", "is one text, not messages; write the column without a filter")
        after = said.get("after")
        if after is not None:
            if not isinstance(after, str) or not after:
                raise _wrong("after", f"must be the name of a batch, not {json_type(after)}")
            for one in (template, system):
                if one is not None:
                    check_slots(one)
        return cls(
            after=after,
            template=template,
            system=system,
            plain=plain,
            keep=_keep(said.get("keep", ALL)),
            column=_column(
                said.get("column", EMBEDDING if rows.embeds else RELEVANCE if rows.ranks else ANSWER)
            ),
            spread=spread_columns(rows.constrained) if said.get("spread") else (),
            empty=_empty(said.get("empty", Empty.ERROR)),
            rows=rows,
        )

    @property
    def named(self) -> tuple[str, ...]:
        """The columns that the templates name, each once."""
        slots = self.template.slots + (() if self.system is None else self.system.slots)
        return tuple(dict.fromkeys(slot.column for slot in slots))


def without_table(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that concern rows, whatever they come from."""
    return {name: value for name, value in settings.items() if name not in TABLE_KEYS}


def _keep(value: Any) -> str | tuple[str, ...]:
    if value in (ALL, NONE):
        return str(value)
    if isinstance(value, str):
        raise _wrong("keep", f"must be 'all', 'none' or a list of columns (got {value[:100]!r})")
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise _wrong("keep", f"must be 'all', 'none' or a list of columns, not {json_type(value)}")
    return tuple(dict.fromkeys(value))


def _column(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > _LONGEST_NAME:
        raise _wrong(
            "column", f"must be a text of 1 to {_LONGEST_NAME} characters (got {str(value)[:100]!r})"
        )
    if problem := unstorable(value):
        raise _wrong("column", problem)
    return value


def _empty(value: Any) -> Empty:
    try:
        return Empty(value)
    except ValueError:
        known = ", ".join(Empty)
        raise _wrong("empty", f"must be one of {known} (got {str(value)[:100]!r})") from None


def _wrong(name: str, said: str) -> InvalidParameterError:
    return InvalidParameterError(f"{name}: {said}", field=name)
