"""Small batch files for the tests, and jobs as they come back from the database."""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.formats import FileFormat, InputFile, InputRow
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.fields import FIELDS
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.request.structured import CONSTRAINT_FIELDS
from nightmill.jobs.request.tools import TOOL_KEYS

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
FINISHED = datetime(2026, 3, 1, 4, 5, 6, tzinfo=UTC)


def chat(custom_id: Any = "a", **body: Any) -> dict[str, Any]:
    """A row for /v1/chat/completions; a value of None in `body` is written as null."""
    messages = [{"role": "user", "content": "Say a word"}]
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"messages": messages} | body}


def completion(custom_id: Any = "a", **body: Any) -> dict[str, Any]:
    """A row for /v1/completions."""
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": {"prompt": "Once"} | body}


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """A JSONL file; a row that is bytes is written as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read_rows(path: Path, format: FileFormat | None = None) -> list[InputRow]:
    return list(InputFile(path, format).rows())


def said(row: InputRow) -> dict[str, Any]:
    """What a row says of its job besides its prompt and its name."""
    spec = row.spec
    assert spec is not None
    values = vars(spec) | vars(spec.params)
    found = {
        name: values[name]
        for name, field in FIELDS.items()
        if name not in CONSTRAINT_FIELDS
        and name not in TOOL_KEYS
        and values[name] != field.default
        and name != "custom_id"
    }
    if spec.constrained is not None:
        found["constrained"] = spec.constrained
    return found if spec.tools is None else found | {"tools": spec.tools}


def job(**values: Any) -> Job:
    """A succeeded job, but for what `values` say."""
    usual: dict[str, Any] = {
        "id": "0" * 31 + "1",
        "state": JobState.SUCCEEDED,
        "prompt": "Once",
        "messages": None,
        "params": GenerationParams(seed=7),
        "model": "demo",
        "custom_id": "a",
        "row": 3,
        "stop_reason": StopReason.EOS,
        "text": "upon a time",
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "created_at": FINISHED,
        "finished_at": FINISHED,
    }
    return Job(**(usual | values))


def only(tmp_path: Path, row: Any) -> InputRow:
    """The one row of a file of OpenAI's format, as it is read."""
    (read,) = read_rows(write_lines(tmp_path / "in.jsonl", [row]), FileFormat.OPENAI)
    return read
