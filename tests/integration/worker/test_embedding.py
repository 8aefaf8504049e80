"""Embeddings by a real worker: a table, a file of rows in OpenAI's format, plain rows, and one by one."""

import json
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import EmbeddingError, RerankError
from nightmill.worker.commands.process import running_worker
from tests.integration.worker.conftest import on_sqlite
from tests.support.encoder_models import write_bert, write_reranker
from tests.support.ggufs import write_model
from tests.support.servers import http_server, worker_env

pytestmark = pytest.mark.heavy
WORDS = ("night", "mill", "river", "wheel", "grain", "stone")
TEXTS = [" ".join(WORDS[place % 6] for place in range(number, number * 3 + 1)) for number in range(24)]


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result


@on_sqlite
def test_texts_are_embedded_through_every_door(
    quick: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = {"qwen3.pooling_type": 3, "tokenizer.ggml.add_eos_token": True}
    model = write_model(tmp_path / "model.gguf", "qwen3", layers=1, metadata=metadata)
    settings = quick.model_copy(update={"reference": True, "model": model})
    for name, value in worker_env(settings).items():
        monkeypatch.setenv(name, value)
    pq.write_table(pa.table({"n": pa.array(range(24), pa.int16()), "a text": TEXTS}), tmp_path / "in.parquet")
    rows = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": {"input": text}}
        for number, text in enumerate(TEXTS)
    ]
    (tmp_path / "openai.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plain = [{"embed": text, "dimensions": 8, "pooling": "mean"} for text in TEXTS]
    (tmp_path / "plain.jsonl").write_text("\n".join(map(json.dumps, plain)))
    with Client(settings) as client, running_worker(client, tmp_path / "worker.log"):
        run("embed", tmp_path / "in.parquet", "--column", "a text", "-o", tmp_path / "out.parquet")
        run("run", tmp_path / "openai.jsonl", "-o", tmp_path / "openai.out.jsonl")
        run("run", tmp_path / "plain.jsonl", "-o", tmp_path / "plain.out.jsonl")
        for found in client.list_batches():
            assert client.verify(found.name, sample=5, timeout=240).equal
        one_by_one = [client.embed_many([text], timeout=240)[0] for text in TEXTS[:6]]
        too_long = client.enqueue("night " * 600, embed=True)
        client.wait(too_long, timeout=240)
        assert "the text to embed has" in str(client.get(too_long).error)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.names == ["n", "a text", "embedding", "prompt_tokens", "job_id"]
    assert table.schema.field("embedding").type == pa.list_(pa.float32())
    assert (table["n"].type, table["a text"].to_pylist()) == (pa.int16(), TEXTS)
    embeddings = np.array(table["embedding"].to_pylist(), dtype=np.float32)
    assert embeddings.shape == (24, 64) and len(np.unique(embeddings, axis=0)) == 24
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(embeddings[:6], np.array(one_by_one, dtype=np.float32))
    said = [json.loads(line) for line in (tmp_path / "openai.out.jsonl").read_text().splitlines()]
    of_openai = {row["custom_id"]: row["response"]["body"]["data"][0]["embedding"] for row in said}
    in_order = [of_openai[str(number)] for number in range(24)]
    np.testing.assert_array_equal(np.array(in_order, dtype=np.float32), embeddings)
    means = [
        json.loads(line)["embedding"] for line in (tmp_path / "plain.out.jsonl").read_text().splitlines()
    ]
    assert {len(mean) for mean in means} == {8} and means[3] != embeddings[3, :8].tolist()


@on_sqlite
def test_an_encoder_embeds_and_writes_no_texts(
    quick: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_bert(tmp_path / "model.gguf")
    settings = quick.model_copy(update={"reference": True, "model": model})
    for name, value in worker_env(settings).items():
        monkeypatch.setenv(name, value)
    texts = ["The night, the mill.", "a river", "milling grains " * 10]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"embed": text}) for text in texts))
    with Client(settings) as client, running_worker(client, tmp_path / "worker.log", ["--name", "bert"]):
        run("run", tmp_path / "rows.jsonl", "-o", tmp_path / "out.jsonl")
        cls, mean = (client.embed_many(texts, timeout=240, pooling=pooling) for pooling in (None, "mean"))
        (batch,) = client.list_batches()
        assert client.verify(batch.name, sample=3, timeout=240).equal
        spoken = client.enqueue("The night")
        client.wait(spoken, timeout=240)
        assert "this is an encoder, which embeds texts or ranks them, and writes none" in str(
            client.get(spoken).error
        )
        too_long = client.enqueue("the " * 200, embed=True)
        client.wait(too_long, timeout=240)
        assert "the text to embed has 202 tokens" in str(client.get(too_long).error)
        served = settings.model_copy(update={"model": None, "reference": False})
        with http_server(served, tmp_path / "server.log") as url:
            asked = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
            answer = asked.embeddings.create(model="bert", input=texts, dimensions=8)
            with pytest.raises(openai.OpenAIError, match="this is an encoder"):
                asked.completions.create(model="bert", prompt="The night")
    said = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["prompt_tokens"] for row in said] == [8, 4, 42]  # [CLS] and [SEP] among them
    np.testing.assert_array_equal(np.array([row["embedding"] for row in said], dtype=np.float32), cls)
    assert cls != mean
    cut = np.array(cls)[:, :8] / np.linalg.norm(np.array(cls)[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose([one.embedding for one in answer.data], cut, atol=1e-6)
    checked = run("check", model, "--pretend", "rtx4090").output
    assert 'embeds "The sea is" as 32 numbers' in checked and "drawn tokens" not in checked


@on_sqlite
def test_a_cross_encoder_ranks_documents_through_every_door(
    quick: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_reranker(tmp_path / "model.gguf")
    settings = quick.model_copy(update={"reference": True, "model": model})
    for name, value in worker_env(settings).items():
        monkeypatch.setenv(name, value)
    query, documents = "the river", ["a mill", "the night, the stone", "[SEP] grain [CLS]", "milling " * 9]
    rows = [{"rerank": query, "prompt": one} for one in documents]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.table({"text": documents}), tmp_path / "in.parquet")
    with Client(settings) as client, running_worker(client, tmp_path / "worker.log", ["--name", "bert"]):
        run("run", tmp_path / "rows.jsonl", "-o", tmp_path / "out.jsonl")
        asked = ["--template", "{{ text }}", "--rerank", query]
        run("run", tmp_path / "in.parquet", *asked, "-o", tmp_path / "out.parquet")
        found = client.rerank(query, documents, timeout=60)
        assert client.verify(client.list_batches()[0].name, sample=4, timeout=60).equal
        cut = client.rerank(query, [documents[3] * 9], timeout=60, truncate_prompt_tokens=40)
        with pytest.raises(RerankError, match=r"the query and the document have \d+ tokens"):
            client.rerank(query, [documents[3] * 9], timeout=60)
        with pytest.raises(EmbeddingError, match="ranks pairs of texts and has no embeddings"):
            client.embed_many(["a mill"], timeout=60)
        served = settings.model_copy(update={"model": None, "reference": False})
        with http_server(served, tmp_path / "server.log") as url:
            body = {"model": "bert", "query": query, "documents": documents, "top_n": 3}
            answer = httpx2.post(f"{url}/v1/rerank", json=body, timeout=60).json()
            body["documents"] = ["a mill", documents[3] * 9]
            refused = httpx2.post(f"{url}/v1/rerank", json=body, timeout=60).json()
    said = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["relevance"] for row in said] == found and 0 < min(found) < max(found) < 1
    assert len({*found, *cut}) == 5 and not any("embedding" in row for row in said)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.names == ["text", "relevance", "prompt_tokens", "job_id"]
    assert table["relevance"].to_pylist() == found
    order = sorted(range(4), key=lambda number: -found[number])[:3]
    assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == [
        (number, found[number]) for number in order
    ]
    assert refused["error"]["param"] == "documents[1]"
    assert 'finds "The sea is" 0.' in run("check", model, "--pretend", "rtx4090").output
