"""docs/models.md names the families and the types of tensors that are supported."""

import re
from pathlib import Path

import pytest

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.families import FAMILIES
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.catalogue import check_spec
from nightmill.worker.runners.gpu.weights.dequantizer import SUPPORTED
from tests.support.expert_cases import GPU_EXPERT_FILES
from tests.support.family_cases import FILES
from tests.support.hybrid_cases import GPU_HYBRID_FILES

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")


ON_A_GPU = dict(re.findall(r"^\| `([\w-]+)` \|.*\| (yes|no|those)[^|]* \|$", PAGE, re.MULTILINE))


def test_every_family_is_named() -> None:
    assert ON_A_GPU.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", sorted({spec.family for _, spec in FILES.values()}))
def test_the_page_says_which_families_the_gpu_takes(family: str) -> None:
    files = FILES | GPU_HYBRID_FILES | GPU_EXPERT_FILES
    taken = {gpu_takes(spec) for _, spec in files.values() if spec.family == family}
    assert taken == {"yes": {True}, "no": {False}, "those": {True, False}}[ON_A_GPU[family]]


def gpu_takes(spec: ModelSpec) -> bool:
    try:
        check_spec(spec)
    except RunnerError:
        return False
    return True


def test_the_page_names_the_families_that_overflow_half() -> None:
    (row,) = re.findall(r"^\| (.*) \| BF16 \| trained in BF16", PAGE, re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", row)) == {s.family for _, s in FILES.values() if s.overflows_half}


def test_every_type_of_tensor_that_the_gpu_takes_is_named() -> None:
    (types,) = re.findall(r"Its tensors may be ([^;]*);", PAGE)
    assert re.split(r",\s+|\s+or\s+", types) == [kind.name for kind in SUPPORTED]
