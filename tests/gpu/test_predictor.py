"""The block that predicts further tokens (MTP) on a GPU: its guesses are NumPy's, and texts those without.

So are drafts of models that have states and experts, whose guesses the test knows.
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.drafting import Drafts
from nightmill.worker.engine.request import Request
from nightmill.worker.engine.stats import EngineStats
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Experts, ModelSpec
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.runner import CudaRunner
from nightmill.worker.runners.kv_format import KvFormat
from nightmill.worker.runners.reference.runner import ReferenceRunner
from tests.support.cuda_runners import cuda_runner, need_fp8
from tests.support.engines import Bits, bits, complete, engine_of
from tests.support.expert_cases import GPU_EXPERT_FILES
from tests.support.family_cases import file_of
from tests.support.hybrid_cases import GPU_HYBRID_FILES
from tests.support.true_guesses import guess_truly
from tests.unit.runners import test_predicting_on_host as on_host
from tests.unit.runners import test_predictors as predictors

CONTEXT, SLOTS = 384, 48
WISHES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 0.9}, {"top_k": 20, "logprobs": 2}, {"repetition_penalty": 1.3},
)  # fmt: skip


@pytest.fixture(autouse=True)
def sized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases in sizes that there are kernels for."""
    for name in predictors.CASES:
        monkeypatch.setitem(predictors.CASES, name, (GPU_HYBRID_FILES | GPU_EXPERT_FILES)[name])


def with_shared_experts_of_48(spec: ModelSpec) -> ModelSpec:
    """In place of 40, of which FP8 has no kernels."""
    layers = []
    for layer in spec.layers:
        network = layer.feed_forward
        if isinstance(network, Experts) and network.shared is not None:
            layer = replace(layer, feed_forward=replace(network, shared=replace(network.shared, width=48)))
        layers.append(layer)
    return replace(spec, layers=tuple(layers))


def runner_of(file: GgufFile, **options: Any) -> CudaRunner:
    sizes = {"slots": SLOTS, "kv_pages": SLOTS * CONTEXT // 16, "context": CONTEXT, "max_tokens": 512}
    return cuda_runner(file, read_spec(file), tune=False, **(sizes | options))


def asked() -> list[Request]:
    """Prompts of 1 to 300 tokens, some of which begin alike."""
    beginning = np.random.default_rng(1).integers(0, 256, 130).tolist()
    found = []
    for number, length in enumerate((1, 15, 16, 17, 70, 180, 40, 65)):
        own = np.random.default_rng(number).integers(0, 256, length).tolist()
        prompt = (*beginning[: 65 * (number % 3)], *own)
        params = GenerationParams.parse({"max_tokens": 40, "ignore_eos": True} | WISHES[number % 4])
        found.append(Request(str(number), 1, prompt, params, seed=number))
    return found


def run(runner: CudaRunner, drafts: Drafts, *, alone: bool = False) -> tuple[Bits, EngineStats]:
    """What becomes of the requests, all at once or one after the other."""
    with closing(engine_of(runner, CONTEXT, budget=SLOTS + 64, drafts=drafts)) as engine:
        found = Bits()
        for group in [[one] for one in asked()] if alone else [asked()]:
            found |= bits(complete(engine, group))
        return found, engine.stats


@pytest.mark.parametrize("name", predictors.CASES)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "kernels"])
def test_guesses_are_those_of_the_reference_runner(name: str, graphs: bool, tmp_path: Path) -> None:
    """Of the same steps as on the host's emulator of kernels."""
    tensors = {
        f"blk.{block}.exp_probs_b.bias": 4 * np.random.default_rng(block).permutation(experts.count)
        for experts in predictors.CASES[name][1].experts
        for block in range(1, len(predictors.CASES[name][1].layers) + 1)
    }  # fmt: skip
    file = predictors.opened(
        tmp_path, name, {tensor: one.astype(np.float32) for tensor, one in tensors.items()}
    )
    spec = read_spec(file)

    def reference() -> ReferenceRunner:
        runner = ReferenceRunner(file, spec, kv_pages=18, page_size=16, slots=4)
        runner.predict()
        return runner

    told = on_host.rollout(reference(), spec.vocab)
    theirs = on_host.drive(reference(), spec.vocab, told)
    with closing(runner_of(file, slots=4, kv_pages=18, graphs=graphs, predicts=True)) as runner:
        ours = on_host.drive(runner, spec.vocab, told)
    same = compared = 0
    for (_, mine), (_, other) in zip(ours.found, theirs.found, strict=True):
        assert mine.tokens.tolist() == other.tokens.tolist()
        assert mine.guesses is not None
        assert other.guesses is not None
        rows = np.flatnonzero((mine.guesses >= 0).any(axis=1))
        same += int((mine.guesses[rows] == other.guesses[rows]).sum())
        compared += mine.guesses[rows].size
    assert compared == 18
    assert same >= 16  # where logits nearly tie, 16 bits may choose another token


WEIGHTS = [WeightsFormat.ELEMENT, WeightsFormat.FILE, WeightsFormat.FP8]


@pytest.mark.parametrize("name", predictors.CASES)
@pytest.mark.parametrize(("weights", "kv"), [*((one, KvFormat.ELEMENT) for one in WEIGHTS),
                                             (WeightsFormat.ELEMENT, KvFormat.FP8)])  # fmt: skip
def test_drafts_by_the_block_change_no_bit(
    name: str, weights: WeightsFormat, kv: KvFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that guesses at random, and one that knows the model."""
    if weights is WeightsFormat.FP8:
        need_fp8()
        keys, spec = predictors.CASES[name]
        monkeypatch.setitem(predictors.CASES, name, (keys, with_shared_experts_of_48(spec)))
    precision = Precision(weights=weights, kv=kv)
    for tensors, share in ((None, 0.0), (predictors.alike_tensors(predictors.predicting(name)), 0.5)):
        file = predictors.opened(tmp_path, name, tensors)
        plain, _ = run(runner_of(file, precision=precision), Drafts.OFF, alone=True)
        for graphs in (True, False):
            runner = runner_of(file, precision=precision, predicts=True, graphs=graphs, depth=3)
            assert runner.predicts
            drafted, stats = run(runner, Drafts.NGRAM)
            assert drafted == plain
            assert stats.guessed_tokens > 60
            assert stats.guessed_right >= share * stats.guessed_tokens


WITH_EXPERTS = ["qwen35moe", "granitehybrid, with experts", "nemotron_h_moe"]


@pytest.mark.parametrize("name", WITH_EXPERTS)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "kernels"])
def test_drafts_change_no_bit_of_states_with_experts(
    name: str, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_of(tmp_path, *GPU_EXPERT_FILES[name])
    plain, _ = run(runner_of(file), Drafts.OFF, alone=True)
    answers = {job: tuple(one[0]) for job, one in plain.items()}
    guess_truly(monkeypatch, answers, vocab=256)
    drafted, stats = run(runner_of(file, graphs=graphs, depth=3), Drafts.NGRAM)
    assert drafted == plain
    assert stats.guessed_tokens > stats.guessed_right > 20
