"""States on the GPU, as far as the host decides: pieces of a step, copies, memory, rows of weights."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Attention, GatedDeltaNet, Mamba2, ModelSpec, Role, Weight
from nightmill.worker.runners.base import NO_SNAPSHOT, STATE_CHUNK, Admission, StepBatch
from nightmill.worker.runners.gpu.catalogue import check_spec
from nightmill.worker.runners.gpu.device.device import Device, DeviceMemoryError
from nightmill.worker.runners.gpu.device.functions import Function
from nightmill.worker.runners.gpu.kinds import mixer_sizes
from nightmill.worker.runners.gpu.kv_cache import page_bytes
from nightmill.worker.runners.gpu.memory import RunnerSizes, StatePlan, plan_memory, plan_states
from nightmill.worker.runners.gpu.precision import HALF, Precision, WeightsFormat
from nightmill.worker.runners.gpu.runner import CudaRunner
from nightmill.worker.runners.gpu.states.memory import States
from nightmill.worker.runners.gpu.states.pieces import pieces_on_device, state_pieces
from nightmill.worker.runners.gpu.steps import StepBounds, StepBuffers
from nightmill.worker.runners.gpu.weights.layout import (
    layer_weights,
    rows_of,
    runs_of,
    stored,
    weight_bytes,
)
from tests.support.cuda_runners import cuda_runner
from tests.support.driving import GREEDY, Chunk, Pages
from tests.support.expert_cases import EXPERT_FILES
from tests.support.family_cases import file_of
from tests.support.ggufs import spec_tensors
from tests.support.hybrid_cases import GPU_HYBRID_FILES, HYBRID_FILES
from tests.support.specs import HYBRIDS, PLAIN
from tests.unit.runners.recorded_cuda import RecordedDriver
from tests.unit.runners.recorded_steps import allocations

pytestmark = pytest.mark.heavy  # kernels are compiled where nvcc is

CONTEXT = 256
TEXT = [1] * CONTEXT
KINDS = ["qwen35", "lfm2", "granitehybrid", "nemotron_h"]
OPTIONS: dict[str, Any] = {"context": CONTEXT, "tune": False, "graphs": False, "max_tokens": 128}


def batch(*chunks: Chunk, slots: int = 8) -> StepBatch:
    return Pages(slots, CONTEXT // 16).batch(chunks, admit=False)


def test_drawn_tokens_of_a_sequence_are_one_piece_and_each_chunk_of_a_prompt_is() -> None:
    drawn = [(3, 90), (0, 7), (5, 70), (5, 71), (5, 72)]
    step = batch(
        *(Chunk(slot, TEXT, place, 1, drawn=True) for slot, place in drawn),
        Chunk(5, TEXT, 0, 70),
        Chunk(1, TEXT, 128, 33),
    )
    pieces = state_pieces(step)
    assert pieces.arrays.tolist() == [
        [0, 1, 2, 5, 75], [1, 1, 3, 70, 33], [3, 0, 5, 5, 1], [90, 7, 70, 0, 128],
    ]  # fmt: skip
    assert (pieces.drawn, pieces.pieces, pieces.prompt_rows) == (3, 5, 103)
    there = pieces_on_device(1000, pieces.pieces, pieces.drawn, pieces.prompt_rows)
    assert there.drawn.addresses == (1000, 1020, 1040, 1060)
    assert there.prompts.addresses == (1012, 1032, 1052, 1072)
    assert (there.drawn.count, there.prompts.count, there.prompts.rows) == (3, 2, 103)


def test_steps_of_prompts_alone_or_drawn_tokens_alone_have_such_pieces_alone() -> None:
    for chunks, drawn in (([Chunk(0, TEXT, 0, 5)], 0), ([Chunk(0, TEXT, 5, 1, drawn=True)], 1)):
        pieces = state_pieces(batch(*chunks))
        assert (pieces.pieces, pieces.drawn, pieces.prompt_rows) == (1, drawn, 0 if drawn else 5)


@pytest.mark.parametrize("start", [1, 63, 65])
def test_a_piece_that_begins_between_two_chunks_is_refused(start: int) -> None:
    with pytest.raises(RunnerError, match=f"begins at position {start}: .* multiples of {STATE_CHUNK}"):
        state_pieces(batch(Chunk(0, TEXT, 0, 10), Chunk(1, TEXT, start, 20)))


def test_a_padded_step_has_empty_pieces_behind_its_own(
    hopper: RecordedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[np.ndarray] = []
    monkeypatch.setattr(Device, "copy_in", lambda device, address, array: sent.append(array.copy()))
    with Device() as device:
        bounds = StepBounds(max_tokens=64, max_draws=64, slots=8, table_width=4, max_pieces=8, states=True)
        buffers = StepBuffers(device, bounds, padding_page=9, depth=1)
        step = batch(*(Chunk(slot, TEXT, 9 + slot, 1, drawn=True) for slot in (6, 2, 4)))
        inputs = buffers.write_padded(0, step, 5, [np.zeros((0, 4), dtype=np.int32)], [0])
        assert (inputs.pieces_of_states.drawn.count, inputs.pieces_of_states.prompts.count) == (5, 0)
        first = (inputs.pieces_of_states.drawn.first_rows - buffers._packed) // 4
        arrays = sent[-1][first : first + 20].reshape(4, 5)
    assert arrays.tolist() == [[0, 1, 2, 0, 0], [1, 1, 1, 0, 0], [6, 2, 4, 0, 0], [15, 11, 13, 0, 0]]


def test_a_padded_step_with_guesses_has_a_piece_for_each_sequence(
    hopper: RecordedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[np.ndarray] = []
    monkeypatch.setattr(Device, "copy_in", lambda device, address, array: sent.append(array.copy()))
    with Device() as device:
        bounds = StepBounds(max_tokens=64, max_draws=64, slots=8, table_width=4, max_pieces=8, states=True)
        buffers = StepBuffers(device, bounds, padding_page=9, depth=1)
        drawn = [
            Chunk(slot, TEXT, 9 + place, 1, drawn=True) for slot, place in ((6, 0), (2, 3), (2, 4), (2, 5))
        ]
        inputs = buffers.write_padded(
            0, batch(*drawn), 5, [np.zeros((0, 4), dtype=np.int32)], [0], again=True
        )
        first = (inputs.pieces_of_states.drawn.first_rows - buffers._packed) // 4
        arrays = sent[-1][first : first + 20].reshape(4, 5)
    assert inputs.pieces_of_states.drawn.count == 5
    assert arrays.tolist() == [[0, 1, 0, 0, 0], [1, 3, 0, 0, 0], [6, 2, 0, 0, 0], [9, 12, 0, 0, 0]]


def test_states_are_copied_before_a_step_and_after_it(
    hopper: RecordedDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A slot becomes a snapshot that an earlier launch took; the same launch takes others."""
    file = file_of(tmp_path, *GPU_HYBRID_FILES["qwen35"])
    done: list[str] = []
    copied: list[list[list[int]]] = []
    launch, copy_in = Function.__call__, Device.copy_in

    def launched(function: Function, *arguments: Any, **more: Any) -> None:
        done.append(function.name)
        launch(function, *arguments, **more)

    def sent(device: Device, address: int, array: np.ndarray) -> None:
        if address == runner._states._pairs:
            copied.append(array.tolist())
        copy_in(device, address, array)

    with closing(cuda_runner(file, read_spec(file), slots=8, kv_pages=128, **OPTIONS)) as runner:
        assert (runner.prompt_grid, runner.snapshots) == (STATE_CHUNK, 2)
        monkeypatch.setattr(Function, "__call__", launched)
        monkeypatch.setattr(Device, "copy_in", sent)
        step = batch(Chunk(3, TEXT, 64, 1, drawn=True), Chunk(5, TEXT, 64, 64))
        admissions = (
            Admission(5, (1, 2), GREEDY, 0, snapshot=1),
            Admission(2, (1, 2), GREEDY, 0, snapshot=NO_SNAPSHOT),
            Admission(6, (1, 2), GREEDY, 0, snapshot=1),
        )
        runner.launch(
            replace(step, admissions=admissions, snapshots=((5, 0),), keeps=((3, 1),), restores=((7, 0),))
        )
        runner.collect()
        assert copied == [[[9, 5], [9, 6], [8, 7], [3, 9]], [[5, 8]]]
        places = [index for index, name in enumerate(done) if name == "copy_states"]
        assert len(places) == 2
        assert places[0] < done.index("gather_tokens") < done.index("delta_recurrent") < places[1]
        assert done.index("delta_scan_wide") < done.index("delta_recurrent")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [WeightsFormat.ELEMENT, WeightsFormat.FILE, WeightsFormat.FP8])
