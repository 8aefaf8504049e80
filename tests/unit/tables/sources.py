"""Rows of tables, as tests ask for them."""

from typing import Any

from nightmill.jobs.formats.inputs import NOTHING_SAID
from nightmill.jobs.formats.rows import InputRow
from nightmill.jobs.tables.options import TableOptions
from nightmill.jobs.tables.together import table_source


def options(template: str = "{{ x }}", **more: Any) -> TableOptions:
    """Options of a table."""
    made = TableOptions.of({"template": template, **more})
    assert made is not None
    return made


def rows_of(source: Any, template: str = "{{ x }}", **more: Any) -> list[InputRow]:
    """Read all rows."""
    return list(table_source(source, options(template, **more)).rows(NOTHING_SAID))


def said(row: InputRow) -> Any:
    """The texts of a row's messages, or its prompt."""
    assert row.spec is not None, row.error
    messages = row.spec.messages or []
    return [message["content"] for message in messages] or row.spec.text
