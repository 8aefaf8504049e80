"""A way that was fastest at an earlier start is not timed again, and never taken for another."""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nightmill.worker.assembly.model import demo_model
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.products import chooser, remembered
from nightmill.worker.runners.gpu.products.clock import Choices, KernelClock
from nightmill.worker.runners.gpu.products.remembered import RememberedChoices, choices_file
from tests.support.cuda_runners import cuda_runner
from tests.unit.runners.recorded_cuda import RecordedDriver
from tests.unit.runners.test_gpu_host import NumbersClock

WAYS = list(range(1, 21))


def tuned(
    path: Path,
    ways: Sequence[int] = WAYS,
    worthy: Callable[[Sequence[int]], Sequence[int]] = lambda ways: ways,
    *,
    steady: bool = True,
) -> tuple[int, list[list[int]], list[int]]:
    """A start: what is chosen for 64 rows, what was timed, and what was run."""
    kept, ran = RememberedChoices(path), list[int]()
    clock: Any = NumbersClock(kept, steady=steady)
    choices: Choices[int] = Choices(clock, lambda rows: ways, what=("a product", str))

    def runs(way: int) -> Callable[[int], None]:
        def run(turn: int) -> int:
            ran.append(way)
            return way

        return run  # type: ignore[return-value]

    assert choices.tune(64, runs, lambda: None, worthy)
    assert not choices.tune(64, runs, lambda: None, worthy)
    kept.save()
    return choices.best(64), clock.timed, ran


def test_the_fastest_way_is_timed_once_and_then_only_run(tmp_path: Path) -> None:
    path = tmp_path / "choices" / "gpu.json"
    assert tuned(path) == (20, [WAYS], WAYS)
    assert tuned(path) == (20, [], [20])
    assert json.loads(path.read_text()) == {"a product": {"64": "20"}}
    assert [one.name for one in path.parent.iterdir()] == ["gpu.json"]


def test_a_way_that_is_not_there_any_more_or_gives_other_bits_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert tuned(path)[0] == 20
    without = WAYS[:-1]
    assert tuned(path, worthy=lambda ways: [one for one in ways if one < 20] or [1])[:2] == (19, [without])
    assert tuned(path, without) == (19, [], [19])
    assert tuned(path, WAYS[:5])[:2] == (5, [WAYS[:5]])


def test_times_that_differ_from_run_to_run_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert tuned(path, steady=False)[:2] == (20, [WAYS])
    assert not path.exists()
    assert tuned(path)[:2] == (20, [WAYS])


def test_a_clock_says_whether_others_use_the_gpu() -> None:
    clock = object.__new__(KernelClock)
    for first, second, steady in ((1.0, 1.04, True), (1.04, 1.0, True), (1.0, 1.1, False), (2.0, 1.0, False)):
        clock._look_again(first, second)
        assert clock.steady is steady


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"a product": 3}', '{"a product": {"64": 20}}', '{"a product": {"64": "no"}}']
)
def test_a_file_that_is_none_of_ours_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(text)
    assert tuned(path)[:2] == (20, [WAYS])
    assert tuned(path)[:2] == (20, [])


def test_an_old_file_and_a_huge_one_are_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    tuned(path)
    month = time.time() - 31 * 86400
    os.utime(path, (month, month))
    assert tuned(path)[1] == [WAYS]
    path.write_text(path.read_text() + " " * remembered._MOST_BYTES)
    assert tuned(path)[1] == [WAYS]


def test_what_another_worker_found_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    one, other = RememberedChoices(path), RememberedChoices(path)
    one.note("a product", 8, "x")
    other.note("a product", 16, "y")
    one.save()
    other.save()
    assert json.loads(path.read_text()) == {"a product": {"8": "x", "16": "y"}}


def test_a_cache_that_cannot_be_written_costs_time_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level("INFO"):
        assert tuned(tmp_path / "file" / "gpu.json")[:2] == (20, [WAYS])
    assert "the next start times it again" in caplog.text


def test_other_kernels_or_cards_have_files_of_their_own(
    hopper: RecordedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Device() as device:
        files = [choices_file(device, "F16")]
        assert choices_file(device, "F16") == files[0]
        files.append(choices_file(device, "BF16"))
        for name in ("kernel_revision", "compiler_release"):
            with monkeypatch.context() as patch:
                patch.setattr(remembered, name, lambda: "another")
                files.append(choices_file(device, "F16"))
        for name, value in (("name", "another"), ("driver_version", 1), ("multiprocessors", 1)):
            with monkeypatch.context() as patch:
                patch.setattr(device, name, value)
                files.append(choices_file(device, "F16"))
    assert len(set(files)) == len(files)
    assert {one.parent.name for one in files} == {"choices"}


def test_a_second_start_of_a_runner_times_nothing(
    hopper: RecordedDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chooser, "choices_file", lambda device, beside: tmp_path / "gpu.json")
    monkeypatch.setattr(
        KernelClock, "_look_again", lambda clock, first, second: setattr(clock, "steady", True)
    )
    file, timed = GgufFile.open(demo_model()), list[int]()
    ranked = KernelClock.ranked

    def counted(clock: KernelClock, kernels: Sequence[Any], *rest: Any, **more: Any) -> list[int]:
        timed.append(len(kernels))
        return ranked(clock, kernels, *rest, **more)

    monkeypatch.setattr(KernelClock, "ranked", counted)
    found = []
    for _ in range(2):
        options: dict[str, Any] = {"slots": 8, "context": 128, "kv_pages": 64, "max_tokens": 2048}
        with closing(cuda_runner(file, read_spec(file), tune=True, **options)) as runner:
            assert runner._products is not None
            found.append(runner._products.tuned())
        found.append(list(timed))  # type: ignore[arg-type]
    first, at_first, second, at_second = found
    assert first == second and at_first == at_second
    assert len(at_first) > 20