def test_the_memory_plan_covers_all_that_is_taken_and_little_more(
    kind: str, weights: WeightsFormat, hopper: RecordedDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken = allocations(monkeypatch)
    file = file_of(tmp_path, *GPU_HYBRID_FILES[kind])
    spec, precision = read_spec(file), Precision(weights=weights)
    with closing(cuda_runner(file, spec, slots=9, kv_pages=64, precision=precision, **OPTIONS)) as runner:
        plan = runner.memory
        planned = plan.weights + plan.workspace + plan.states.bytes + plan.cache
        assert 0 <= planned - sum(taken.values()) < 64 << 10
        assert plan.states.bytes > (9 + 3) * spec.state_bytes
        assert "states of 9 sequences and 3 snapshots" in str(plan)


@pytest.mark.parametrize("kind", KINDS)
def test_where_memory_is_short_fewer_sequences_have_states(
    kind: str, hopper: RecordedDriver, tmp_path: Path
) -> None:
    """And room for pages is left; the runner has no more slots than these."""
    file = file_of(tmp_path, *GPU_HYBRID_FILES[kind])
    spec = read_spec(file)
    plans = []
    for memory in (220 << 20, 130 << 20):
        with closing(
            cuda_runner(file, spec, slots=700, gpu_memory=memory, **OPTIONS | {"max_tokens": 700})
        ) as runner:
            plans.append((runner.slots, runner.kv_pages))
            assert runner.memory.states.slots == runner.slots
            assert len(runner._drawn[0]) == runner.max_draws == runner.slots + STATE_CHUNK
    (slots, _), (fewer, pages) = plans
    assert fewer <= slots
    assert pages >= min(fewer * CONTEXT // 16, 16)


def bytes_of(state: int) -> Callable[[int, int], int]:
    return lambda slots, snapshots: (slots + snapshots) * state


def test_slots_are_chosen_with_their_snapshots_and_pages_for_each() -> None:
    sizes = RunnerSizes(100, 4096)
    # A sequence: a state of 40,000 and a quarter of one, and 64 pages of 100 bytes for 1,024 tokens.
    each = 40_000 + 10_000 + 6_400
    for fitting in (1, 10, 40, 100):
        room = fitting * each + 30_000
        plan = plan_states(sizes, page=100, room=room, bytes_of=bytes_of(40_000))
        assert abs(plan.slots - fitting) <= 1
        assert plan.snapshots == -(-plan.slots // 4)
        assert plan.bytes == 40_000 * (plan.slots + plan.snapshots)
        assert plan.binds == (plan.slots < 100)
    assert plan_states(sizes, page=100, room=10**9, bytes_of=bytes_of(40_000)).slots == 100
    assert plan_states(sizes, page=100, room=0, bytes_of=bytes_of(0)) == StatePlan(100)
    short = replace(sizes, context=16)
    assert plan_states(short, page=100, room=63 * 40_000 + 50 * 100, bytes_of=bytes_of(40_000)).slots == 50
    given = replace(sizes, kv_pages=1000)
    assert plan_states(given, page=100, room=100_000 + 520_000, bytes_of=bytes_of(40_000)).slots == 10


def test_where_not_even_one_fits_the_numbers_are_told() -> None:
    sizes = RunnerSizes(100, 4096)
    states = plan_states(sizes, page=100, room=1, bytes_of=bytes_of(40_000))
    with pytest.raises(DeviceMemoryError, match=r"states of 1 sequence and 1 snapshot .*80,000, at least"):
        plan_memory(sizes, weights=10, page=100, free=50_000, workspace=10, states=states)


def test_a_model_without_states_has_none_of_all_this() -> None:
    assert States.bytes(PLAIN, 100, 25) == 0
    plan = plan_memory(RunnerSizes(4, 64), weights=10, page=100, free=50_000, workspace=10)
    assert plan.states.bytes == 0
    assert "states" not in str(plan)


def rows_on_the_gpu(spec: ModelSpec, index: int, role: Role, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """A weight as it is loaded, but for padding."""
    weight: Weight = layer_weights(spec, index)[role]
    order, parts, first = rows_of(spec.layers[index].mixer, role), [], 0
    for name, (rows, *_) in weight.parts:
        tensor = tensors[name]
        raw = tensor.view(np.uint8).reshape(-1)
        if order is not None:
            raw = order.arranged(raw, first, len(tensor))
        part = raw.view(np.float32).reshape(-1, *tensor.shape[1:])
        assert len(part) == rows
        parts.append(part)
        first += rows
    return np.concatenate(parts)


def test_betas_come_before_alphas_whatever_their_order_in_the_file() -> None:
    """There those of each key head are beside each other."""
    spec = EXPERT_FILES["qwen3next"][1]
    net, tensors = spec.layers[0].mixer, spec_tensors(spec)
    assert isinstance(net, GatedDeltaNet)
    rows = tensors["blk.0.ssm_ba.weight"].reshape(net.key_heads, 2, -1, spec.width)
    controls = rows_on_the_gpu(spec, 0, Role.MIXER_CONTROLS, tensors).reshape(
        2, net.key_heads, -1, spec.width
    )
    np.testing.assert_array_equal(controls[0], rows[:, 0])
    np.testing.assert_array_equal(controls[1], rows[:, 1])


def test_gates_of_attention_are_a_matrix_of_their_own_in_the_order_of_the_output() -> None:
    """Rotated parts of queries are in the GPU's order, as are those of keys; gates stay as they are."""
    spec = HYBRID_FILES["qwen35"][1]
    index = next(n for n, layer in enumerate(spec.layers) if isinstance(layer.mixer, Attention))
    attention, tensors = spec.layers[index].attention, spec_tensors(spec)
    heads, head = attention.heads, attention.head_dim
    by_head = tensors[f"blk.{index}.attn_q.weight"].reshape(heads, 2, head, spec.width)
    qkv = rows_on_the_gpu(spec, index, Role.QKV, tensors)
    gates = rows_on_the_gpu(spec, index, Role.ATTN_GATE, tensors)
    assert qkv.shape == (mixer_sizes(attention).inputs, spec.width)
    np.testing.assert_array_equal(gates.reshape(heads, head, -1), by_head[:, 1])
    # 8 of 32 elements are rotated: pairs are (0, 4), ..., which become (0, 16), ...
    order = [*range(4), *range(8, 20), *range(4, 8), *range(20, 32)]
    np.testing.assert_array_equal(qkv[: heads * head].reshape(heads, head, -1), by_head[:, 0][:, order])
    keys = tensors[f"blk.{index}.attn_k.weight"].reshape(-1, head, spec.width)
    found = qkv[heads * head :][: len(keys) * head].reshape(keys.shape)
    np.testing.assert_array_equal(found, keys[:, order])
    np.testing.assert_array_equal(qkv[-len(keys) * head :], tensors[f"blk.{index}.attn_v.weight"])


@pytest.mark.parametrize("name", ["qwen35", "granitehybrid"])
def test_what_decays_are_made_of_is_a_matrix_of_its_own_which_stays_elements(name: str) -> None:
    spec, tensors = HYBRID_FILES[name][1], spec_tensors(HYBRID_FILES[name][1])
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, GatedDeltaNet | Mamba2)
    controls = rows_on_the_gpu(spec, 0, Role.MIXER_CONTROLS, tensors)
    inputs = rows_on_the_gpu(spec, 0, Role.MIXER_INPUT, tensors)
    if isinstance(mixer, GatedDeltaNet):
        parts = [
            tensors[f"blk.0.{part}.weight"] for part in ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")
        ]
    else:
        parts = [tensors["blk.0.ssm_in.weight"]]
    np.testing.assert_array_equal(np.concatenate([inputs, controls]), np.concatenate(parts))
    own = layer_weights(spec, 0)
    types = {name: "Q8_0" for _, weight in spec.all_weights() for name in weight.names}
    packed = replace(spec, tensor_types=types)
    for precision in (HALF, Precision(weights=WeightsFormat.FILE), Precision(weights=WeightsFormat.FP8)):
        (run,) = runs_of(packed, Role.MIXER_CONTROLS, own[Role.MIXER_CONTROLS], precision)
        assert run.format is precision.element.format
        assert (
            run.rows
            == stored(spec, Role.MIXER_CONTROLS, own[Role.MIXER_CONTROLS])[0]
            == -(-len(controls) // 8) * 8
        )
        (run,) = runs_of(packed, Role.MIXER_INPUT, own[Role.MIXER_INPUT], precision)
        assert run.rows == mixer_sizes(mixer).inputs == -(-len(inputs) // 8) * 8
    assert weight_bytes(packed, Precision(weights=WeightsFormat.FILE)) < 0.7 * weight_bytes(packed, HALF)


REFUSED = {
    "keys of 16": HYBRIDS["a gated delta net"].layers[0],
    "heads of 20 with a state": HYBRIDS["Mamba-2"].layers[0],
    "its own gated": HYBRIDS["a gated delta net"].layers[1],
}


@pytest.mark.parametrize("problem", REFUSED)
def test_a_size_that_no_kernel_takes_is_refused_by_name(problem: str) -> None:
    """A gate with a bias is one of what no kernel computes."""
    with pytest.raises(RunnerError, match=f"do not take .*{problem}.*--reference"):
        check_spec(replace(PLAIN, layers=(PLAIN.layers[0], REFUSED[problem])))


def test_a_model_without_attention_is_refused_by_name() -> None:
    alone = GPU_HYBRID_FILES["lfm2"][1].layers[0]
    with pytest.raises(RunnerError, match=r"do not take a model without a layer of attention; `--reference`"):
        check_spec(replace(PLAIN, layers=(alone,)))


def test_a_prompts_piece_is_refused_before_anything_of_it_is_launched(
    hopper: RecordedDriver, tmp_path: Path
) -> None:
    file: GgufFile = file_of(tmp_path, *GPU_HYBRID_FILES["lfm2"])
    runner: CudaRunner = cuda_runner(file, read_spec(file), slots=8, kv_pages=128, **OPTIONS)
    with closing(runner), pytest.raises(RunnerError, match="begins at position 10"):
        before = hopper.launches["gather_tokens"]
        try:
            runner.launch(batch(Chunk(0, TEXT, 10, 20)))
        finally:
            assert hopper.launches["gather_tokens"] == before


def test_pages_are_of_layers_with_attention_alone() -> None:
    spec = GPU_HYBRID_FILES["qwen35"][1]
    attention = spec.attentions[0]
    assert page_bytes(spec) == 2 * 16 * attention.keys * 2 + 64
