"""A GPU that is taken for another card compiles, chooses and allocates as that one would."""

import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import RunnerError, SettingsError
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.forecast import card_of
from nightmill.worker.assembly.model import load_model
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import GatedDeltaNet, Mamba2, Norm
from nightmill.worker.runners.gpu.device import compiler
from nightmill.worker.runners.gpu.device.chosen import ChosenGpu
from nightmill.worker.runners.gpu.device.device import CudaError, Device, DeviceMemoryError, NoDeviceError
from nightmill.worker.runners.gpu.device.features import features_of
from nightmill.worker.runners.gpu.device.functions import Module
from nightmill.worker.runners.gpu.device.known_cards import KNOWN_CARDS, known_card
from nightmill.worker.runners.gpu.device.sources import source_of
from nightmill.worker.runners.gpu.outlook import kernel_outlook
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.states.choice import StateMixers, state_mixer
from tests.gpu import cards
from tests.support.cuda_runners import cuda_runner
from tests.support.driving import Chunk, Pages
from tests.support.family_cases import GPU_FILES
from tests.support.needs import Need, missing
from tests.support.specs import dense_spec
from tests.unit.runners import recorded_kernels
from tests.unit.runners.recorded_cuda import (
    HOPPER,
    RecordedDriver,
    install_uncompiled,
    record,
)
from tests.unit.runners.recorded_kernels import nvcc_is_there
from tools.kernel_record import read_lines

MODEL = Path(__file__).parents[3] / "models" / "nightmill-demo.gguf"
TARGETS = {
    "rtx3090": "compute_86/sm_90", "rtx4060": "compute_89/sm_90", "rtx4090": "compute_89/sm_90",
    "rtx5090": "compute_89/sm_90", "a100": "compute_80/sm_90", "l4": "compute_89/sm_90",
    "l40s": "compute_89/sm_90", "h100": "sm_90a", "h200": "sm_90a",
}  # fmt: skip
HOPPERS = {"h100", "h200"}


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RecordedDriver:
    """A Hopper for which nothing is compiled."""
    return install_uncompiled(monkeypatch, tmp_path, HOPPER)


def test_the_page_has_the_figures_of_the_table() -> None:
    page = (MODEL.parents[1] / "docs" / "cards.md").read_text(encoding="utf-8")
    for key, card in KNOWN_CARDS.items():
        major, minor = card.capability
        assert (
            f"| `{key}` | {card.name} | {major}.{minor} | {card.multiprocessors} | {card.memory} GiB | "
            f"{card.l2} MiB | {card.features.block_shared >> 10} KiB | {card.peaks.bytes / 1e9:,.0f} | "
            f"{card.peaks.flops / 1e12:,.0f} |"
        ) in page


@pytest.mark.parametrize("key", KNOWN_CARDS)
def test_code_is_compiled_for_the_card_and_runs_on_a_hopper(key: str) -> None:
    card = KNOWN_CARDS[key]
    features = features_of(card.capability, HOPPER)
    assert features.target == TARGETS[key]
    assert features.hopper is features.dependent is (key in HOPPERS)
    assert features.fp8 is (key not in ("a100", "rtx3090"))
    assert features.block_shared == card.features.block_shared <= card.features.shared


@pytest.mark.parametrize(
    ("card", "on", "target"),
    [
        ((8, 6), (8, 9), "compute_86/sm_89"), ((8, 9), (8, 9), "sm_89"), ((12, 0), (12, 0), "sm_120"),
        ((12, 0), (8, 6), "sm_86"), ((8, 9), (8, 0), "sm_80"),
        ((8, 0), (12, 0), "compute_80/sm_120"), ((10, 0), (12, 0), "compute_89/sm_120"),
    ],
)  # fmt: skip
def test_code_that_a_gpu_cannot_run_is_that_of_an_earlier_one(
    card: tuple[int, int], on: tuple[int, int], target: str
) -> None:
    assert features_of(card, on).target == target


@pytest.mark.parametrize("key", [key for key in KNOWN_CARDS if key not in HOPPERS])
def test_a_runner_takes_no_more_than_the_card_has(real: RecordedDriver, key: str) -> None:
    file, card = GgufFile.open(MODEL), KNOWN_CARDS[key]
    options = {"slots": 8, "context": 128, "max_tokens": 512, "graphs": False}
    with closing(cuda_runner(file, read_spec(file), gpu=ChosenGpu(0, card), **options)) as runner:
        pages = Pages(8, 8)
        runner.launch(pages.batch([Chunk(0, [1] * 128, 0, 100)], admit=True))
        runner.launch(pages.batch([Chunk(0, [1] * 128, 100, 1, 1, True)], admit=False))
        assert [len(runner.collect().tokens) for _ in range(2)] == [1, 1]  # type: ignore[union-attr]
        device, arithmetic = runner.device, runner.arithmetic
        assert not device.hopper and device.multiprocessors == card.multiprocessors
        assert device.free_memory() <= min(card.free, 130 << 30)
        assert device.peaks() == card.peaks and device.compute_capability == card.capability
        code = TARGETS[key].partition("/")[0]
        assert arithmetic.device == f"{card.name} (pretended on recorded, code of {code})"
        with pytest.raises(DeviceMemoryError, match=r"no [\d,]+ bytes left for too much"):
            device.allocate((card.memory << 30) + 1, "too much")
    assert {"prefill_attention", "qkv_rope_write", "few_qkv_1"} <= real.launches.keys()
    assert not [name for name in real.launches if "hopper" in name]


