"""Texts to tokens and back over HTTP, by a process of the server's own on the worker's model file."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from nightmill.jobs.base.arithmetic import DIGITS, Arithmetic
from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.base.extras import pip_install
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import SettingsError
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server import tokenizer_process
from nightmill.jobs.server.job_service import JobService, ServerLimits
from nightmill.jobs.server.keys import ApiKeys
from nightmill.jobs.server.tokenizing import Tokenizing
from nightmill.worker.assembly.model import LoadedModel, demo_model, load_model
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from tests.support.ggufs import write_file
from tests.unit.server.conftest import Server

CHAT = [{"role": "user", "content": "Good night <|im_end|> moon"}]
SLEEPER = "import sys, time; sys.stdin.readline(); print('{}', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def model() -> Iterator[LoadedModel]:
    found = load_model(Settings(model=demo_model()))
    yield found
    found.close()


@pytest.fixture
def serving(start: Callable[..., Any], model: LoadedModel) -> Callable[..., Any]:
    """A server, and a worker's row that says that it serves this file: `with serving(...) as server`."""

    @contextmanager
    def begun(file: Path | None = None, digest: str | None = None, **settings: Any) -> Iterator[Server]:
        with start(worker=False, **settings) as server:
            arithmetic = Arithmetic("numpy", "cpu", "f32", "f32", "1", digest or model.file.digest()[:DIGITS])
            server.bench.claims.beat(
                WorkerState.READY,
                stats={
                    "context": 512,
                    "model_file": str(file or demo_model()),
                    "arithmetic": str(arithmetic),
                    "tool_format": "json",
                },
            )
            yield server

    return begun


def test_a_text_becomes_the_tokens_that_workers_make_of_it(
    serving: Callable[..., Any], model: LoadedModel
) -> None:
    with serving() as server, server.http() as http:
        found = http.post("/tokenize", json={"prompt": "Good night", "return_token_strs": True}).json()
        plain = http.post("/tokenize", json={"model": "model", "prompt": "", "return_token_strs": None})
        expected = list(model.encode("Good night"))
        assert found == {
            "count": len(expected),
            "max_model_len": 512,
            "tokens": expected,
            "token_strs": [model.vocabulary.text_of(token) for token in expected],
        }
        assert plain.json() == {"count": 0, "max_model_len": 512, "tokens": [], "token_strs": None}


def test_a_chat_goes_through_the_models_template(serving: Callable[..., Any], model: LoadedModel) -> None:
    with serving() as server, server.http() as http:
        opened = http.post("/tokenize", json={"messages": CHAT}).json()["tokens"]
        closed = http.post("/tokenize", json={"messages": CHAT, "add_generation_prompt": False}).json()
        assert tuple(opened) == model.encode(CHAT)
        assert opened[: closed["count"]] == closed["tokens"] != opened
        text = http.post("/detokenize", json={"tokens": opened}).json()
        assert text == {"prompt": model.tokenizer.decode(opened, special=True)}
        assert text["prompt"].endswith("<|im_start|>assistant\n")


