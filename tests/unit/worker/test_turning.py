"""Lists of models, the files of each, and reading the next one's weights ahead."""

import os
import threading
from pathlib import Path

import pytest

from nightmill.jobs.base.settings import Settings, parse_models
from nightmill.jobs.errors import ModelFetchError, ModelFileError, SettingsError
from nightmill.worker.assembly import fetching
from nightmill.worker.assembly.fetching import check_files, with_files, with_models
from nightmill.worker.assembly.options import as_arguments, merge_options
from nightmill.worker.service.sleeping import with_option
from nightmill.worker.service.turns.turning import files_of, named_models
from nightmill.worker.service.turns.warming import SHARE, Warmer


def test_a_list_of_models_is_files_and_names_with_names_of_ones_own() -> None:
    assert parse_models("a.gguf, big=hf:o/r:Q8_0 ,https://x/y?z=1") == (
        (None, "a.gguf"), ("big", "hf:o/r:Q8_0"), (None, "https://x/y?z=1"),
    )  # fmt: skip
    for bad, said in {
        "": "must be GGUF files",
        "a=": "must be GGUF",
        "a=1,a=2": "two models of the name 'a'",
    }.items():
        with pytest.raises(SettingsError, match=f"--models: .*{said}"):
            merge_options(Settings(), {"models": bad})
    with pytest.raises(
        SettingsError, match=r"--stay: is not a duration; write a number and s, m, h or d, as in 10m"
    ):
        merge_options(Settings(), {"stay": "10"})
    with pytest.raises(SettingsError, match="--model and --models: give one of them"):
        merge_options(Settings(), {"models": "a", "model": "b"})
    assert merge_options(Settings(models="a,b"), {"model": "c"}).models is None
    given = {"models": "a,b", "stay": "1h", "swap_for_interactive": True}
    assert as_arguments(given) == ["--models", "a,b", "--stay", "1h", "--swap-for-interactive"]


def test_names_are_those_of_files_and_a_process_serves_the_one_of_its_turn() -> None:
    settings = with_models(Settings(models="one.gguf,/x/two-00001-of-00002.gguf,b=three.gguf"))
    assert named_models(settings) == {
        "one": "one.gguf", "two": "/x/two-00001-of-00002.gguf", "b": "three.gguf",
    }  # fmt: skip
    assert with_models(settings) == settings
    served = with_files(settings, "b", str)
    assert (served.model, served.model_name, served.models) == (Path("three.gguf"), "b", settings.models)
    assert with_files(settings, None, str).model_name == "one"
    with pytest.raises(SettingsError, match="'c' is not among the models"):
        with_files(settings, "c", str)
    with pytest.raises(SettingsError, match="two are called 'one'; write NAME=MODEL"):
        with_models(Settings(models="one.gguf,/x/one.gguf"))


def test_a_misspelt_file_of_the_list_is_told_before_rows_wait_for_it(tmp_path: Path) -> None:
    here = tmp_path / "here.gguf"
    here.touch()
    check_files(f"{here},hf:o/r,late={tmp_path}/late.gguf")
    with pytest.raises(
        ModelFileError, match=r"--models: \S*/hree.gguf: there is no such file; .* NAME=\S*hree"
    ):
        check_files(f"{here},{tmp_path}/hree.gguf")


def test_a_model_that_cannot_be_fetched_stays_if_it_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(name: str, **_: object) -> None:
        raise ModelFetchError("the Hub does not answer")

    monkeypatch.setattr(fetching, "fetched", away)
    assert named_models(with_models(Settings(models="x=hf:o/r,b.gguf"))) == {"x": "hf:o/r", "b": "b.gguf"}
    with pytest.raises(ModelFetchError, match="With --models NAME=hf:o/r a worker starts without it"):
        with_models(Settings(models="hf:o/r,b.gguf"))


def test_an_option_replaces_what_a_command_says_of_it() -> None:
    command = ["python", "-m", "x", "--turn", "a", "--id=7", "--turned", "--models", "--turn"]
    assert with_option(command, "--turn", "b")[:-2] == ["python", "-m", "x", "--id=7", "--turned", "--models"]
    assert with_option(["x", "--id=7"], "--id", "8") == ["x", "--id", "8"]


def test_the_files_of_a_split_model_are_all_its_parts(tmp_path: Path) -> None:
    parts = [tmp_path / f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    for path in (*parts, tmp_path / "other.gguf", tmp_path / "bigger-00001-of-00002.gguf"):
        path.write_bytes(b"x")
    assert files_of(str(parts[0])) == parts
    assert files_of(str(tmp_path / "other.gguf")) == [tmp_path / "other.gguf"]
    assert files_of(str(tmp_path / "none.gguf")) == []


def read_bytes() -> int:
    """Wait for the end of the reading; returns the bytes that this process has read so far."""
    for thread in threading.enumerate():
        if thread.name == "weights":
            thread.join(120)
    return int(Path("/proc/self/io").read_text().split()[1])


def test_weights_are_read_once_and_no_more_than_a_share_of_the_memory_that_there_is(tmp_path: Path) -> None:
    files = []
    for name in ("one", "two"):
        files.append(tmp_path / name)
        files[-1].write_bytes(os.urandom(6 << 20))
    failures: list[str] = []
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    warmer = Warmer(failures.append, available=lambda: 1 << 40)
    before = read_bytes()
    warmer.warm("model", [*files, tmp_path / "none"])
    whole = read_bytes() - before
    assert 12 << 20 <= whole < 13 << 20
    warmer.warm("model", files)  # it was the last
    assert read_bytes() - before - whole < 1 << 20
    little = Warmer(failures.append, available=lambda: int((8 << 20) / SHARE))
    before = read_bytes()
    little.warm("model", files)
    assert 8 << 20 <= read_bytes() - before < 9 << 20
    assert os.getpriority(os.PRIO_PROCESS, 0) == priority and failures == []
