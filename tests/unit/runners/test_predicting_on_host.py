"""Blocks that predict further tokens (MTP) by the CUDA runner, whole on the host, held to the NumPy one."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.drafting import Drafts
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import Drawn, Runner, StepBatch
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.predicting import draw_groups, known_tokens
from nightmill.worker.runners.gpu.runner import CudaRunner
from nightmill.worker.runners.reference.runner import ReferenceRunner
from tests.support.driving import Chunk, Pages
from tests.support.engines import Bits, bits, complete, engine_of
from tests.support.expert_cases import GPU_EXPERT_FILES
from tests.support.ggufs import spec_tensors, write_file
from tests.support.hybrid_cases import GPU_HYBRID_FILES, KEYS
from tests.unit.runners import test_predictors as predictors
from tests.unit.runners.host_runner import host_runner, run_on_host

pytestmark = pytest.mark.heavy

PAGE, PROMPT, GUESSED = 16, 67, 2
Tensors = dict[str, npt.NDArray[np.float32]]


def fewer_layers(name: str, keys: dict[str, Any], layers: Sequence[int]) -> tuple[dict[str, Any], ModelSpec]:
    """A case with some of its layers."""
    own, like = (GPU_HYBRID_FILES | GPU_EXPERT_FILES)[name]
    return own | keys, replace(like, layers=tuple(like.layers[index] for index in layers))


CASES = {
    "qwen35": fewer_layers("qwen35", {"full_attention_interval": 2}, (0, 2)),
    "glm4moe": fewer_layers("glm4moe", {}, (0, 1)),
    "qwen35moe": (GPU_HYBRID_FILES | GPU_EXPERT_FILES)["qwen35moe"],
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> set[str]:
    for name, case in CASES.items():
        monkeypatch.setitem(predictors.CASES, name, case)
    return run_on_host(monkeypatch, tmp_path, few=getattr(request, "param", False))


def clear(name: str) -> Tensors:
    """Biases with which experts are chosen by no narrow margin: elements could choose others than floats."""
    spec, order = CASES[name][1], np.random.default_rng(7)
    return {
        f"blk.{block}.exp_probs_b.bias": 4 * order.permutation(experts.count).astype(np.float32)
        for experts in spec.experts
        for block in range(1, len(spec.layers) + 1)
    }


class Driven:
    """A runner that computes two texts step by step; `drawn`: what each has drawn, by place."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.pages = runner, Pages(3, 6)
        self.found: list[tuple[StepBatch, Drawn]] = []

    def step(self, *chunks: Chunk, admit: bool = False, following: Sequence[int] = ()) -> list[int]:
        """Compute a step; the tokens that it drew."""
        batch = self.pages.batch(chunks, admit=admit)
        batch = replace(batch, following=np.array(following, dtype=np.int32))
        self.runner.launch(batch)
        drawn = self.runner.collect()
        assert drawn is not None
        self.found.append((batch, drawn))
        return drawn.tokens.tolist()


def drive(runner: Runner, vocab: int, told: list[int]) -> Driven:
    """A prompt in two pieces, beside another; tokens one by one; right guesses and a wrong one; a token.

    told  what the first text draws behind its prompt
    """
    rng = np.random.default_rng(4)
    text = [*rng.integers(0, vocab, PROMPT).tolist(), *told]
    other = rng.integers(0, vocab, 5).tolist()
    driven = Driven(runner)
    (drew,) = driven.step(Chunk(1, text, 0, 64, draws=0), Chunk(2, other, 0, 5), admit=True,
                          following=[text[64], -1])  # fmt: skip
    driven.step(Chunk(1, text, 64, 3))
    driven.step(Chunk(1, text, 67, 1, drawn=True), Chunk(2, [*other, drew], 5, 1, drawn=True))
    wrong = [(one + 1) % vocab for one in text]
    guesses = [Chunk(1, text, 68 + place, 1, drawn=True) for place in range(1 + GUESSED)]
    if not runner.snapshots:  # else states would have to be taken back
        guesses.append(Chunk(1, wrong, 69 + GUESSED, 1, drawn=True))
    driven.step(*guesses)
    driven.step(Chunk(1, text, 69 + GUESSED, 1, drawn=True))
    return driven


def rollout(runner: Runner, vocab: int) -> list[int]:
    """What the text of `drive` draws."""
    told: list[int] = []
    text = np.random.default_rng(4).integers(0, vocab, PROMPT).tolist()
    driven = Driven(runner)
    driven.step(Chunk(1, text, 0, 64, draws=0), admit=True, following=[text[64]])
    told += driven.step(Chunk(1, text, 64, 3))
    for place in range(3 + GUESSED):
        told += driven.step(Chunk(1, [*text, *told], PROMPT + place, 1, drawn=True))
    return told