def test_fp8_weights_are_multiplied_where_tensor_cores_do_that(real: RecordedDriver) -> None:
    file = GgufFile.open(MODEL)
    spec, precision = read_spec(file), Precision(weights=WeightsFormat.FP8)
    options = {"slots": 8, "context": 128, "max_tokens": 2048, "precision": precision}
    with closing(cuda_runner(file, spec, gpu=ChosenGpu(0, KNOWN_CARDS["rtx4090"]), **options)) as runner:
        pages = Pages(8, 8)
        runner.launch(pages.batch([Chunk(0, [1] * 128, 0, 100)], admit=True))
        runner.launch(pages.batch([Chunk(0, [1] * 128, 100, 1, 1, True)], admit=False))
        assert [len(runner.collect().tokens) for _ in range(2)] == [1, 1]  # type: ignore[union-attr]
    tiles = {name.rpartition("fp8_")[2].split("_")[0] for name in real.launches if name.startswith("mma_fp8")}
    assert tiles == {"product", "swiglu", "residual"}
    assert real.launches.keys() >= {"rms_norm_fp8_1", "quantise_1"}
    with pytest.raises(RunnerError, match=r"FP8 weights need .* 8\.9 .* RTX 3090 .* is not"):
        cuda_runner(file, spec, gpu=ChosenGpu(0, KNOWN_CARDS["rtx3090"]), **options)


def test_without_a_gpu_a_worker_does_not_pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would compute with NumPy and say nothing of it."""
    monkeypatch.setitem(sys.modules, "pycuda", None)
    settings = Settings(model=MODEL, pretend_device="rtx4090")
    with (
        closing(load_model(settings)) as model,
        pytest.raises(SettingsError, match=r"4090.*check --pret.*plan --no-measure"),
    ):
        build_engine(settings, model)


def test_numpy_that_is_asked_for_by_name_pretends_nothing_and_is_not_refused() -> None:
    settings = Settings(model=MODEL, pretend_device="rtx4090", reference=True, max_sequences=1)
    with closing(load_model(settings)) as model, closing(build_engine(settings, model)) as engine:
        assert engine.stats.sequences == 1


def test_kernels_ask_for_no_more_shared_memory_than_a_block_of_the_card_has(real: RecordedDriver) -> None:
    with Device(pretended=KNOWN_CARDS["rtx4090"]) as device:
        module = Module.of(device, source_of("activate"))
        module.function("silu", "PPPii", shared=99 << 10)
        with pytest.raises(CudaError, match=r"kernel silu takes 101,377 .* RTX 4090 .* at most 101,376"):
            module.function("silu", "PPPii", shared=(99 << 10) + 1)


@pytest.mark.parametrize("key", ["rtx4090", "a100"])
def test_states_that_do_not_fit_a_card_are_refused_before_the_night(real: RecordedDriver, key: str) -> None:
    """By `check` in the words of the worker, and exactly where their kernels could not be loaded."""
    card, refused = KNOWN_CARDS[key], []
    delta = GatedDeltaNet(key_heads=4, value_heads=8, key_dim=32, value_dim=32, kernel=4, norm=Norm(1e-6))
    mamba = Mamba2(heads=8, head_dim=64, groups=2, state_size=64, kernel=4, norm=Norm(1e-6))
    mixers: list[GatedDeltaNet | Mamba2] = [
        replace(delta, key_dim=keys, value_dim=values) for keys in (32, 64, 96, 128) for values in (32, 128)
    ]
    mixers += [replace(mamba, head_dim=dim, state_size=size) for dim in (64, 80) for size in (64, 128, 256)]
    with Device(pretended=card) as device:
        for mixer in mixers:
            spec = dense_spec()
            spec = replace(spec, layers=(replace(spec.layers[0], mixer=mixer), *spec.layers[1:]))
            reason = StateMixers.refusal_on(spec, card_of(card))
            try:
                state_mixer(device, mixer, 1 << 20, 512)
                assert reason is None, f"{mixer}: {reason}"
            except RunnerError:
                assert reason is not None and "shared memory" in reason, mixer
                refused.append(mixer)
    assert bool(refused) is (key == "rtx4090")


@pytest.mark.parametrize("weights", [WeightsFormat.ELEMENT, WeightsFormat.FILE, WeightsFormat.FP8])
def test_kernels_are_foretold_for_every_family(weights: WeightsFormat) -> None:
    """None of Hopper's for another card, and some of them for a Hopper."""
    for name, (_, spec) in GPU_FILES.items():
        for hopper in (False, True):
            found = kernel_outlook(spec, Precision(weights=weights), hopper=hopper)
            assert {"drawn tokens", "prompts"} <= found.keys() or "attention" in found, name
            assert ("experts" in found) is bool(spec.experts), name
            assert any("wgmma" in words for words in found.values()) is hopper, f"{name}: {found}"


