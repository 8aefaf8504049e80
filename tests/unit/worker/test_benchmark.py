"""`nightmill benchmark`: checks that can fail, speeds, and a report without names, whatever happens."""

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import RunnerError
from nightmill.worker.assembly.forecast import card_of
from nightmill.worker.assembly.model import OpenModel, demo_model, open_model
from nightmill.worker.commands.benchmark import report_path
from nightmill.worker.commands.benchmarking import kernels, parts, texts
from nightmill.worker.commands.benchmarking.report import EqualTexts, PartReport
from nightmill.worker.commands.benchmarking.texts import Timing, benchmark_format
from nightmill.worker.engine.engine import Engine
from nightmill.worker.runners.gpu.device.compiler import KernelCompileError
from nightmill.worker.runners.gpu.device.device import DeviceMemoryError, KernelLaunchError
from nightmill.worker.runners.gpu.device.known_cards import KNOWN_CARDS
from nightmill.worker.runners.starting import SelfTestError

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[3]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and shorter texts than for a GPU, in this process."""
    for name, value in (("_CHECKED", 3), ("_CHECKED_TOKENS", 4), ("_BESIDE", 3), ("CONTEXT", 128)):
        monkeypatch.setattr(texts, name, value)


def in_numpy(**changes: Any) -> tuple[Settings, OpenModel]:
    settings = Settings(model=demo_model(), reference=True, weights="16bit").model_copy(update=changes)
    return settings, open_model(settings)


SHORT = Timing((EqualTexts(2, 200, 4),), 1.0)


def report(timing: Timing = SHORT, **changes: Any) -> PartReport:
    settings, model = in_numpy(**changes)
    with closing(model.file):
        return benchmark_format(settings, model, timing, said=lambda news: None)


def test_a_report_has_what_a_card_is_judged_by(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    options = ["--reference", "--weights", "16bit", "--quick", "--seconds", "1", "-o", str(output)]
    done = CliRunner().invoke(main, ["benchmark", *options])
    assert done.exit_code == 0, done.output
    found = json.loads(output.read_text())
    assert found["format"] == 2 and found["device"] is None and found["model"]["family"] == "qwen2"
    assert str(Path.home()) not in output.read_text() and str(demo_model().parent) not in output.read_text()
    assert found["passed"] == ["weights 16bit"] and found["failed"] == []
    (one,) = found["parts"]
    assert one["ok"] and one["refused"] is None and one["arithmetic"].startswith("runner=numpy; ")
    assert {check["what"]: check["found"] for check in one["checks"]} == {
        "texts are equal: alone and among others": "8 of 8",
        "texts are equal: twice": "8 of 8",
    }
    assert len(one["first_tokens"]["16bit"]) == 8
    (speed,) = one["speeds"]
    assert speed["load"] == {"sequences": 1, "prompt": 128, "answer": 64}
    assert speed["output_tokens_per_s"] > 0 and speed["prompt_tokens_per_s"] > 0
    assert {"computing the first prompts", "comparing texts", "measuring"} < set(one["seconds"])
    assert "128 + 64" in done.output and str(output) in done.output


def test_no_report_is_overwritten_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "kept.json"
    kept.write_text("mine")
    refused = CliRunner().invoke(main, ["benchmark", "--reference", "-o", str(kept)])
    assert refused.exit_code == 1 and "kept.json is there already" in refused.output
    assert "--overwrite" in refused.output and kept.read_text() == "mine"
    nowhere = CliRunner().invoke(main, ["benchmark", "--reference", "-o", "no/folder/report.json"])
    assert nowhere.exit_code == 1 and "no/folder is no folder" in nowhere.output
    assert report_path(kept, overwrite=True) == kept
    names = []
    for _ in range(3):
        names.append(str(report_path(None, overwrite=False)))
        Path(names[-1]).touch()
    assert names == ["nightmill-benchmark.json", "nightmill-benchmark-2.json", "nightmill-benchmark-3.json"]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("hang", "it hung and was cut: no news for 3 s, while comparing texts, among others"),
        ("die", "its process ended by itself (signal SIGSEGV) while comparing texts, among others"),
    ],
)
def test_a_part_that_hangs_or_dies_is_cut_and_told_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, expected: str
) -> None:
    monkeypatch.setattr(parts, "COMMAND", (sys.executable, "-m", "tests.support.hanging_part", fault))
    monkeypatch.setenv("NIGHTMILL_HANG_SECONDS", "3")
    monkeypatch.chdir(ROOT)
    output = tmp_path / "report.json"
    done = CliRunner().invoke(main, ["benchmark", "--reference", "--quick", "-o", str(output)])
    assert done.exit_code == 1, done.output
    found = json.loads(output.read_text())
    assert found["failed"] == ["weights 16bit", "weights fp8"] and found["passed"] == []
    for one in found["parts"]:
        (check,) = one["checks"]
        assert check == {"what": "runs to the end", "ok": False, "found": expected}
    assert expected in done.output


def test_texts_that_depend_on_their_company_fail_the_check(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = texts._greedy

    def with_a_fault(engine: Engine, model: Any, *, beside: int, **options: Any) -> list[tuple[int, ...]]:
        first, *others = greedy(engine, model, beside=beside, **options)
        return [(*first[:-1], first[-1] + (beside > 0)), *others]

    monkeypatch.setattr(texts, "_greedy", with_a_fault)
    found = report()
    assert not found.ok and [check.ok for check in found.checks] == [False, True]
    assert found.checks[0].found == "2 of 3"
    assert [speed.load.prompt for speed in found.speeds] == [123], "what the context has room for"


def test_loads_are_cut_or_left_out_once_the_time_is_up(few: None) -> None:
    loads = (EqualTexts(2, 20, 100), EqualTexts(2, 20, 1), EqualTexts(1, 20, 1))
    cut = report(Timing(loads[:1], seconds=0.001))
    assert [speed.cut for speed in cut.speeds] == [True] and cut.speeds[0].seconds < 10
    found = report(Timing(loads, seconds=5.0, altogether=0.0))
    assert (found.speeds, found.left_out) == ([], list(loads)) and found.ok
    assert found.values()["left_out"][0] == {"sequences": 2, "prompt": 20, "answer": 100}


def test_a_format_that_is_not_computed_says_why(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Engine:
        raise RunnerError("FP8 weights need another GPU")

    monkeypatch.setattr(texts, "build_engine", refuse)
    found = report(weights="fp8")
    assert (found.refused, found.checks, found.speeds) == ("FP8 weights need another GPU", [], [])


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (SelfTestError("qkv is wrong"), True), (KernelLaunchError("refused"), True),
        (DeviceMemoryError("no bytes left"), False), (RunnerError("FP8 weights need another GPU"), False),
    ],
)  # fmt: skip
def test_kernels_that_fail_at_the_start_fail_a_check(
    few: None, monkeypatch: pytest.MonkeyPatch, error: RunnerError, fault: bool
) -> None:
    def fail(*arguments: Any) -> Engine:
        raise error

    monkeypatch.setattr(texts, "build_engine", fail)
    found = report()
    assert found.ok is not fault and (found.refused is None) is fault
    assert str(error) in (found.checks[0].found if fault else found.refused or "")


def test_first_tokens_are_held_against_numpy(few: None) -> None:
    settings, model = in_numpy(weights="fp8")
    with closing(model.file):
        numpy = texts.numpy_tokens(settings, model, ("16bit", "file", "fp8"), said=lambda news: None)
    assert list(numpy.first_tokens) == ["16bit", "fp8"]
    right = report(Timing((), 1.0), weights="fp8")
    wrong = replace(right, checks=[], first_tokens={"fp8": [-1, -1, -1]})
    unknown = replace(right, checks=[], first_tokens={"other": [1, 2, 3]})
    for one in (right, wrong, unknown):
        texts.compared_with_numpy(one, numpy)
    assert (right.checks[-1].ok, right.checks[-1].found) == (True, "3 of 3")
    assert (wrong.checks[-1].ok, wrong.checks[-1].found) == (False, "0 of 3")
    assert not unknown.checks


@pytest.mark.parametrize("key", ["rtx3090", "rtx4090", "h200"])
def test_kernels_of_all_formats_are_compiled_once_those_of_one_format_first(key: str) -> None:
    settings, model = in_numpy()
    with closing(model.file):
        found = kernels.kernels_of(settings, model, ("16bit", "file", "fp8"), card_of(KNOWN_CARDS[key]))
        one = kernels.kernels_of(settings, model, ("16bit",), card_of(KNOWN_CARDS[key]))
    assert len(found) == len(set(found)) and set(one) < set(found)
    names = [path.stem for path, _ in found]
    assert ("mma_fp8" in names, "hopper_fp8" in names) == (key == "rtx4090", key == "h200")
    product = "packed_gemm" if key == "h200" else "packed_mma"
    assert names.index(product) < names.index("embedding"), "products take longest"


def test_a_kernel_that_nvcc_refuses_is_named_and_the_others_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, model = in_numpy()
    with closing(model.file):
        sources = kernels.kernels_of(settings, model, ("16bit",), card_of(KNOWN_CARDS["rtx3090"]))
    asked: list[tuple[str, str]] = []

    def compile_one(path: Path, options: Sequence[str], target: str, *, report: Any) -> bytes:
        asked.append((path.stem, target))
        if path.stem == "sample":
            raise KernelCompileError("nvcc could not compile sample.cu")
        if path.stem == "adjust":
            report("compiled adjust.cu")
        return b""

    monkeypatch.setattr(kernels, "compile_kernels", compile_one)
    found, counts = PartReport("kernels"), list[tuple[int, int]]()
    kernels.compiled(found, sources, "sm_86", lambda words, done, total: counts.append((done, total)))
    assert sorted(asked) == sorted((path.stem, "sm_86") for path, _ in sources)
    assert [(check.ok, check.found) for check in found.checks] == [
        (False, "nvcc could not compile sample.cu"),
        (False, f"{len(sources) - 1} of {len(sources)} for sm_86, 1 of them now"),
    ]
    assert [one.split()[0] for one in found.slowest] == ["adjust.cu"], "what was compiled now"
    assert counts == [(done, len(sources)) for done in range(len(sources) + 1)]