def test_what_cannot_be_tokenised_is_refused_by_name(serving: Callable[..., Any]) -> None:
    cases: list[tuple[str, dict[str, Any], int, str | None, str]] = [
        ("tokenize", {}, 400, "prompt", "is missing"),
        ("tokenize", {"prompt": 5}, 400, "prompt", "must be a text"),
        ("tokenize", {"prompt": "a", "messages": CHAT}, 400, "prompt", "not both"),
        ("tokenize", {"prompt": "a", "tools": []}, 400, "tools", "is for chats"),
        ("tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens", "true or false"),
        ("tokenize", {"prompt": "a", "add_special_token": True}, 400, "add_special_token", "did you mean"),
        ("tokenize", {"messages": []}, 400, "messages", "empty"),
        ("tokenize", {"prompt": "a", "model": "other"}, 404, "model", "no worker has ever served"),
        ("detokenize", {}, 400, "tokens", "is missing"),
        ("detokenize", {"tokens": "1"}, 400, "tokens", "must be a list"),
        ("detokenize", {"tokens": [1, -1]}, 400, "tokens[1]", "must be a token id"),
        ("detokenize", {"tokens": [1, 99_999]}, 400, "tokens[1]", "of this model, from 0 to"),
    ]
    with serving() as server, server.http() as http:
        for path, body, status, param, said in cases:
            answer = http.post(f"/{path}", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (status, param), (path, body, error)
            assert said in error["message"], error
        assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
        assert server.http(None).post("/tokenize", json={"prompt": "a"}).status_code == 401


def test_the_vocabulary_says_what_it_is(serving: Callable[..., Any]) -> None:
    with serving() as server, server.http() as http:
        found = http.get("/tokenizer_info").json()
        assert found["eos_token"] == "<|im_end|>"
        assert "<|im_start|>" in found["chat_template"]
        assert (found["model_max_length"], found["vocab_size"]) == (512, 4096)


@pytest.mark.parametrize("fault", ["absent", "another", "no model"])
def test_a_file_that_the_server_does_not_have_is_named_with_the_remedy(
    serving: Callable[..., Any], tmp_path: Path, fault: str
) -> None:
    file = demo_model() if fault == "another" else tmp_path / "a.gguf"
    if fault == "no model":
        file.write_bytes(b"GGUF and nothing more")
    with serving(file, digest="0" * DIGITS) as server, server.http() as http:
        answer = http.post("/tokenize", json={"prompt": "a"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (501, "tokenizer_missing")
        assert "NIGHTMILL_TOKENIZER_FILES=model=PATH" in error["message"]
        assert str(file) not in error["message"]  # a stranger need not know


def test_a_package_that_the_server_lacks_is_named_with_the_remedy(
    serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    says = 'print(\'{"error": "missing", "message": "tokenizers"}\')'
    monkeypatch.setattr(tokenizer_process, "COMMAND", (sys.executable, "-c", says))
    with serving() as server, server.http() as http:
        answer = http.post("/tokenize", json={"prompt": "a"})
        assert answer.status_code == 501
        assert pip_install("server,worker") in answer.json()["error"]["message"]


def test_a_copy_may_be_named_where_the_workers_file_is_elsewhere(
    serving: Callable[..., Any], tmp_path: Path
) -> None:
    copy = tmp_path / "copy.gguf"
    copy.symlink_to(demo_model())
    with serving(tmp_path / "absent.gguf", tokenizer_files=f"model={copy}") as server:
        assert _count(server, JobSpec.parse("Good night")) == 3


def test_a_vocabulary_without_weights_is_enough(serving: Callable[..., Any], tmp_path: Path) -> None:
    file = write_file(tmp_path / "vocabulary.gguf", "qwen2", {}, {})
    with GgufFile.open(file) as opened:
        expected = Tokenizer.from_gguf(opened).encode("Good night")
    with serving(tmp_path / "absent.gguf", tokenizer_files=f"model={file}") as server, server.http() as http:
        assert http.post("/tokenize", json={"prompt": "Good night"}).json()["tokens"] == expected
        refused = http.post("/tokenize", json={"messages": CHAT})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"
        assert "has no chat template" in refused.json()["error"]["message"]


def test_a_text_that_no_context_has_room_for_is_refused(
    serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_process, "MOST_BYTES", 1000)
    with serving() as server, server.http() as http:
        assert http.post("/tokenize", json={"prompt": "a" * 500}).status_code == 200
        for path, body, param in (
            ("/tokenize", {"prompt": "a" * 1000}, "prompt"),
            ("/tokenize", {"messages": [{"role": "user", "content": "a" * 1000}]}, "messages"),
            ("/detokenize", {"tokens": [100] * 400}, "tokens"),
        ):
            answer = http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert "tokenise it in parts" in answer.json()["error"]["message"]


def test_the_process_ends_itself_where_nobody_else_does(tmp_path: Path) -> None:
    """As where the server was killed: an answer that takes too much processor time is its last."""
    spins = "import nightmill.worker.assembly.tokenizing as t\nt.ANSWER_SECONDS = 0.5\n"
    spins += "t._encoded = lambda model, asked: [None for _ in iter(int, 1)]\nt.main()"
    lines = [{"file": str(demo_model()), "tool_format": "auto", "digest": ""}, {"prompt": "a"}]
    said = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run([sys.executable, "-c", spins], input=said.encode(), timeout=120, check=False)
    assert done.returncode == -signal.SIGPROF


def test_files_are_named_for_models() -> None:
    named = Settings.from_env({"NIGHTMILL_TOKENIZER_FILES": "a=/models/a.gguf, b=/models/b.gguf"})
    assert named.tokenizer_paths == {"a": Path("/models/a.gguf"), "b": Path("/models/b.gguf")}
    for wrong in ("/models/a.gguf", "a=", "=x", "a=/a,b"):
        with pytest.raises(SettingsError, match="NIGHTMILL_TOKENIZER_FILES: must be NAME=PATH"):
            Settings.from_env({"NIGHTMILL_TOKENIZER_FILES": wrong})


def _count(server: Server, spec: JobSpec) -> int:
    import asyncio

    async def run() -> int:
        service = JobService(server.client, ApiKeys.parse(None), ServerLimits())
        tokenizing = Tokenizing(service)
        try:
            return await tokenizing.count("model", spec)
        finally:
            await tokenizing.close()
            service.close()

    return asyncio.run(run())


def test_chats_are_counted_for_other_endpoints(serving: Callable[..., Any], model: LoadedModel) -> None:
    with serving() as server:
        spec = JobSpec.parse({"messages": CHAT, "tools": [_tool()]})
        plain = JobSpec.parse(CHAT)
        assert _count(server, plain) == len(model.encode(CHAT))
        assert _count(server, spec) > _count(server, plain) + 20  # the tool is described


def _tool() -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_a_text_that_takes_too_long_costs_its_sender_alone(
    serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_process, "ANSWER_SECONDS", 1.0)
    usual = tokenizer_process.COMMAND
    monkeypatch.setattr(tokenizer_process, "COMMAND", (sys.executable, "-c", SLEEPER))
    with serving() as server, server.http() as http:
        late: list[httpx2.Response] = []
        asking = threading.Thread(
            target=lambda: late.append(server.http().post("/tokenize", json={"prompt": "slow"}))
        )
        asking.start()
        time.sleep(0.3)
        monkeypatch.setattr(tokenizer_process, "COMMAND", usual)
        monkeypatch.setattr(tokenizer_process, "ANSWER_SECONDS", 20.0)
        assert http.post("/tokenize", json={"prompt": "Good night"}).json()["count"] == 3
        asking.join()
        assert late[0].status_code == 400
        assert "takes more than" in late[0].json()["error"]["message"]


def test_the_process_has_no_secrets_and_ends_with_the_server(
    serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    tells = f"import os; open({str(seen)!r}, 'w').write(str(os.getpid()) + ' ' + ' '.join(os.environ))\n"
    command = (sys.executable, "-c", tells + SLEEPER)
    monkeypatch.setattr(tokenizer_process, "COMMAND", command)
    monkeypatch.setenv("NIGHTMILL_WEBHOOK_SECRET", "whsec_c2VjcmV0")
    with serving() as server, server.http() as http:
        assert http.get("/tokenizer_info").status_code == 200
        pid, *names = seen.read_text().split()
        assert not [name for name in names if name.startswith("NIGHTMILL_")]
        os.kill(int(pid), 0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_only_so_many_wait_for_one_key(serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "MOST_OF_ONE", 0)
    with serving() as server, server.http() as http:
        answer = http.post("/tokenize", json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "busy")
        assert answer.headers["retry-after"]
