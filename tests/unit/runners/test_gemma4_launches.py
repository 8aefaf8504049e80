"""Gemma 4 on a GPU: what is launched and where it is, held to compiled kernels by a driver that records."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.spec import ModelSpec, Role
from nightmill.worker.runners.base import PageKind
from nightmill.worker.runners.gpu import feed_forward
from nightmill.worker.runners.gpu.attention.pieces import NO_PIECES
from nightmill.worker.runners.gpu.attention.plans import AttentionPlans
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.experts import room
from nightmill.worker.runners.gpu.kv_cache import kinds_layout
from nightmill.worker.runners.gpu.layers import Layer
from nightmill.worker.runners.gpu.memory import RunnerSizes
from nightmill.worker.runners.gpu.mixers import AttentionMixer
from nightmill.worker.runners.gpu.planning import RunnerPlanner
from nightmill.worker.runners.gpu.precision import HALF, Precision, WeightsFormat
from nightmill.worker.runners.gpu.runner import CudaRunner
from nightmill.worker.runners.gpu.step_inputs import StepInputs, StepShape
from nightmill.worker.runners.gpu.steps import drawing_rows
from nightmill.worker.runners.gpu.weights.layout import runs_of, weight_bytes
from nightmill.worker.runners.kv_format import KvFormat
from tests.support.cuda_runners import cuda_runner
from tests.support.driving import Chunk, Pages
from tests.support.family_cases import file_of
from tests.support.gemma4_cases import GEMMA4_FILES, LARGE_EXPERTS, LARGE_HEADS
from tests.support.gemma4_shapes import GEMMA4_SHAPES
from tests.support.parts import file_of_halves, file_of_q8_0
from tests.support.quantised_models import quantised
from tests.support.specs import GEMMAS
from tests.unit.runners.recorded_cuda import RecordedDriver
from tests.unit.runners.recorded_steps import allocations, take_steps

pytestmark = pytest.mark.heavy  # kernels are compiled where nvcc is

CONTEXT = 256
SHARING = GEMMAS["layers that read others' keys"]
OPTIONS: dict[str, Any] = {"slots": 2, "context": CONTEXT, "kv_pages": 64, "max_tokens": 128, "tune": False}


def launch(runner: CudaRunner, *steps: list[Chunk]) -> None:
    """Run steps, of which the first has new sequences."""
    take_steps(runner, Pages(2, CONTEXT // 16), [*steps])


def test_layers_with_other_heads_have_tiles_of_their_own(
    hopper: RecordedDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two query heads share a KV head in the one, so that a tile has 64 tokens, and four in the other: 32."""
    seen: list[tuple[int, int, int, int]] = []
    mix = AttentionMixer.mix

    def noting(self: AttentionMixer, layer: Layer, inputs: StepInputs, shape: StepShape) -> None:
        planned, sizes = inputs.planned(self.plan), shape.planned(self.plan)
        seen.append((layer.cache.kind, planned.tiles, sizes.tiles, self.plan))
        mix(self, layer, inputs, shape)

    monkeypatch.setattr(AttentionMixer, "mix", noting)
    file = file_of_halves(tmp_path, SHARING)
    with closing(cuda_runner(file, SHARING, graphs=False, **OPTIONS)) as runner:
        launch(runner, [Chunk(0, [1] * CONTEXT, 0, 100), Chunk(1, [1] * CONTEXT, 0, 5)])
        (first, _, count, plan), (other, place, more, its) = seen[:2]
        behind = [(kind, tiles, plan) for kind, _, tiles, plan in seen[2:]]
        assert behind == [(first, 2, 0), (other, 2, 1)], "layers that keep nothing have the rows that draw"
        assert (count, plan, more, its) == (3, 0, 5, 1)
        assert {first, other} == {0, 1}
        words = runner._steps._host[(runner._turn - 1) % runner.depth]
        own = (place - runner._steps._packed) // 4
        tiles = words[own - 2 * count : own + 2 * more].reshape(-1, 2)
        assert sorted(map(tuple, tiles[:count].tolist())) == [(0, 0), (0, 1), (1, 0)]
        assert sorted(map(tuple, tiles[count:].tolist())) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
        layers = runner._model.layers
        assert [layer.cache for layer in layers[2:]] == [layer.cache for layer in layers[:2]]
        tables = {id(one.kernels.mixer.qkv._rotation.table) for one in layers}  # type: ignore[union-attr]
        assert len(tables) == 2, "layers that rotate alike share a table"


