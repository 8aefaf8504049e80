"""docs/models.md names the families and the types of tensors that are supported."""

import re
from pathlib import Path

from nightmill.worker.model.families import FAMILIES
from nightmill.worker.runners.gpu.weights.dequantizer import SUPPORTED

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")


ON_A_GPU = dict(re.findall(r"^\| `([\w-]+)` \|.*\| (yes|no|those)[^|]* \|$", PAGE, re.MULTILINE))


def test_every_family_is_named() -> None:
    assert ON_A_GPU.keys() == FAMILIES.keys()


def test_every_type_of_tensor_that_the_gpu_takes_is_named() -> None:
    (types,) = re.findall(r"Its tensors may be ([^;]*);", PAGE)
    assert re.split(r",\s+|\s+or\s+", types) == [kind.name for kind in SUPPORTED]
