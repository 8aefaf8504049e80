"""A way that was fastest at an earlier start is not timed again, and never taken for another."""

import errno
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.errors import NightmillError
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu import runner as runner_module
from nightmill.worker.runners.gpu.device.device import (
    Device,
    DeviceLostError,
    DeviceMemoryError,
    KernelLaunchError,
)
from nightmill.worker.runners.gpu.device.operands import ELEMENT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.products import chooser, remembered
from nightmill.worker.runners.gpu.products.clock import Choices, KernelClock, Naming
from nightmill.worker.runners.gpu.products.remembered import RememberedChoices, choices_file
from nightmill.worker.runners.starting import SelfTestError
from tests.support.cuda_runners import cuda_runner
from tests.unit.runners.recorded_cuda import HOPPER, RecordedDriver, install_uncompiled
from tests.unit.runners.test_gpu_host import NumbersClock

WAYS = list(range(1, 21))
MONTH = 30 * 86400.0


def tuned(
    path: Path,
    ways: Sequence[int] = WAYS,
    worthy: Callable[[Sequence[int]], Sequence[int]] = lambda ways: ways,
    *,
    steady: bool = True,
    kernel: Callable[[int], str] = lambda way: "library",
) -> tuple[int, list[list[int]], list[int]]:
    """A start: what is chosen for 64 rows, what was timed, and what was run."""
    kept, ran = RememberedChoices(path), list[int]()
    clock: Any = NumbersClock(kept, steady=steady)
    choices: Choices[int] = Choices(clock, lambda rows: ways, naming=Naming("a product", str, kernel))
    runs = running(ran)
    assert choices.tune(64, runs, lambda: None, worthy)
    assert not choices.tune(64, runs, lambda: None, worthy)
    kept.save()
    return choices.best(64), clock.timed, ran


def running(ran: list[int]) -> Callable[[int], Callable[[int], None]]:
    """Ways that note that they are run."""

    def runs(way: int) -> Callable[[int], None]:
        def run(turn: int) -> int:
            ran.append(way)
            return way

        return run  # type: ignore[return-value]

    return runs


def written(path: Path, begun: float, fastest: object) -> None:
    path.write_text(json.dumps({"begun": begun, "fastest": fastest}))


def test_the_fastest_way_is_timed_once_and_then_only_run(tmp_path: Path) -> None:
    path = tmp_path / "choices" / "gpu.json"
    assert tuned(path) == (20, [WAYS], WAYS)
    assert tuned(path) == (20, [], [20])
    held = json.loads(path.read_text())
    assert [list(ways.values()) for ways in held["fastest"].values()] == [["20"]]
    assert abs(time.time() - held["begun"]) < 600
    assert [one.name for one in path.parent.iterdir()] == ["gpu.json"]


def test_a_way_that_is_not_there_any_more_or_gives_other_bits_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert tuned(path)[0] == 20
    without = WAYS[:-1]
    assert tuned(path, worthy=lambda ways: [one for one in ways if one < 20] or [1])[:2] == (19, [without])
    assert tuned(path, without) == (19, [], [19])
    assert tuned(path, WAYS[:5])[:2] == (5, [WAYS[:5]])


def test_where_there_are_other_kernels_than_when_it_was_timed_all_are_timed(tmp_path: Path) -> None:
    """As after an update that brings one, or with plain products; what was found before is not lost."""
    path = tmp_path / "gpu.json"
    few, names = WAYS[:10], {"kernel": lambda way: f"tile {way}"}
    assert tuned(path, few, **names)[:2] == (10, [few])
    assert tuned(path, WAYS, **names)[:2] == (20, [WAYS])
    assert tuned(path, few, **names) == (10, [], [10])
    assert tuned(path, WAYS, **names) == (20, [], [20])


def test_a_way_that_another_size_brought_is_found_at_the_next_start(tmp_path: Path) -> None:
    """The library's own list for a size need not have what its shortlist has from the size before.

    Whatever a file says, only what suits a size is taken.
    """
    path, every = tmp_path / "gpu.json", {64: WAYS, 48: WAYS[:5], 40: WAYS[:7]}
    suits: Callable[[int, int], bool] = lambda way, rows: rows != 40 or way < 20  # noqa: E731
    for turn in range(3):
        if turn == 2:
            path.write_text(path.read_text().replace('"19"', '"20"'))
        kept, ran = RememberedChoices(path), list[int]()
        clock: Any = NumbersClock(kept)
        naming: Naming[int] = Naming("a product", str, lambda way: "library")
        choices: Choices[int] = Choices(clock, lambda rows: every[rows], suits, naming=naming)
        for rows in every:
            assert choices.tune(rows, running(ran), lambda: None)
        kept.save()
        assert [choices.best(rows) for rows in every] == [20, 20, (19, 19, 7)[turn]]
        assert len(clock.timed) == (3, 0, 1)[turn]
        assert turn != 1 or ran == [20, 20, 19]


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


