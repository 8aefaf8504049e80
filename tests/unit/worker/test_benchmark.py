"""`nightmill benchmark`: checks that can fail, speeds, and a report without names."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import RunnerError
from nightmill.worker.assembly.model import demo_model, load_model
from nightmill.worker.commands import benchmarking
from nightmill.worker.commands.benchmarking import EqualTexts, benchmark_format
from nightmill.worker.engine.engine import Engine
from nightmill.worker.runners.gpu.device.device import DeviceMemoryError, KernelLaunchError
from nightmill.worker.runners.starting import SelfTestError

pytestmark = pytest.mark.heavy


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and shorter texts than for a GPU."""
    for name, value in (("_CHECKED", 3), ("_CHECKED_TOKENS", 4), ("_BESIDE", 3), ("CONTEXT", 128)):
        monkeypatch.setattr(benchmarking, name, value)


def report(**changes: Any) -> benchmarking.FormatReport:
    settings = Settings(model=demo_model(), reference=True, weights="16bit").model_copy(update=changes)
    with closing(load_model(settings)) as model:
        return benchmark_format(
            settings, model, loads=[EqualTexts(2, 200, 4)], seconds=1.0, said=lambda news: None
        )


def test_a_report_has_what_a_card_is_judged_by(
    few: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmarking, "LOADS", (EqualTexts(2, 100, 3),))
    output = tmp_path / "report.json"
    done = CliRunner().invoke(
        main, ["benchmark", "--reference", "--weights", "16bit", "--seconds", "1", "-o", str(output)]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(output.read_text())
    assert found["format"] == 1 and found["device"] is None and found["model"]["family"] == "qwen2"
    assert str(Path.home()) not in output.read_text() and str(demo_model().parent) not in output.read_text()
    (one,) = found["formats"]
    assert one["ok"] and one["refused"] is None and one["arithmetic"].startswith("runner=numpy; ")
    assert {check["what"]: check["found"] for check in one["checks"]} == {
        "texts are equal: alone and among others": "3 of 3",
        "texts are equal: twice": "3 of 3",
    }
    (speed,) = one["speeds"]
    assert speed["load"] == {"sequences": 2, "prompt": 100, "answer": 3}
    assert speed["output_tokens_per_s"] > 0 and speed["prompt_tokens_per_s"] > 0
    assert "2" in done.output and str(output) in done.output


def test_texts_that_depend_on_their_company_fail_the_check(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = benchmarking._greedy

    def with_a_fault(engine: Engine, model: Any, *, beside: int) -> list[tuple[int, ...]]:
        first, *others = greedy(engine, model, beside=beside)
        return [(*first[:-1], first[-1] + (beside > 0)), *others]

    monkeypatch.setattr(benchmarking, "_greedy", with_a_fault)
    found = report()
    assert not found.ok and [check.ok for check in found.checks] == [False, True]
    assert found.checks[0].found == "2 of 3"
    assert [speed.load.prompt for speed in found.speeds] == [123], "what the context has room for"


def test_a_format_that_is_not_computed_says_why(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Engine:
        raise RunnerError("FP8 weights need another GPU")

    monkeypatch.setattr(benchmarking, "build_engine", refuse)
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
    few: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: RunnerError, fault: bool
) -> None:
    def fail(*arguments: Any) -> Engine:
        raise error

    monkeypatch.setattr(benchmarking, "build_engine", fail)
    found = report()
    assert found.ok is not fault and (found.refused is None) is fault
    done = CliRunner().invoke(main, ["benchmark", "--reference", "-o", str(tmp_path / "report.json")])
    assert done.exit_code == 1 and str(error) in done.output


def test_first_tokens_are_held_against_numpy(few: None) -> None:
    settings = Settings(model=demo_model(), reference=True, weights="16bit")
    with closing(load_model(settings)) as model:
        right = benchmarking._compared_with_numpy(settings, model, _texts(settings, model))
        wrong = benchmarking._compared_with_numpy(settings, model, [(0,)] * 3)
    assert right.ok and right.found == "3 of 3"
    assert not wrong.ok and wrong.found == "0 of 3"


def _texts(settings: Settings, model: Any) -> list[tuple[int, ...]]:
    sized = settings.model_copy(update={"max_sequences": 8})
    with benchmarking._closing(benchmarking.build_engine(sized, model)) as engine:
        return benchmarking._greedy(engine, model, beside=0)