def test_rows_that_draw_are_a_step_of_their_own() -> None:
    """Each sees what it saw before: its own position, and the pages of its sequence, of every kind."""
    kinds = (PageKind(None, 32, 2), PageKind(20, 16, 1))
    text = list(range(1, 200))
    chunks = [
        Chunk(1, text, 50, 1, drawn=True), Chunk(0, text, 9, 1, draws=0, drawn=True),
        Chunk(2, text, 0, 40, draws=2), Chunk(3, text, 30, 7, draws=0), Chunk(4, text, 30, 3),
    ]  # fmt: skip
    batch = Pages(5, 8).batch(chunks, admit=True, kinds=kinds)
    own = drawing_rows(batch, 8)
    assert own is not None
    assert (own.drawn, len(own.draws), own.sequence_starts.tolist()) == (1, 0, [0, 1, 2, 3, 4])
    assert own.positions.tolist() == [50, 38, 39, 32]
    assert own.context_lengths.tolist() == [51, 39, 40, 33]
    assert own.slots.tolist() == [1, 2, 2, 4]
    for mine, its in zip(own.kinds, batch.kinds, strict=True):
        assert (mine.page_tables == its.page_tables[[0, 2, 2, 4]]).all()
        assert (mine.cache_rows == its.cache_rows[[0, 40, 41, 51]]).all()
        entries = mine.page_tables[np.arange(4), own.positions // 16]
        assert (entries * 16 + own.positions % 16 == mine.cache_rows).all()
    assert drawing_rows(batch, 3) is None, "more than there is room for"
    turned = replace(batch, draws=batch.draws[::-1].copy())
    assert drawing_rows(turned, 8) is None, "a drawn token behind others"
    assert drawing_rows(replace(batch, draws=batch.draws[:0]), 8) is None


def test_a_step_that_draws_nothing_ends_with_the_last_layer_that_keeps_something(
    hopper: RecordedDriver, tmp_path: Path
) -> None:
    """Of four layers the last two read what the first two keep: the second only has to write its keys."""
    file = file_of_halves(tmp_path, SHARING)
    with closing(cuda_runner(file, SHARING, graphs=False, **OPTIONS)) as runner:
        launched = hopper.launches.copy()
        launch(runner, [Chunk(0, [1] * CONTEXT, 0, 40, draws=0)])
        new = hopper.launches - launched
        assert (new["qkv_rope_write"], new["prefill_attention_any"], new["gate_inputs"]) == (2, 1, 1)
        launched = hopper.launches.copy()
        launch(runner, [Chunk(0, [1] * CONTEXT, 40, 40)])
        new = hopper.launches - launched
        assert (new["qkv_rope_write"], new["prefill_attention_any"], new["gate_inputs"]) == (4, 4, 4)


def test_what_experts_and_their_router_read_is_normed_by_slices(
    hopper: RecordedDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two norms a slice of each of three layers; the last layer has the row that draws alone."""
    for module in (room, feed_forward):
        monkeypatch.setattr(module, "SLICE", 64)
    file = file_of(tmp_path, *GEMMA4_FILES["gemma4, with experts"])
    with closing(cuda_runner(file, read_spec(file), graphs=False, **OPTIONS)) as runner:
        for chunk, slices in (
            (Chunk(0, [1] * CONTEXT, 0, 60), 3), (Chunk(0, [1] * CONTEXT, 60, 1, drawn=True), 3),
            (Chunk(1, [1] * CONTEXT, 0, 70), 2 + 2 + 1),
        ):  # fmt: skip
            launched = hopper.launches.copy()
            launch(runner, [chunk])
            new = hopper.launches - launched
            assert (new["residual_1"], new["rms_norm_1"]) == (3, 1 + 2 * slices)
    assert hopper.launches.keys() - {"library"} <= hopper.checked


@pytest.mark.parametrize(
    "weights",
    [
        WeightsFormat.ELEMENT,
        pytest.param(WeightsFormat.FILE, marks=pytest.mark.slow),
        pytest.param(WeightsFormat.FP8, marks=pytest.mark.slow),
    ],
)
def test_a_table_of_layers_embeddings_stays_as_it_is_in_the_file(
    hopper: RecordedDriver, weights: WeightsFormat, tmp_path: Path
) -> None:
    """Whatever becomes of the other weights: its rows are unpacked as tokens come."""
    file, spec = file_of_q8_0(tmp_path, SHARING)
    precision = Precision(weights=weights)
    with closing(cuda_runner(file, spec, graphs=False, precision=precision, **OPTIONS)) as runner:
        launch(runner, [Chunk(0, [1] * CONTEXT, 0, 40)], [Chunk(0, [1] * CONTEXT, 40, 1, drawn=True)])
        table = runner._model.weights.layer_embedding
        assert (table.format, table.rows, table.columns) == (Format.Q8_0, spec.vocab, 4 * 24)
        assert runner._model.weights.layer_projection.format is not Format.FP8
    assert hopper.launches["repack_Q8_0"] > 0
    assert hopper.launches["layer_inputs_Q8_0"] == 2
    assert hopper.launches.keys() - {"library"} <= hopper.checked


@pytest.mark.slow
@pytest.mark.parametrize("spec", [LARGE_HEADS, LARGE_EXPERTS], ids=["", "beside experts"])
def test_layers_with_large_heads_have_fast_attention_each(
    hopper: RecordedDriver, spec: ModelSpec, tmp_path: Path
) -> None:
    """Those with a window that of other models, those without that of heads of 512; also in a graph."""
    file, each = file_of_halves(tmp_path, spec), len(spec.layers) // 2
    with closing(cuda_runner(file, spec, **OPTIONS)) as runner:
        launched = hopper.launches.copy()
        launch(runner, [Chunk(0, [1] * CONTEXT, 0, 100)], [Chunk(0, [1] * CONTEXT, 100, 1, drawn=True)])
        new = hopper.launches - launched
        assert (new["hopper_attention"], new["hopper_wide"]) == (each, each)
        assert hopper.launches["wide_decode_2"] > 0
        assert any(name.startswith("decode_attention_8") for name in hopper.launches)
        assert len(runner._plans) == 2
        assert runner._graphs is not None
        assert {len(rooms) for _, rooms in runner._graphs.usual} == {2}
    assert hopper.launches.keys() - {"library"} <= hopper.checked


@pytest.mark.parametrize("kv", [KvFormat.ELEMENT, pytest.param(KvFormat.FP8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", GEMMA4_FILES)
def test_the_memory_plan_covers_all_that_is_taken_and_little_more(
    driver: RecordedDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, kv: KvFormat
) -> None:
    taken = allocations(monkeypatch)
    file = file_of(tmp_path, *GEMMA4_FILES[name])
    precision = Precision(kv=kv)
    options = OPTIONS | {"graphs": False, "precision": precision}
    with closing(cuda_runner(file, spec := read_spec(file), **options)) as runner:
        plan = runner.memory
        assert (kinds_layout(spec, kv) is not None) == bool(runner.page_kinds) == (kv is KvFormat.ELEMENT)
        planned = plan.weights + plan.workspace + plan.cache
        assert 0 <= planned - sum(taken.values()) < 64 << 10


class Cut:
    """Stands for decode attention that has these rooms."""

    def __init__(self, *rooms: int) -> None:
        self._rooms = list(rooms)

    def rooms(self, size: int) -> list[int]:
        return self._rooms

    def room(self, size: int, pieces: int) -> int:
        return next(room for room in self._rooms if pieces <= room)

    def most_pieces(self, size: int) -> int:
        return self._rooms[-1]


def test_every_division_of_a_step_has_a_graph() -> None:
    """The first plan has all of its rooms; the others none or the largest, as `room` says."""
    prefill: Any = SimpleNamespace()
    for others in ((Cut(0),), (Cut(8, 20),), (Cut(0, 8, 20),), (Cut(0, 8), Cut(4, 9))):
        each: list[Any] = [Cut(0, 8, 16), *others]
        plans = AttentionPlans([(one, prefill) for one in each], each)
        rooms = plans.rooms(8)
        assert len(rooms) == len(set(rooms)) <= 3 * 2 ** len(others)
        assert plans.most_pieces(8) == sum(max(column) for column in zip(*rooms, strict=True))
        rng = np.random.default_rng(0)
        for _ in range(50):
            counts = [int(rng.integers(one.rooms(8)[0] and 1, one.most_pieces(8) + 1)) for one in each]
            pieces = [np.zeros((count, 4), dtype=np.int32) for count in counts]
            room = plans.room(8, pieces)
            assert room in rooms
            assert all(count <= held for count, held in zip(counts, room, strict=True))
            least = AttentionPlans.least_pieces(room, 8)
            assert [own is NO_PIECES for own in least] == [held == 0 for held in room]


def test_a_model_like_e2b_fits_a_card_of_8_gb() -> None:
    spec, in_file = quantised(GEMMA4_SHAPES["gemma4-e2b"].spec), Precision(weights=WeightsFormat.FILE)
    table = spec.weights()[Role.LAYER_EMBEDDING]
    packed = 262_144 * 35 * 256 * 176 // 256
    for precision in (in_file, HALF):
        (run,) = runs_of(spec, Role.LAYER_EMBEDDING, table, precision)
        assert (run.format, run.bytes) == (Format.Q5_K, packed)
    small = replace(spec, layers=tuple(replace(one, inputs=None) for one in spec.layers))
    added = weight_bytes(spec, in_file) - weight_bytes(small, in_file)
    assert packed < added < 1.03 * packed
    planner = RunnerPlanner(spec, in_file, 40, lambda slots: 2 * slots, hopper=False)
    plan = planner.plan(RunnerSizes(slots=8, context=8192), 8 << 30)
    layout = kinds_layout(spec)
    assert layout is not None and len(layout.kinds) == 2
    assert plan.memory.kv_pages == 8 * layout.pages_for(8192)
    assert plan.memory.cache < 16 * 8192 * 8 * (12 * 2 * 256 + 3 * 2 * 512) * 2 // 8


def test_a_model_like_26b_a4b_is_as_large_as_its_file_and_keeps_little_of_long_texts() -> None:
    """Its parameters are those of its name, of which a token is computed with 4 billion."""
    spec = quantised(GEMMA4_SHAPES["gemma4-26b-a4b"].spec)
    assert round(spec.parameters / 1e9) == 25 and round(spec.active_parameters / 1e9) == 4
    assert 15.5 < weight_bytes(spec, Precision(weights=WeightsFormat.FILE)) / 2**30 < 15.8
    layout = kinds_layout(spec)
    assert layout is not None
    before = 8192 * 2 * 2 * spec.keys
    assert before / (layout.pages_at(8192) * layout.numbers * 2) > 4