NOW = time.time()
PLACE = remembered._place(64, ["library"])
STRANGE = (
    "",
    "{",
    "[1]",
    "null",
    "[" * 100_000,
    '{"a":' * 100_000,
    "\ud800",
    json.dumps({"a product": {PLACE: "20"}}),
    json.dumps({"begun": NOW, "fastest": [1]}),
    json.dumps({"begun": NOW, "fastest": {"a product": 3}}),
    json.dumps({"begun": NOW, "fastest": {"a product": {PLACE: 20}}}),
    json.dumps({"begun": NOW, "fastest": {"a product": {PLACE: "no"}}}),
    *(
        json.dumps({"begun": begun, "fastest": {"a product": {PLACE: "20"}}})
        for begun in ("now", None, True, float("nan"), float("inf"), 10**400, NOW - 1.1 * MONTH, NOW + MONTH)
    ),
)


@pytest.mark.parametrize("text", STRANGE, ids=range(len(STRANGE)))
def test_a_file_that_is_none_of_ours_or_from_another_time_is_as_good_as_none(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "gpu.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    assert tuned(path)[:2] == (20, [WAYS])
    assert tuned(path)[:2] == (20, [])


def test_a_clock_that_is_some_hours_behind_takes_what_another_kept(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    written(path, time.time() + 3600, {"a product": {PLACE: "20"}})
    assert tuned(path) == (20, [], [20])


def test_who_adds_to_a_file_makes_it_no_younger(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    begun = time.time() - 0.9 * MONTH
    written(path, begun, {"another": {PLACE: "x"}})
    assert tuned(path)[1] == [WAYS]
    held = json.loads(path.read_text())
    assert held["begun"] == begun and held["fastest"].keys() == {"another", "a product"}


def test_a_huge_file_is_begun_anew_and_none_is_written(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    tuned(path)
    path.write_text(path.read_text() + " " * remembered._MOST_BYTES)
    assert tuned(path)[1] == [WAYS]
    begun, full = time.time(), {"another": {PLACE: "x" * remembered._MOST_BYTES}}
    written(path, begun, full)
    beyond = path.stat().st_size - remembered._MOST_BYTES
    written(path, begun, {"another": {PLACE: full["another"][PLACE][beyond:]}})
    assert path.stat().st_size == remembered._MOST_BYTES
    assert tuned(path)[1] == [WAYS]
    assert json.loads(path.read_text())["fastest"].keys() == {"a product"}
    assert tuned(path)[1] == []


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe, folder, endless = tmp_path / "pipe", tmp_path / "folder", tmp_path / "endless"
    os.mkfifo(pipe)
    folder.mkdir()
    endless.symlink_to("/dev/zero")
    opened = len(list(Path("/proc/self/fd").iterdir()))
    silent = os.open(pipe, os.O_RDWR)
    for path in (pipe, folder, endless):
        assert RememberedChoices(path).find("a product", 64, ["library"]) is None
    os.close(silent)
    assert len(list(Path("/proc/self/fd").iterdir())) == opened
    assert tuned(pipe)[1] == [WAYS] and tuned(pipe)[1] == []
    assert tuned(endless)[1] == [WAYS] and tuned(endless)[1] == [] and not endless.is_symlink()


def test_what_is_forgotten_is_timed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gpu.json"
    tuned(path)
    kept = RememberedChoices(path)
    kept.distrust()
    assert path.exists(), "nothing was taken from it"
    assert kept.find("a product", 64, ["library"]) == "20"
    kept.distrust()
    assert kept.find("a product", 64, ["library"]) is None and not path.exists()
    kept.forget()
    path.mkdir()
    kept.forget()
    assert f"{path} cannot be removed" in caplog.text


def test_what_another_worker_found_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    one, other = RememberedChoices(path), RememberedChoices(path)
    one.note("a product", 8, ["library"], "x")
    other.note("a product", 16, ["library"], "y")
    one.save()
    other.save()
    both = RememberedChoices(path)
    assert [both.find("a product", rows, ["library"]) for rows in (8, 16)] == ["x", "y"]


def test_a_cache_that_cannot_be_written_costs_time_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level("INFO"):
        assert tuned(tmp_path / "file" / "gpu.json")[:2] == (20, [WAYS])
    assert "the next start times it again" in caplog.text


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with caplog.at_level("INFO"), monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert tuned(tmp_path / "gpu.json")[:2] == (20, [WAYS])
    assert "No space left" in caplog.text
    assert not list(tmp_path.iterdir())


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


SIZES: dict[str, Any] = {"slots": 8, "context": 128, "kv_pages": 64, "max_tokens": 2048, "tune": True}


@pytest.fixture
def kept_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where runners of a test keep what was fastest; times count as steady."""
    monkeypatch.setattr(chooser, "choices_file", lambda device, beside: tmp_path / "gpu.json")
    monkeypatch.setattr(
        KernelClock, "_look_again", lambda clock, first, second: setattr(clock, "steady", True)
    )
    return tmp_path / "gpu.json"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ways were timed, each time that any were."""
    timed, ranked = list[int](), KernelClock.ranked

    def counted(clock: KernelClock, kernels: Sequence[Any], *rest: Any, **more: Any) -> list[int]:
        timed.append(len(kernels))
        return ranked(clock, kernels, *rest, **more)

    monkeypatch.setattr(KernelClock, "ranked", counted)
    return timed


def test_a_second_start_of_a_runner_times_nothing(
    hopper: RecordedDriver, kept_file: Path, timed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    file, found = GgufFile.open(demo_model()), []
    for _ in range(2):
        with closing(cuda_runner(file, read_spec(file), **SIZES)) as runner:
            assert runner._products is not None
            found.append((runner._products.tuned(), len(timed)))
    assert found[0] == found[1]
    assert found[0][1] > 20
    said = [line for line in caplog.messages if "sizes were timed" in line]
    assert [re.findall(r"\d+", line) for line in said] == [[str(len(timed))] * 2, ["0", "0"]]


@pytest.mark.parametrize("weights", [WeightsFormat.ELEMENT, WeightsFormat.FILE], ids=lambda one: one.value)
def test_sizes_that_nothing_is_timed_for_are_computed_as_at_a_start_that_keeps_nothing(
    weights: WeightsFormat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, timed: list[int],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Which of the library's algorithms may be taken then is known only if all were looked at.

    And no two ways to compute a product have one name.
    """
    driver = install_uncompiled(monkeypatch, tmp_path, HOPPER)
    request.getfixturevalue("kept_file")
    file, found, precision = GgufFile.open(demo_model()), [], Precision(weights=weights)
    for _ in range(2):
        with closing(cuda_runner(file, read_spec(file), precision=precision, **SIZES)) as runner:
            products = runner._products
            assert products is not None
            ran = list[tuple[str, int, list[int]]]()
            x, y, w = (Buffer(runner.device.allocate(1 << 30), (4096, 4096), ELEMENT) for _ in range(3))
            for (_, outputs, inputs, format_), product in products._known.items():
                rows = outputs if product.activation is None else 2 * outputs
                for count in (12, 32, 100, 300, 500):
                    names = [chooser._name(one) for one in products._candidates(product._shape(count))]
                    assert len(set(names)) == len(names)
                    if format_ is not Format.MIXED:
                        driver.ran.clear()
                        before = Counter(driver.launches)
                        product(x, Matrix(w.address, rows, inputs, format_), y, count)
                        launched = sorted((Counter(driver.launches) - before).elements())
                        ran.append((f"{count} rows: {launched}", count, list(driver.ran)))
        found.append((ran, len(timed)))
    assert found[0] == found[1]


def test_what_fails_the_test_of_products_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Else a start would take what was wrong at the start before; what was there before goes, too."""
    install_uncompiled(monkeypatch, tmp_path, HOPPER)
    kept_file: Path = request.getfixturevalue("kept_file")
    file = GgufFile.open(demo_model())
    spec, precision = read_spec(file), Precision(weights=WeightsFormat.FILE)

    def start(**options: Any) -> None:
        cuda_runner(
            file, spec, **{**SIZES, "slots": 2, "max_tokens": 512, "precision": precision} | options
        ).close()

    def fail(error: NightmillError) -> None:
        def failing(*arguments: Any) -> None:
            raise error

        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(runner_module, "check_products", failing)
            start()

    fail(SelfTestError("a product is wrong on this GPU"))
    assert not kept_file.exists()
    start()
    fail(DeviceMemoryError("others have the memory"))
    assert kept_file.exists(), "no kernel is at fault"
    for error in (SelfTestError("wrong"), DeviceLostError("lost"), KernelLaunchError("refused")):
        assert kept_file.exists()
        fail(error)
        assert not kept_file.exists()
        start()
    held = kept_file.read_text()
    start(precision=replace(precision, plain_products=True))  # after one that hung, perhaps
    assert not set(places(held)) & set(places(kept_file.read_text()))


def places(text: str) -> list[tuple[str, str]]:
    return [(what, place) for what, ways in json.loads(text)["fastest"].items() for place in ways]
