"""A real model on the GPU: its greedy texts are those of llama.cpp, and the demo answers with it."""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from nightmill.jobs.settings import Settings
from nightmill.worker.link.loading import build_engine, load_model
from tests.real_model import expected_rows, hold_to_llama_cpp, real_model
from tests.servers import worker_env


def test_greedy_texts_are_those_of_llama_cpp() -> None:
    settings = Settings(model=real_model(), gpu=0, max_sequences=32, context=512)
    with closing(load_model(settings)) as model, closing(build_engine(settings, model)) as engine:
        hold_to_llama_cpp(engine, model, expected_rows())


def test_the_demo_generates_on_the_gpu(directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nightmill", "demo", "--gpu", "--haiku", "-n", "8", "--json"],
        env=worker_env(Settings(data_dir=directory)),
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