def test_a_multiprocessor_of_the_card_holds_no_more_blocks_than_it_has_room_for() -> None:
    ada = features_of((8, 9))
    assert [ada.blocks_held(128, shared << 10) for shared in (99, 49, 24, 0)] == [1, 2, 4, 12]
    assert ada.blocks_held(32, 0) == 24
    assert features_of(HOPPER).blocks_held(128, 24 << 10) == 9


def test_cards_that_cannot_be_pretended_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_uncompiled(monkeypatch, tmp_path, (8, 9))
    with pytest.raises(NoDeviceError, match=r"recorded\) cannot be taken for NVIDIA H100 .* or none"):
        Device(pretended=KNOWN_CARDS["h100"])
    with pytest.raises(SettingsError, match=r"no card is known as 'rtx9090' .* rtx4090"):
        known_card("rtx9090")
    assert known_card("RTX4090") is KNOWN_CARDS["rtx4090"] and known_card(None) is None


@pytest.mark.heavy
def test_tests_of_a_gpu_are_run_as_the_card_that_a_variable_names() -> None:
    """Although no variable of Nightmill's reaches a test: they would be run on the GPU itself, unnoticed."""
    found = subprocess.run(
        [sys.executable, "-c", "import tests.conftest, os\n"
         "from tests.support.cuda_runners import ON_GPU, pretended_card\n"
         "del os.environ['NIGHTMILL_PRETEND_DEVICE']\nprint(ON_GPU, pretended_card().key)"],
        cwd=MODEL.parents[1], env=os.environ | {"NIGHTMILL_PRETEND_DEVICE": "rtx3090"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout == "{'gpu': 0, 'pretend_device': 'rtx3090'} rtx3090\n"


@pytest.mark.heavy
def test_nvcc_makes_machine_code_of_the_gpu_from_code_of_the_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not nvcc_is_there():
        missing(Need.NVCC)
    monkeypatch.setattr(recorded_kernels, "recorded_lines", dict)  # so that it is compiled
    monkeypatch.setattr(recorded_kernels, "LOCAL", tmp_path / "compiled.txt")
    record(HOPPER, monkeypatch, tmp_path)
    with Device(pretended=KNOWN_CARDS["rtx3090"]) as device:
        path, options = source_of("logits")
        cubin = compiler.compile_kernels(path, options, device.architecture)
    flags = int.from_bytes(cubin[0x30:0x34], "little")  # e_flags of the ELF header
    assert 90 in (flags & 0xFF, flags >> 8 & 0xFF)
    assert recorded_kernels.kernels_of(cubin)
    (line,) = read_lines(tmp_path / "compiled.txt").values()
    assert line.architecture == "compute_86/sm_90" and line.quick


def test_the_list_of_tests_as_other_cards_names_files_that_are_there() -> None:
    tests = MODEL.parents[1] / "tests" / "gpu"
    assert all((tests / f"{file}.py").exists() for part in cards.PARTS for file in part.files)
    assert set(cards.CARDS) < KNOWN_CARDS.keys()
    shown = (
        "tests/gpu/test_a.py::test_x[a b] PASSED [ 5%]\ntests/gpu/test_a.py::test_y FAILED [10%]\nE PASSED\n"
    )
    assert cards.outcomes(shown) == {"PASSED": 1, "FAILED": 1, "ERROR": 0, "SKIPPED": 0}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("seconds", "note"),
    [
        pytest.param("250", "failed", id="no tests"),
        pytest.param("0.1", "cut after 0 s", id="cut before the first"),
    ],
)
def test_a_part_of_which_nothing_ran_fails(
    seconds: str, note: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when its `-k` fits nothing any more: it would pass with nothing run."""
    empty = cards.TestedPart("delta", ("test_states_kernels",), "no_such_test")
    monkeypatch.setattr(cards, "PARTS", (empty,))
    assert cards.main(["--card", "rtx3090", "--seconds", seconds, "delta"]) == 1
    assert capsys.readouterr().out.rstrip().endswith(f" s  {note}")
