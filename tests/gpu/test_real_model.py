"""A real model on the GPU: its greedy texts are those of llama.cpp, and the demo answers with it."""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.model import load_model
from nightmill.worker.engine.request import Request
from tests.support.cuda_runners import ON_GPU, need_fp8
from tests.support.engines import complete
from tests.support.real_model import TOKENS, expected_rows, hold_to_llama_cpp, real_model
from tests.support.servers import worker_env


def settings_of(weights: Literal["file", "16bit", "fp8"]) -> Settings:
    """Of a worker with the real model, in 4 GiB of memory."""
    return Settings(
        model=real_model(), max_sequences=32, context=512, weights=weights, gpu_memory=4 << 30, **ON_GPU
    )


@pytest.mark.parametrize("weights", ["file", "16bit"])
def test_greedy_texts_are_those_of_llama_cpp(weights: Literal["file", "16bit"]) -> None:
    settings = settings_of(weights)
    with closing(load_model(settings)) as model, closing(build_engine(settings, model)) as engine:
        hold_to_llama_cpp(engine, model, expected_rows())


def test_with_fp8_weights_it_writes_texts_of_its_own() -> None:
    """They are other weights: texts part from those of the file's, but not all of them at once."""
    need_fp8()
    rows = expected_rows()
    settings = settings_of("fp8")
    params = GenerationParams(max_tokens=TOKENS, temperature=0.0)
    requests = [Request(str(at), 1, tuple(row["prompt_ids"]), params, seed=0) for at, row in enumerate(rows)]
    with closing(load_model(settings)) as model, closing(build_engine(settings, model)) as engine:
        done = complete(engine, requests)
    drawn = [done[request.job_id].token_ids for request in requests]
    assert all(drawn)
    assert any(tokens[0] == row["token_ids"][0] for tokens, row in zip(drawn, rows, strict=True))


def test_the_demo_generates_on_the_gpu(directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nightmill", "demo", "--gpu", "--haiku", "-n", "8", "--json"],
        env=worker_env(Settings(data_dir=directory, gpu_memory=4 << 30, **ON_GPU)),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [job["state"] for job in found] == ["succeeded"] * 8
    assert all(job["text"] for job in found)
    assert "CUDA runner on GPU 0" in (directory / "demo" / "worker.log").read_text()
