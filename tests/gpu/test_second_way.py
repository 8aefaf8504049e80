"""What a worker does if products of packed weights fail on its GPU before it takes jobs."""

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import NightmillError
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.process import running_worker
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.starting import StartStep
from tests.gpu import failing_products_worker
from tests.gpu.test_packed import SMALL
from tests.support.cuda_runners import ON_GPU, cuda_runner, need_fp8
from tests.support.driving import GREEDY, generate
from tests.support.quantised_models import Shape, write

PATIENCE = 180.0
CONTEXT = 256


@pytest.mark.parametrize("name", ["Q4_K_M", "Q8_0", "Q4_1"])
@pytest.mark.parametrize(
    "weights", [WeightsFormat.FILE, WeightsFormat.FP8], ids=lambda weights: weights.value
)
def test_the_products_of_a_model_pass(name: str, weights: WeightsFormat, tmp_path: Path) -> None:
    if weights is WeightsFormat.FP8:
        need_fp8()
    file = GgufFile.open(write(tmp_path / "model.gguf", Shape(SMALL), name, pool_bytes=1 << 20))
    told: list[str] = []
    runner = cuda_runner(
        file, read_spec(file), slots=64, kv_pages=256, max_tokens=512, context=CONTEXT, tune=False,
        precision=Precision(weights=weights),
        progress=lambda step, news: told.append(news) if step is StartStep.SELF_TEST else None,
    )  # fmt: skip
    runner.close()
    assert any("qkv of layer 0" in line and line.endswith(", 64 rows") for line in told)


def test_plain_products_give_the_tokens_of_the_usual_ones(tmp_path: Path) -> None:
    file = GgufFile.open(write(tmp_path / "model.gguf", Shape(SMALL), "Q4_K_M", pool_bytes=1 << 20))
    spec, rng = read_spec(file), np.random.default_rng(2)
    prompts = [tuple(rng.integers(0, spec.vocab, length).tolist()) for length in (1, 2, 17, 40, 100, 5)]
    requests = [Request(str(number), 1, prompt, GREEDY, seed=0) for number, prompt in enumerate(prompts)]
    usual = Precision(weights=WeightsFormat.FILE)
    found = []
    for precision in (usual, replace(usual, plain_products=True)):
        runner = cuda_runner(
            file,
            spec,
            slots=6,
            kv_pages=6 * CONTEXT // 16,
            max_tokens=512,
            context=CONTEXT,
            precision=precision,
        )
        with closing(runner):
            found.append(
                (str(runner.arithmetic), generate(runner, requests, context=CONTEXT, token_budget=256))
            )
    assert found[0] == found[1]


@pytest.mark.parametrize("fault", failing_products_worker.FAULTS)
def test_a_worker_whose_products_fail_serves_with_plain_ones(
    fault: str, sqlite_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", fault)
    settings = sqlite_settings.model_copy(update=ON_GPU | {"model": demo_model(), "weights": "file"})
    log = tmp_path / "worker.log"
    with Client(settings) as client, running_worker(client, log, command=failing_products_worker.COMMAND):
        ids = client.enqueue_many(["Write a haiku about rain"] * 8, max_tokens=20, ignore_eos=True)
        client.wait(ids, timeout=PATIENCE)
        assert {job.state for job in client.results(ids)} == {JobState.SUCCEEDED}
        (worker,) = client.worker_store.serving()
        assert (worker.note or "").startswith("plain products, slower than usual")
    said = log.read_text()
    reason = {"wrong": r"is wrong on this GPU", "trap": r"the GPU failed|ended before", "hang": r"GPU hang\?"}
    assert re.search(rf"({reason[fault]}).*started once more, with plain products", said)


def test_without_a_second_way_the_worker_ends_with_the_remedy(
    sqlite_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_fp8()
    monkeypatch.setenv("FAULT", "wrong")
    settings = sqlite_settings.model_copy(update=ON_GPU | {"model": demo_model(), "weights": "fp8"})
    with (
        Client(settings) as client,
        pytest.raises(NightmillError, match="--weights 16bit"),
        running_worker(client, tmp_path / "log", command=failing_products_worker.COMMAND),
    ):
        pytest.fail("it serves")
