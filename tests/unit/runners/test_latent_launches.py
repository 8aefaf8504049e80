"""A random model with latent attention is read as what it was written for."""

from pathlib import Path

import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu.catalogue import check_spec
from tests.support.latent_shapes import LatentShape
from tests.support.quantised_models import write
from tests.unit.runners.recorded_cuda import RecordedDriver
from tests.unit.runners.recorded_steps import benchmarked


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K_M"])
def test_a_small_one_is_read_and_taken(name: str, tmp_path: Path) -> None:
    shape = LatentShape(layers=2, vocab=512, width=256, ffn=512, query_latent=256, context=128)
    path = write(tmp_path / "m.gguf", shape, name, pool_bytes=1 << 19)  # type: ignore[arg-type]
    with GgufFile.open(path) as file:
        spec = read_spec(file)
    assert spec.layers == shape.file()[2].layers
    check_spec(spec)


@pytest.mark.heavy
def test_benchmarks_count_latents(
    hopper: RecordedDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Nothing is computed, but all operations have a line, and attention reads one row a token."""
    shape = LatentShape(layers=2, vocab=512, width=256, ffn=512, query_latent=256, context=2048)
    path = str(write(tmp_path / "m.gguf", shape, "F16", pool_bytes=1 << 19))  # type: ignore[arg-type]
    steps, _ = benchmarked(path, tmp_path / "report.json", monkeypatch, capsys)
    for step, attention in (("decode 4", "decode_attention"), ("prefill", "prefill_attention")):
        found = steps[step]
        counted = {one for one, line in found.items() if line["bytes"]}
        assert {"kv_down", "q_down", "q_up", "keep", "products of heads", attention, "output"} <= counted
        assert counted >= {one for one in found if one not in ("step", "gather_tokens", "scale_logits")}
    rows, queries = 4 * 65 * 576 * 2, 4 * 20 * (576 + 512) * 2
    assert steps["decode 4"]["decode_attention"]["bytes"] == 2 * (rows + queries)
    assert {"wide_decode_3", "hopper_wide", "latent_keep", "latent_product_8"} <= hopper.launches.keys()
