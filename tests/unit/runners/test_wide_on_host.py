"""The kernels of latent attention and of heads of 512, on the host, by the tests that hold them on a GPU.

In small: so what they compute is known without a GPU; `tests/gpu` holds what nvcc makes of them.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.runners.gpu.attention.pieces import whole_pieces
from nightmill.worker.runners.gpu.attention.wide import WideDecode, wide_pieces
from nightmill.worker.runners.gpu.device.element import Element
from tests.gpu import test_kernels_attention as on_gpu_too
from tests.gpu import test_kernels_latent as on_gpu
from tests.gpu import test_kernels_prefill as on_gpu_as_well
from tests.gpu.attending import decode_oracle, run_decode
from tests.gpu.oracles import ATTENTION, assert_close, attention_of, make_paged, make_queries
from tests.unit.runners.host_kernels import HostDevice
from tests.unit.runners.host_launchers import run_on_host


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    return run_on_host(monkeypatch, folder)


@pytest.mark.heavy
@pytest.mark.parametrize(("heads", "hopper"), [(20, True), (33, False)])
def test_decode_cut_anyhow_gives_the_same_bits(
    launched: set[str], monkeypatch: pytest.MonkeyPatch, heads: int, hopper: bool
) -> None:
    monkeypatch.setattr(HostDevice, "compute_capability", (9, 0) if hopper else (8, 6))
    device: Any = HostDevice()
    on_gpu.decode_cut_anyhow(device, heads, [1, 33, 600], max_context=1024)
    assert launched == {"wide_decode_3" if hopper else "wide_decode_1", "wide_merge"}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("capability", "kernel"),
    [((9, 0), "hopper_wide"), ((10, 0), "wide_prefill_64"), ((8, 6), "wide_prefill_32")],
)
def test_prefill_in_chunks_gives_the_bits_of_the_whole(
    launched: set[str], monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kernel: str
) -> None:
    monkeypatch.setattr(HostDevice, "compute_capability", capability)
    monkeypatch.setattr(HostDevice, "hopper", capability == (9, 0))
    device: Any = HostDevice(Element.BF16 if capability == (10, 0) else Element.F16)
    on_gpu.prefill_in_chunks(device, 20, [40, 1, 7], [0, 70, 64], [30, 2, 8])
    assert launched == {kernel}


@pytest.mark.slow  # takes its turn: one commit of four
@pytest.mark.heavy
def test_heads_of_512(launched: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostDevice, "compute_capability", (9, 0))
    device: Any = HostDevice()
    on_gpu_too.wide_contexts_cut_anyhow(device, (9, 1, 512), [1, 33, 600], 1024)
    for hopper in (False, True):
        monkeypatch.setattr(HostDevice, "hopper", hopper)
        on_gpu_as_well.wide_prompts_in_chunks(device, (4, 2, 512), [40, 1, 7], [40, 71, 71])
    assert launched == {"wide_decode_2", "wide_merge", "wide_prefill_64", "hopper_wide"}


@pytest.mark.heavy
def test_heads_of_512_with_room_for_one_tile(launched: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn tokens have the bits that two stages give."""
    device: Any = HostDevice()
    attention, lengths = attention_of((9, 1, 512)), [1, 33, 300]
    rng = np.random.default_rng(3)
    paged = make_paged(rng, lengths, 1, 512)
    case = attention, make_queries(rng, 3, attention), paged, lengths
    found = []
    for capability in ((9, 0), (8, 6)):
        monkeypatch.setattr(HostDevice, "compute_capability", capability)
        decode = WideDecode(device, attention, max_context=512)
        contexts, everyone = np.array(lengths, dtype=np.int32), np.arange(3, dtype=np.int32)
        pieces = wide_pieces(contexts, everyone, segment=decode.segment, at_once=20, most_cut=100)
        assert len(pieces) > len(lengths)
        found.append(run_decode(device, decode, *case, pieces=pieces))
    np.testing.assert_array_equal(*found)
    assert_close(found[0], decode_oracle(*case), ATTENTION)
    on_gpu_as_well.wide_prompts_in_chunks(device, (4, 2, 512), [40, 1, 7], [40, 71, 71])
    assert launched == {"wide_decode_2", "wide_decode_1", "wide_merge", "wide_prefill_32"}


@pytest.mark.slow  # takes its turn: one commit of four
@pytest.mark.heavy
def test_general_kernels_rows_and_products_of_heads(launched: set[str]) -> None:
    device: Any = HostDevice()
    on_gpu.test_the_general_kernels_compute_latents(device, 4, 40, 8)
    on_gpu.rows_are_kept(device, RopeStyle.PAIRS, 7)
    on_gpu.rows_are_kept(device, RopeStyle.HALVES, 7)
    for turned in (False, True):
        on_gpu.products_of_heads(device, 136, 72, turned=turned, rows=(1, 9, 260))
    on_gpu.products_of_heads(device, 20, 40, turned=False, rows=(1, 9))
    assert launched >= {
        "latent_keep", "latent_product_turned_8", "latent_product_64", "latent_product_turned_128",
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_pieces_are_all_segments_of_all_contexts_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, at_once = int(rng.integers(1, 60)), int(rng.integers(1, 140))
    lengths = (rng.integers(0, 40, count) ** int(rng.integers(1, 4))).astype(np.int32)
    sequences = rng.permutation(count).astype(np.int32)
    most = int(rng.integers(0, 300))
    pieces = wide_pieces(lengths, sequences, segment=256, at_once=at_once, most_cut=most)
    assert count <= len(pieces) <= count + 2 * at_once
    places: list[int] = []
    for sequence, length in zip(sequences, lengths, strict=True):
        own = pieces[pieces[:, 0] == sequence]
        if not length:
            assert not len(own)
            continue
        assert (own[:, 3] == length).all()
        held = [n for _, ends, _, _ in own for n in range(ends & 0xFFFF, ends >> 16)]
        assert sorted(held) == list(range(-(-length // 256)))
        assert len(set(own[:, 2])) == 1
        assert (own[0, 2] < 0) == (len(own) == 1)
        if len(own) > 1:
            places += range(own[0, 2], own[0, 2] + len(held))
    assert len(set(places)) == len(places)
    assert max(places, default=-1) < most
    if len(pieces) == count:
        order = np.argsort(-lengths, kind="stable")
        whole = whole_pieces(lengths[order], sequences[order], segment=256)
        np.testing.assert_array_equal(pieces, whole)
