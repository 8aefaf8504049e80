"""Embeddings in files: OpenAI's rows and bodies, plain rows, and lists of float32 in tables."""

import base64
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openai.types import CreateEmbeddingResponse

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.formats import FileFormat, ResultFile, error_row, result_row
from nightmill.jobs.formats.embedding_requests import EMBEDDINGS, MAX_INPUTS, embedding_jobs
from nightmill.jobs.formats.openai import endpoint_of
from nightmill.jobs.formats.ours import job_ids
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.tables.layout import TableLayout
from nightmill.jobs.tables.options import TableOptions
from nightmill.jobs.tables.shape import Shape
from tests.unit.formats.files import job, read_rows, write_lines

NUMBERS = np.random.default_rng(5).standard_normal(7).astype("<f4")


def embedded(**changes: Any) -> Job:
    usual: dict[str, Any] = {
        "prompt": "text", "params": GenerationParams(embed=True, seed=1), "text": "",
        "stop_reason": StopReason.EOS, "completion_tokens": 0, "prompt_tokens": 3,
        "packed_embedding": NUMBERS.tobytes(),
    }  # fmt: skip
    return job(**(usual | changes))


def of_row(tmp_path: Path, body: dict[str, Any], url: str = EMBEDDINGS) -> Any:
    row = {"custom_id": "x", "method": "POST", "url": url, "body": body}
    (read,) = read_rows(write_lines(tmp_path / "in.jsonl", [row]), FileFormat.OPENAI)
    return read


@pytest.mark.parametrize(
    ("given", "prompt"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])]
)
def test_a_row_of_openais_format_becomes_a_job(tmp_path: Path, given: Any, prompt: Any) -> None:
    body = {
        "input": given, "model": "m", "dimensions": 5, "encoding_format": "base64", "user": "u",
        "pooling": "mean",
    }  # fmt: skip
    row = of_row(tmp_path, body)
    assert row.error is None and row.prompt == prompt
    params = row.spec.params
    assert (params.embed, params.dimensions, params.pooling) == (True, 5, "mean")
    assert (row.spec.model, row.spec.custom_id) == ("m", "x")
    assert row.spec.request == {"encoding_format": "base64"}
    assert endpoint_of(row.spec) == EMBEDDINGS


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({}, "input", "is missing"),
        ({"input": []}, "input", "is empty"),
        ({"input": ""}, "input", "is empty"),
        ({"input": 5}, "input", "must be a text or a list of token ids, not a number"),
        ({"input": ["a", "b"]}, "input", "has 2 texts, and a row is one"),
        ({"input": ["a", 5]}, "input[1]", "must be a text or a list of token ids, not a number"),
        ({"input": [[]]}, "input[0]", "must be a text or a list of token ids"),
        ({"input": [1, -1]}, "input[1]", "must be a token id"),
        ({"input": [[1], [2, -1]]}, "input[1][1]", "must be a token id"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "must be float or base64"),
        ({"input": "a", "dimensions": 0}, "dimensions", "must be at least 1"),
        ({"input": "a", "temperature": 1}, "temperature", "is not supported"),
        ({"input": "a", "prompt": "b"}, "prompt", "is not supported"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", "has 2,049 texts, more than 2,048"),
    ],
)
def test_what_is_wrong_with_a_body_is_said_by_its_key(
    tmp_path: Path, body: dict[str, Any], field: str, said: str
) -> None:
    error = of_row(tmp_path, body).error
    assert error is not None and error.field == f"body.{field}"
    assert error.message.startswith(f"body.{field}: {said}"), error.message


def test_a_request_has_a_job_for_each_text() -> None:
    specs = embedding_jobs({"input": ["a", [3, 4], "b"], "dimensions": 2}, JobSpec())
    assert [spec.prompt for spec in specs] == ["a", [3, 4], "b"]
    assert all(spec.params == GenerationParams(embed=True, dimensions=2) for spec in specs)


def test_chats_and_texts_take_no_keys_of_embeddings(tmp_path: Path) -> None:
    row = of_row(tmp_path, {"prompt": "a", "embed": True}, "/v1/completions")
    assert row.error is not None and row.error.field == "body.embed"