@pytest.mark.parametrize(
    ("name", "launched", "graphs"),
    [
        ("qwen35", True, True), ("glm4moe", False, True),
        pytest.param("qwen35", False, False, marks=pytest.mark.slow),
        pytest.param("glm4moe", False, False, marks=pytest.mark.slow),
    ],
    indirect=["launched"],
)  # fmt: skip
def test_guesses_are_those_of_the_reference_runner(
    launched: set[str], name: str, graphs: bool, tmp_path: Path
) -> None:
    file = predictors.opened(tmp_path, name, clear(name))
    spec = read_spec(file)

    def reference() -> ReferenceRunner:
        runner = ReferenceRunner(file, spec, kv_pages=18, page_size=PAGE, slots=4)
        runner.predict()
        return runner

    told = rollout(reference(), spec.vocab)
    theirs = drive(reference(), spec.vocab, told)
    with closing(host_runner(file, spec, kv_pages=18, graphs=graphs, predicts=True)) as runner:
        assert runner.predicts
        ours = drive(runner, spec.vocab, told)
    compared = 0
    for (_, mine), (_, other) in zip(ours.found, theirs.found, strict=True):
        assert mine.tokens.tolist() == other.tokens.tolist()
        assert mine.guesses is not None
        assert other.guesses is not None
        told_rows = np.flatnonzero((mine.guesses >= 0).any(axis=1))
        assert mine.guesses[told_rows].tolist() == other.guesses[told_rows].tolist()
        compared += len(told_rows)
    # Of a draft, behind the last draw that follows right guesses.
    _, drafted = ours.found[3]
    assert drafted.guesses is not None
    assert np.flatnonzero((drafted.guesses >= 0).any(axis=1)).tolist() == [GUESSED]
    assert compared == 6
    assert launched >= {"choose_draws", "next_tokens", "pair_rows", "go_on"}


def asked() -> list[Request]:
    wishes: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0}, {"temperature": 0.9}, {"top_k": 20, "logprobs": 2}, {"repetition_penalty": 1.3},
    )  # fmt: skip
    return [
        Request(
            str(n), 1, tuple(range(5, 19 + 3 * n)),
            GenerationParams.parse({"max_tokens": 8, "ignore_eos": True} | wishes[n]), seed=n,
        )
        for n in range(4)
    ]  # fmt: skip


def texts(runner: CudaRunner, drafts: Drafts) -> tuple[Bits, int, int]:
    """What becomes of the requests; the guesses, and those that were right."""
    with closing(engine_of(runner, 96, budget=100, drafts=drafts)) as engine:
        done = bits(complete(engine, asked()))
        return done, engine.stats.guessed_tokens, engine.stats.guessed_right


@pytest.mark.parametrize(
    "name", ["glm4moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen35", "qwen35moe"))]
)
def test_drafts_by_the_block_change_no_bit(
    launched: set[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that guesses at random, and one that knows the model."""
    for tensors, share in ((None, 0.0), (predictors.alike_tensors(predictors.predicting(name)), 0.5)):
        file = predictors.opened(tmp_path, name, tensors)
        spec = read_spec(file)
        plain, _, _ = texts(host_runner(file, spec, slots=16), Drafts.OFF)
        drafted, guessed, right = texts(host_runner(file, spec, slots=16, predicts=True), Drafts.NGRAM)
        assert drafted == plain
        assert guessed > 10
        assert right >= share * guessed


def in_q8_0(path: Path, name: str) -> GgufFile:
    """A file of the case, with such a block, whose matrices are packed where their rows are whole blocks."""
    keys, like = CASES[name]
    keys = KEYS | keys | {"block_count": len(like.layers) + 1, "nextn_predict_layers": 1}
    tensors: dict[str, npt.NDArray[Any]] = spec_tensors(like) | predictors.block_tensors(
        predictors.predicting(name)
    )
    for tensor, numbers in tensors.items():
        if numbers.ndim == 2 and numbers.shape[1] % 32 == 0 and "ssm_conv" not in tensor:
            tensors[tensor] = quantize(numbers, GGMLQuantizationType.Q8_0)
    return GgufFile.open(write_file(path / "q8.gguf", like.family, keys, tensors, GGMLQuantizationType.Q8_0))


@pytest.mark.parametrize("weights", [WeightsFormat.FILE, WeightsFormat.FP8])
def test_the_memory_plan_covers_what_the_block_takes(
    launched: set[str], weights: WeightsFormat, tmp_path: Path
) -> None:
    """In each format of weights it takes what is planned, and little less."""
    file = in_q8_0(tmp_path, "qwen35")
    spec, precision = read_spec(file), Precision(weights=weights)
    assert spec.predictor is not None
    taken, planned, formats = [], [], set[Format]()
    for predicts in (False, True):
        with closing(host_runner(file, spec, predicts=predicts, precision=precision, slots=8)) as runner:
            plan, device = runner.memory, runner.device
            planned.append(plan.weights + plan.workspace + plan.cache + plan.states.bytes)
            taken.append(sum(device.sizes.values()))
            if runner._predictor is not None:
                formats = set(runner._predictor._weights.block.layers[0].formats)
    assert 0 <= (planned[1] - planned[0]) - (taken[1] - taken[0]) < 8 << 10
    wanted = {"file": {Format.Q8_0}, "fp8": {Format.FP8}}
    assert formats == wanted[weights.value]


def test_the_tokens_behind_those_of_a_step() -> None:
    """Draws give them, the step has them, or the engine knows them."""
    text, pages = list(range(100, 200)), Pages(4, 6)
    batch = pages.batch(
        [
            Chunk(0, text, 9, 1, drawn=True),
            Chunk(2, text, 20, 1, draws=0, drawn=True),
            *(Chunk(2, text, place, 1, drawn=True) for place in (21, 22, 23)),
            Chunk(3, text, 0, 3, draws=0),
            Chunk(1, text, 0, 2),
        ],
        admit=False,
    )
    batch = replace(batch, following=np.array([-1, 121, -1, -1, -1, 103, -1], dtype=np.int32))
    assert draw_groups(batch) == [(0, 1, 0), (1, 3, 2), (4, 1, 6)]
    assert known_tokens(batch).tolist() == [-1, 121, -2, -3, -4, 101, 102, 103, 101, -5]
