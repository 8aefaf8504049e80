"""Models with mixtures of experts: computed as by the reference runner, with the same bits in any company."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Experts, ModelSpec, RouterScores
from nightmill.worker.runners.gpu.computed import refusal
from nightmill.worker.runners.gpu.device.operands import INT, Buffer
from nightmill.worker.runners.gpu.feed_forward import Mixture
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.runner import CudaRunner
from nightmill.worker.runners.gpu.weights.layout import ExpertWeights, LayerWeights
from nightmill.worker.runners.reference import model as reference_model
from nightmill.worker.runners.reference import ops
from nightmill.worker.runners.reference.experts import choose
from tests.support.comparing import compare_logits
from tests.support.cuda_runners import cuda_runner, need_fp8
from tests.support.driving import BLOCK, Chunk, Cuda, HasLogits, Pages, Reference, logits_of
from tests.support.engines import Bits, bits, complete, engine_of, mixed_requests
from tests.support.expert_cases import GPU_EXPERT_FILES
from tests.support.family_cases import file_of
from tests.support.ggufs import half_tensors
from tests.tiny import EXPERTS, expected, unpacked

CONTEXT, PROMPT, DECODED = 256, 80, 8
CLEAR = 6e-3  # least distance
Array = npt.NDArray[Any]
TINY = EXPERTS
PRECISIONS = {"half": Precision(), "weights as in the file": Precision(weights=WeightsFormat.FILE)}
"""In others tokens of so small models go to other experts than those of float."""
CHUNKS = {"whole": [80], "in pieces": [64, 16], "with rows that do not draw": [64, 16]}
NEAR = 0.02
"""Logits of a router that are no further apart may change places in half."""
LEAST = -1e30
COMMON = (0, 40, 90)  # tokens that prompts begin with


@pytest.mark.parametrize("prompt", CHUNKS)
@pytest.mark.parametrize("name", GPU_EXPERT_FILES)
def test_logits_agree_with_the_reference_runner(name: str, prompt: str, tmp_path: Path) -> None:
    """A prompt, then a few tokens one by one, of weights that half holds exactly."""
    keys, like = GPU_EXPERT_FILES[name]
    file = file_of(tmp_path, keys, like, **half_tensors(like))
    spec = read_spec(file)
    text = clear_text(file, spec, PROMPT + DECODED)
    chunks, start = [], 0
    for length in CHUNKS[prompt]:
        chunks.append(Chunk(0, text, start, length, 12 if "do not draw" in prompt else length))
        start += length
    chunks += [Chunk(0, text, PROMPT + index, 1, drawn=True) for index in range(DECODED)]
    blocks = CONTEXT // BLOCK
    cuda = Cuda(
        file, spec, slots=1, kv_pages=blocks, max_tokens=128, max_draws=128, context=CONTEXT, tune=False
    )
    with closing(cuda.runner):
        reference = Reference(file, spec, kv_pages=blocks, page_size=BLOCK, slots=1)
        ours, theirs = (
            np.concatenate(
                [logits_of(subject, pages, [chunk], admit=index == 0) for index, chunk in enumerate(chunks)]
            )
            for subject, pages in ((cuda, Pages(1, blocks)), (reference, Pages(1, blocks)))
        )
    compare_logits(ours, theirs).check()


def clear_text(file: GgufFile, spec: ModelSpec, length: int) -> list[int]:
    """Random tokens, none of which any layer might as well send to another expert.

    Of many texts that of the largest least distance, of what is chosen last to what is chosen next: in half
    logits are off by some thousandths, and from a token that goes elsewhere on all that follow are others.
    """
    margins: list[float] = []

    def noting(experts: Experts, logits: Array, bias: Array | None = None) -> tuple[Array, Array]:
        chosen, weights = choose(experts, logits, bias)
        scores = logits
        if bias is not None:  # a score rises by a quarter of what its logit does, at most
            shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            sigmoid = experts.scores is RouterScores.SIGMOID
            scores = 4 * ((ops.sigmoid(logits) if sigmoid else shares) + bias)
        best = -np.sort(-scores, axis=1)
        margins.append(float((best[:, experts.used - 1] - best[:, experts.used]).min()))
        return chosen, weights

    best, found = -1.0, [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_model, "choose", noting)
        reference = Reference(file, spec, kv_pages=CONTEXT // BLOCK, page_size=BLOCK, slots=1)
        for seed in range(64):
            if seed >= 16 and best > CLEAR:
                break
            text = np.random.default_rng(seed).integers(0, spec.vocab, length).tolist()
            margins.clear()
            logits_of(reference, Pages(1, CONTEXT // BLOCK), [Chunk(0, text, 0, length, length)], admit=True)
            if min(margins) > best:
                best, found = min(margins), text
    assert best > CLEAR, "no text is clear"
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", TINY)
def test_a_tiny_models_answers_are_those_of_two_engines(name: str, precision: str, tmp_path: Path) -> None:
    """The logits of all tokens of six prompts and of their answers, which are given, not drawn.

    In half a router sends a token elsewhere where its scores are a near tie, and all is other from there on.
    So the reference runner is made to choose as the kernels did, and agrees as far as its own logits do with
    what they are if the inputs of products are rounded to half. Where no token went elsewhere, its logits are
    those of the two engines, and the kernels draw their tokens.
    """
    file, spec = opened(name, tmp_path)
    answers = expected(name)["prompts"]
    alike = 0
    cuda = forcing(file, spec, PRECISIONS[precision])
    with closing(cuda.runner):
        for one in answers:
            forced = Forced.by(cuda, one["prompt"], one["greedy"])
            same, moved = forced.again(file, spec)
            rounded, _ = forced.again(file, spec, to_half=True)
            bound = max(1e-4, 4 * compare_logits(rounded, same).mean_kl)
            compare_logits(forced.logits, same).check(mean_kl=bound)
            assert max(moved, default=0.0) < NEAR
            if not moved:
                last, alike = len(one["prompt"]) - 1, alike + 1
                np.testing.assert_allclose(same[last], one["logits_all"], rtol=0, atol=2e-3)
                np.testing.assert_array_equal(forced.logits[last:-1].argmax(axis=1), one["greedy"])
    assert alike, "in each text some token went elsewhere"


def forcing(file: GgufFile, spec: ModelSpec, precision: Precision) -> Cuda:
    """A runner whose launches are no graphs, so that what it chooses can be read between them."""
    return Cuda(
        file, spec, slots=1, kv_pages=512 // BLOCK, max_tokens=512, max_draws=512, context=512, tune=False,
        precision=precision, graphs=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Forced:
    """The steps of a text, a prompt at once and given tokens one by one, as kernels computed them."""

    chunks: list[Chunk]
    logits: Array  # of all tokens
    chosen: list[Array]  # experts (T, used), of each layer of each step

    @classmethod
    def by(cls, cuda: Cuda, prompt: list[int], drawn: list[int]) -> "Forced":
        """Compute them."""
        text, length = [*prompt, *drawn], len(prompt)
        chunks = [Chunk(0, text, 0, length, length)]
        chunks += [Chunk(0, text, length + index, 1, drawn=True) for index in range(len(drawn))]
        with chosen_by_kernels() as chosen:
            logits = computed(cuda, chunks)
        return cls(chunks, logits, chosen)

    def again(self, file: GgufFile, spec: ModelSpec, *, to_half: bool = False) -> tuple[Array, list[float]]:
        """Logits of the reference runner, if it chooses these, and how near ties were where it had others.

        to_half  round what products multiply their weights with
        """
        linear = ops.linear

        def rounding(x: Array, *given: Any, **options: Any) -> Array:
            return linear(x.astype(np.float16).astype(x.dtype) if to_half else x, *given, **options)

        reference = Reference(file, spec, kv_pages=512 // BLOCK, page_size=BLOCK, slots=1)
        with choosing(self.chosen) as moved, pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "linear", rounding)
            return computed(reference, self.chunks), moved


def computed(subject: HasLogits, chunks: list[Chunk]) -> Array:
    """The logits of all steps, one after the other."""
    pages = Pages(1, 512 // BLOCK)
    return np.concatenate(
        [logits_of(subject, pages, [chunk], admit=index == 0) for index, chunk in enumerate(chunks)]
    )


@contextmanager
def chosen_by_kernels() -> Iterator[list[Array]]:
    """The experts (T, used) of each layer, as the kernels choose them in the meantime."""
    chosen: list[Array] = []
    queue = Mixture._queue

    def noting(
        self: Mixture, x: Buffer, layer: LayerWeights, own: ExpertWeights, rows: int, slots: int
    ) -> None:
        queue(self, x, layer, own, rows, slots)
        device, at = self._launchers.device, self._room.chosen
        chosen.append(device.download(at.address, (rows, at.shape[1]), INT))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mixture, "_queue", noting)
        yield chosen


@contextmanager
def choosing(given: list[Array]) -> Iterator[list[float]]:
    """Have the reference runner take these experts in each layer; by how much it had scored others higher."""
    moved: list[float] = []
    layers = iter(given)

    def taking(experts: Experts, logits: Array, bias: Array | None = None) -> tuple[Array, Array]:
        assert experts.normalise or experts.scores is RouterScores.SOFTMAX_OF_CHOSEN
        chosen, weights = choose(experts, logits, bias)
        taken = next(layers)[: len(chosen)]
        for row in np.nonzero((np.sort(chosen) != np.sort(taken)).any(axis=1))[0]:
            mine, others = (set(some[row].tolist()) for some in (chosen, taken))
            left, instead = sorted(mine - others), sorted(others - mine)
            moved.append(float(logits[row, left].max() - logits[row, instead].min()))
        same = (np.sort(chosen) == np.sort(taken)).all(axis=1)
        scores = np.where(same[:, None], logits, LEAST)
        rows = np.arange(len(scores))[:, None]
        scores[rows, taken] = logits[rows, taken]
        again = choose(experts, scores, bias)
        return np.where(same[:, None], chosen, again[0]), np.where(same[:, None], weights, again[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_model, "choose", taking)
        yield moved


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", TINY)
def test_a_tiny_models_texts_are_those_of_two_engines(name: str, graphs: bool, tmp_path: Path) -> None:
    """Or a router was undecided about some token of a text that is another."""
    file, spec = opened(name, tmp_path)
    answers = expected(name)["prompts"]
    runner = cuda_runner(
        file, spec, slots=6, context=512, kv_pages=400, max_tokens=512, tune=False, graphs=graphs,
        depth=3,
    )  # fmt: skip
    with closing(runner):
        params = GenerationParams.parse({"temperature": 0.0, "max_tokens": 16, "ignore_eos": True})
        requests = [Request(f"j{n}", 1, tuple(one["prompt"]), params, 0) for n, one in enumerate(answers)]
        done = complete(engine_of(runner, 512, budget=300), requests)
    others = [one for n, one in enumerate(answers) if list(done[f"j{n}"].token_ids) != one["greedy"]]
    assert len(others) <= len(answers) // 2
    cuda = forcing(file, spec, Precision())
    with closing(cuda.runner):
        for one in others:
            _, moved = Forced.by(cuda, one["prompt"], one["greedy"]).again(file, spec)
            assert 0 < max(moved, default=0.0) < NEAR, "no router was undecided"


def opened(name: str, folder: Path) -> tuple[GgufFile, ModelSpec]:
    """A tiny model, which the kernels take."""
    file = GgufFile.open(unpacked(name, folder))
    spec = read_spec(file)
    assert refusal(spec) is None
    return file, spec


@pytest.fixture(scope="module", params=[WeightsFormat.FILE, WeightsFormat.ELEMENT, WeightsFormat.FP8])
def weights(request: pytest.FixtureRequest) -> WeightsFormat:
    kind: WeightsFormat = request.param
    if kind is WeightsFormat.FP8:
        need_fp8()
    return kind


@pytest.fixture(scope="module", params=TINY)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return opened(str(request.param), tmp_path_factory.mktemp("model"))[0]


def runner_of(file: GgufFile, weights: WeightsFormat, **options: Any) -> CudaRunner:
    defaults = {"slots": 12, "kv_pages": 400, "max_tokens": 1024, "tune": False, "context": 512}
    precision = Precision(weights=weights)
    return cuda_runner(file, read_spec(file), precision=precision, **(defaults | options))


@pytest.fixture(scope="module")
def plain(file: GgufFile, weights: WeightsFormat) -> Iterator[Bits]:
    """Each request alone, its prompt in one piece."""
    with closing(runner_of(file, weights)) as runner:
        found: dict[str, Completion] = {}
        for one in mixed_requests(18, COMMON):
            found |= complete(engine_of(runner, 512, sharing=False), [one])
        yield bits(found)


@pytest.mark.parametrize(("pages", "sequences", "depth"), [(40, 12, 3), (400, 12, 2), (400, 3, 1)])
def test_under_every_schedule_texts_have_the_bits_that_they_have_alone(
    file: GgufFile, weights: WeightsFormat, plain: Bits, pages: int, sequences: int, depth: int
) -> None:
    """Sequences give way where pages are few, prompts come in pieces, and beginnings are shared."""
    with closing(runner_of(file, weights, depth=depth, kv_pages=pages)) as runner:
        for budget in (sequences + 70, 1000):
            requests = mixed_requests(18, COMMON)
            order = np.random.default_rng(budget).permutation(len(requests))
            mixed = [requests[n] for n in order]
            engine = engine_of(runner, 512, budget=budget, sequences=sequences)
            assert bits(complete(engine, mixed)) == plain


def test_tokens_of_padding_are_sent_nowhere(tmp_path: Path) -> None:
    """A step of 25 sequences is replayed as one of 28: what experts were sent is the 25's alone."""
    file = GgufFile.open(unpacked("qwen3moe-q8_0", tmp_path))
    spec = read_spec(file)
    experts = spec.layers[-1].feed_forward
    assert isinstance(experts, Experts)
    text, pages = [1, 2, 3, 4, 5, 6], Pages(32, 2)
    with closing(runner_of(file, WeightsFormat.FILE, slots=32, kv_pages=64)) as runner:
        runner.launch(pages.batch([Chunk(slot, text, 0, 3) for slot in range(25)], admit=True))
        runner.collect()
        drawn = [Chunk(slot, text, 3, 1, 1, drawn=True) for slot in range(25)]
        runner.launch(pages.batch(drawn, admit=False))
        runner.collect()
        (mixture,) = {layer.kernels.mixture for layer in runner._model.layers}
        assert mixture is not None
        held = mixture._room.chosen
        chosen: npt.NDArray[np.int32] = runner.device.download(held.address, (28, experts.used), np.int32)
    assert (chosen[:25] >= 0).all()
    assert (chosen[25:] == -1).all()
