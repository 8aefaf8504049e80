"""A split model is the same as the whole one, whatever part a tensor is in; what is missing is named."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import ModelFileError
from nightmill.worker.assembly.model import load_model, name_of
from nightmill.worker.assembly.reporting import ReportingFile
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from tests.support.ggufs import write_model


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The first of several parts."""
    return write_model(tmp_path / "m.gguf", layers=1, split=5)


def parts(first: Path) -> list[Path]:
    return sorted(first.parent.glob("m-*.gguf"))


def test_a_split_model_is_the_whole_one(first: Path, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole_path = write_model(tmp_path / "whole" / "m.gguf", layers=1)
    assert len(parts(first)) > 2
    with ReportingFile.open(first) as file, GgufFile.open(whole_path) as whole:
        told: list[str] = []
        file.progress = lambda step, news: told.append(news)
        assert read_spec(file) == read_spec(whole)
        assert list(file.tensors) == list(whole.tensors)
        for name in whole.tensors:
            np.testing.assert_array_equal(file.array(name), whole.array(name))
        assert len(told) > 2
    model = load_model(Settings(model=first))
    model.close()
    assert model.name == "m"


def test_the_digest_covers_every_part(first: Path) -> None:
    def digest() -> str:
        with GgufFile.open(first) as file:
            return file.digest()

    before = digest()
    assert digest() == before
    last = bytearray(parts(first)[-1].read_bytes())
    last[-1] ^= 1
    parts(first)[-1].write_bytes(last)
    assert digest() != before


def test_what_is_closed_lets_go_of_all_parts(first: Path) -> None:
    file = GgufFile.open(first)
    file.close()
    for name in file.tensors:
        with pytest.raises(ValueError, match="was closed"):
            file.raw(name)


def test_another_part_than_the_first_is_refused_with_the_name_of_the_first(first: Path) -> None:
    second = parts(first)[1]
    with pytest.raises(ModelFileError) as told:
        GgufFile.open(second)
    count = len(parts(first))
    assert (
        str(told.value)
        == f"{second}: is part 2 of the {count} of a split model; give its first part, {first}"
    )
    renamed = second.rename(second.with_name("second.gguf"))
    with pytest.raises(ModelFileError, match="give the path of its first part"):
        GgufFile.open(renamed)


def test_a_part_that_is_missing_is_named(first: Path) -> None:
    gone = parts(first)[1]
    gone.unlink()
    with pytest.raises(ModelFileError, match=f"{gone.name}: there is no such file"):
        GgufFile.open(first)


def test_parts_that_are_called_otherwise_are_not_guessed(first: Path) -> None:
    other = first.rename(first.with_name("other.gguf"))
    with pytest.raises(ModelFileError, match=r"not called NAME-00001-of-0000\d.gguf"):
        GgufFile.open(other)


def test_a_part_of_another_place_is_refused(first: Path) -> None:
    second, third = parts(first)[1:3]
    shutil.copy(third, second)
    with pytest.raises(ModelFileError, match=rf"{second.name}: is not part 2 of the \d of "):
        GgufFile.open(first)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"split.count": 100_000}, "split.count: is 100000, expected 0 to 256"),
        ({"split.count": 2}, "split.no: the key is missing"),
        ({"split.count": 2, "split.no": 0}, "part-00002-of-00002.gguf: there is no such file"),
    ],
)
def test_a_claim_of_parts_is_not_believed(tmp_path: Path, metadata: dict[str, int], said: str) -> None:
    path = write_model(tmp_path / "part-00001-of-00002.gguf", layers=1, metadata=metadata)
    with pytest.raises(ModelFileError, match=said):
        GgufFile.open(path)


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    for number in (0, 1):
        path = tmp_path / f"m-0000{number + 1}-of-00002.gguf"
        write_model(path, layers=1, metadata={"split.count": 2, "split.no": number})
    with pytest.raises(ModelFileError, match=r"00002-of-00002.gguf: tensor .*: is in another part, too"):
        GgufFile.open(tmp_path / "m-00001-of-00002.gguf")


def test_a_part_without_some_of_its_tensors_is_noticed(first: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "less.gguf", layers=1, split=5, tensors={"blk.0.ffn_down.weight": None})
    shutil.copy(max(tmp_path.glob("less-*.gguf")), parts(first)[-1])
    with pytest.raises(ModelFileError, match=r"split.tensors.count: is 14, but the parts have 13 tensors"):
        GgufFile.open(first)


def test_jobs_call_a_split_model_as_a_whole() -> None:
    assert name_of(Path("big-Q8_0-00001-of-00003.gguf")) == "big-Q8_0"
    assert name_of(Path("big-1-of-3.gguf")) == "big-1-of-3"