def test_openais_own_types_parse_a_result() -> None:
    row = result_row(embedded(model=None), FileFormat.OPENAI, model="served")
    body = json.loads(json.dumps(row))["response"]["body"]
    parsed = CreateEmbeddingResponse.model_validate(body, strict=True)
    (one,) = parsed.data
    assert np.array(one.embedding, dtype="<f4").tobytes() == NUMBERS.tobytes()
    assert (parsed.model, parsed.usage.prompt_tokens, parsed.usage.total_tokens) == ("served", 3, 3)
    packed = result_row(embedded(request={"encoding_format": "base64"}), FileFormat.OPENAI)
    data = packed["response"]["body"]["data"][0]["embedding"]
    assert base64.b64decode(data) == NUMBERS.tobytes()


@pytest.mark.parametrize("format", [FileFormat.JSONL, FileFormat.CSV, FileFormat.PARQUET])
def test_a_file_of_plain_rows_has_them_beside_texts(tmp_path: Path, format: FileFormat) -> None:
    path = tmp_path / f"out.{format}"
    text = job(id="0" * 32, text="said", stop_reason=StopReason.EOS)
    with ResultFile(path, format) as out:
        for done in (embedded(), text):
            out.write(result_row(done, format))
    assert list(job_ids(path, format, errors=False)) == [embedded().id, text.id]
    if format is FileFormat.PARQUET:
        column = pq.read_table(path).column("embedding")
        assert column.type == pa.list_(pa.float32())
        found = column.to_pylist()
    elif format is FileFormat.JSONL:
        found = [json.loads(line).get("embedding") for line in path.read_text().splitlines()]
    else:
        rows = list(csv.DictReader(path.open()))
        found = [json.loads(row["embedding"]) if row["embedding"] else None for row in rows]
    assert np.array(found[0], dtype="<f4").tobytes() == NUMBERS.tobytes() and found[1] is None


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl", "csv"])
def test_a_table_has_lists_of_float32(tmp_path: Path, ending: str) -> None:
    options = TableOptions.of({"template": "{{ text }}", "embed": True})
    assert options is not None and options.plain
    shape = Shape.of(options, {"text": "string", "n": "int64"}, None)
    assert Shape.read({"table": shape.values()}) == shape
    format = FileFormat(ending)
    layout = TableLayout(format, shape)
    assert list(layout.columns) == ["text", "n", "embedding", "prompt_tokens", "job_id"]
    path = tmp_path / f"out.{ending}"
    with ResultFile(path, format, layout=layout) as out:
        out.write(layout.row(embedded(metadata={"text": "a", "n": 4})))
    assert list(job_ids(path, format, errors=False, layout=layout)) == [embedded().id]
    if ending in ("parquet", "arrow"):
        table = pq.read_table(path) if ending == "parquet" else pa.ipc.open_file(path).read_all()
        assert table.schema.field("embedding").type == pa.list_(pa.float32())
        (row,) = table.to_pylist()
    elif ending == "jsonl":
        row = json.loads(path.read_text())
    else:
        head, line = path.read_text().splitlines()
        assert head.startswith("text,n,embedding")
        row = {"text": "a", "n": 4, "embedding": json.loads(line[line.index("[") : line.index("]") + 1])}
    assert (row["text"], row["n"]) == ("a", 4)
    assert np.array(row["embedding"], dtype="<f4").tobytes() == NUMBERS.tobytes()


def test_errors_of_a_table_have_no_embeddings() -> None:
    options = TableOptions.of({"template": "{{ text }}", "embed": True})
    assert options is not None
    layout = TableLayout(FileFormat.JSONL, Shape.of(options, {"text": "string"}, None), errors=True)
    failed = embedded(stop_reason=StopReason.ERROR, error="too long", packed_embedding=None)
    assert layout.row(failed)["message"] == "too long"
    assert "embedding" not in layout.columns
    assert "embedding" not in error_row(failed, FileFormat.JSONL)


def test_a_text_to_embed_is_no_chat() -> None:
    with pytest.raises(InvalidParameterError, match="plain: contradicts system"):
        TableOptions.of({"template": "{{ text }}", "embed": True, "system": "be kind"})
    with pytest.raises(InvalidParameterError, match="plain: contradicts a template of messages"):
        TableOptions.of({"template": "{{ text | messages }}", "embed": True})
