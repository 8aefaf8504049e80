"""What a campaign says at its end, and what it makes of a child's answer."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaign import model_files
from tests.campaign.report import Report


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of 64 KiB; what is kept of it goes to a folder of the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = tmp_path / "file.gguf"
    path.write_bytes(bytes(1 << 16))
    yield path


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ({"outcome": "accepted", "said": "", "seconds": 0.2, "mib": 3.0}, []),
        (
            {"outcome": "refused", "said": "ModelFileError: is not a GGUF file", "seconds": 0.2, "mib": 3.0},
            [],
        ),
        ({"outcome": "refused", "said": "ModelFileError", "seconds": 9.0, "mib": 3.0}, ["model-slow"]),
        ({"outcome": "accepted", "said": "", "seconds": 0.2, "mib": 900.0}, ["model-large"]),
        ({"outcome": "traceback", "said": "KeyError", "seconds": 0.2, "mib": 3.0}, ["model-traceback"]),
        ({"outcome": "died", "said": "-11"}, ["model-died"]),
        ({"outcome": "hang", "said": "no answer"}, ["model-hang"]),
    ],
)
def test_a_file_is_refused_or_accepted_at_a_bounded_cost(
    sample: Path, answer: dict[str, object], found: list[str]
) -> None:
    report = Report(1)
    model_files.judge(answer, sample, "1-1", report)
    assert [violation.kind for _, _, violation in report.violations] == found
    kept = list(sample.parent.glob("nightmill-mutant-1-1.gguf"))
    assert bool(kept) == bool(found), "what broke a rule is kept for a replay, nothing else"


def test_the_table_counts_kinds_and_says_how_to_repeat() -> None:
    report = Report(42)
    report.part = "sqlite"
    threads = [threading.Thread(target=report.count, args=("jobs", 5)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report.step = "3.00 s kill_worker"
    report.violate("lost", "job a")
    report.violate("lost", "job a")
    report.violate("lost", "job b")
    summary = report.summary()
    assert "sqlite: jobs" in summary and "40" in summary
    assert "2 x sqlite lost, first after 3.00 s kill_worker: job a" in summary
    assert summary.endswith("python -m tests.campaign --seed 42 --only sqlite")
