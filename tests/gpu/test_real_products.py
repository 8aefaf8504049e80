"""Products of real models, in all formats that their files may have, by every way, at few rows and many."""

import pytest

from nightmill.worker.runners.gpu.device import compiler
from nightmill.worker.runners.gpu.device.device import device_count
from tests.gpu import qkv_trials
from tests.gpu.product_trials import DONE, groups
from tests.gpu.watched_process import run_watched

# To list them takes seconds, in every process that collects tests: where there is no GPU, one stands for all.
CASES = groups() if device_count() else [("all", "all")]
QKV_CASES = qkv_trials.groups() if device_count() else [("all", "all", "all")]
_COMPILING = 600.0  # seconds; nvcc says nothing
_STARTING = 120.0
_LAUNCH = 60.0  # a product takes milliseconds; making weights and NumPy's part, a few seconds


def patience(line: str) -> float:
    """How long a process may say nothing after a line."""
    if not line:
        return _STARTING
    return _COMPILING if line.startswith("compiling") else _LAUNCH


@pytest.mark.parametrize(("kind", "formats"), CASES, ids=lambda value: value)
def test_products_of_real_models_are_right_by_every_way(kind: str, formats: str) -> None:
    """In a process, which is killed, and the launch named, if a kernel never ends."""
    outcome = run_watched(
        ["-m", "tests.gpu.product_trials", kind, formats, *compiler.COMMON_OPTIONS],
        patience,
        keep=lambda line: line.startswith("WRONG"),
    )
    assert outcome.code == 0 and outcome.lines[-1].startswith(DONE), f"{kind} {formats} {outcome}"


@pytest.mark.parametrize(("head", "style", "formats"), QKV_CASES, ids=lambda value: value)
def test_queries_keys_and_values_of_real_models_in_one_launch(head: str, style: str, formats: str) -> None:
    """In a process of its own, too."""
    outcome = run_watched(
        ["-m", "tests.gpu.qkv_trials", head, style, formats, *compiler.COMMON_OPTIONS],
        patience,
        keep=lambda line: line.startswith("WRONG"),
    )
    assert outcome.code == 0 and outcome.lines[-1].startswith(DONE), f"{head} {style} {formats} {outcome}"
