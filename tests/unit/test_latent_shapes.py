"""A random model with latent attention is read as what it was written for."""

from pathlib import Path

import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu.catalogue import check_spec
from tests.support.latent_shapes import LatentShape
from tests.support.quantised_models import write


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K_M"])
def test_a_small_one_is_read_and_taken(name: str, tmp_path: Path) -> None:
    shape = LatentShape(layers=2, vocab=512, width=256, ffn=512, query_latent=256, context=128)
    path = write(tmp_path / "m.gguf", shape, name, pool_bytes=1 << 19)  # type: ignore[arg-type]
    with GgufFile.open(path) as file:
        spec = read_spec(file)
    assert spec.layers == shape.file()[2].layers
    check_spec(spec)
