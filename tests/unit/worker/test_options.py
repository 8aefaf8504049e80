"""The worker's options: over the environment's settings, and from one command line to the other."""

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import SettingsError
from nightmill.worker.assembly.fetching import with_files
from nightmill.worker.assembly.options import DTYPES, KV, WEIGHTS, as_arguments, merge_options
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.precision import WeightsFormat
from nightmill.worker.runners.kv_format import KvFormat


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({}, []),
        ({"prefix_sharing": None, "reference": None}, []),
        ({"prefix_sharing": False}, ["--no-prefix-sharing"]),
        ({"prefix_sharing": True, "context": 64}, ["--context", "64", "--prefix-sharing"]),
        ({"dtype": "bf16", "gpu": 1}, ["--gpu", "1", "--dtype", "bf16"]),
        ({"kv": "16bit", "weights": "fp8"}, ["--weights", "fp8", "--kv", "16bit"]),
        ({"model": "a.gguf", "reference": True}, ["--model", "a.gguf", "--reference"]),
    ],
)
def test_options_that_were_given_are_given_on(given: dict[str, object], arguments: list[str]) -> None:
    assert as_arguments(given) == arguments


def test_the_types_to_compute_in_are_those_that_kernels_are_compiled_for() -> None:
    assert list(DTYPES.choices) == ["auto", *(element.value for element in Element)]
    asked = Settings.from_env({"NIGHTMILL_DTYPE": "f16"})
    assert (Settings().dtype, asked.dtype, merge_options(asked, {"dtype": "bf16"}).dtype) == (
        "auto", "f16", "bf16",
    )  # fmt: skip
    with pytest.raises(SettingsError, match=r"NIGHTMILL_DTYPE: .*'half'"):
        Settings.from_env({"NIGHTMILL_DTYPE": "half"})


def test_what_can_be_chosen_of_weights_and_kv_is_what_a_runner_knows() -> None:
    for choice, formats in ((WEIGHTS, WeightsFormat), (KV, KvFormat)):
        assert set(choice.choices) <= {format.value for format in formats}
    with pytest.raises(SettingsError, match=r"--weights: .*'q9'"):
        merge_options(Settings(), {"weights": "q9"})


def test_prefix_sharing_is_on_unless_the_environment_or_an_option_says_otherwise() -> None:
    off = Settings.from_env({"NIGHTMILL_PREFIX_SHARING": "false"})
    assert (Settings().prefix_sharing, off.prefix_sharing) == (True, False)
    assert merge_options(off, {"prefix_sharing": True}).prefix_sharing is True
    assert merge_options(off, {"prefix_sharing": None}).prefix_sharing is False
    assert merge_options(Settings(), {"prefix_sharing": False}).prefix_sharing is False


def test_one_model_that_is_asked_for_is_not_loaded_together_with_those_of_the_environment() -> None:
    service = Settings(models="a.gguf,b.gguf", together=True)
    assert merge_options(service, {"gpu": 1}).together
    alone = merge_options(service, {"model": "c.gguf"})
    assert (alone.models, alone.together) == (None, False)
    asked = merge_options(Settings(), {"model": "c.gguf", "together": True})
    assert asked.together  # and then refused, as there is no list
    with pytest.raises(SettingsError, match="--together starts a worker for each model"):
        with_files(service, None, print)  # as Celery's own command would


def test_a_worker_whose_heartbeat_others_would_miss_is_refused() -> None:
    asked = Settings(heartbeat_seconds=20.0)
    with pytest.raises(
        SettingsError, match=r"STALE_SECONDS: 30 must be twice NIGHTMILL_HEARTBEAT_SECONDS \(20\)"
    ):
        merge_options(asked, {})
    assert merge_options(Settings(heartbeat_seconds=15.0), {}).stale_seconds == 30.0
