"""Kernels that write and read an FP8 cache, compiled for the host."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.worker.runners.gpu.attention.choice import decode_attention
from nightmill.worker.runners.gpu.attention.pieces import NO_PIECES, whole_pieces
from nightmill.worker.runners.gpu.attention.prefill import HopperPrefill, PortablePrefill
from nightmill.worker.runners.kv_format import KvFormat
from tests.gpu.attending import decode_oracle, prefill_oracle, run_decode, run_prefill
from tests.gpu.oracles import ATTENTION, assert_close, attention_of, make_paged, make_queries, poison_before
from tests.gpu.test_kv_fp8 import check_written
from tests.unit.runners.host_kernels import HostDevice
from tests.unit.runners.host_launchers import run_on_host, run_rows_on_host

pytestmark = pytest.mark.heavy

FP8 = KvFormat.FP8
TILE = 64  # keys


@pytest.mark.parametrize("shape", [(3, 1, 64), (2, 1, 40)], ids=str)
def test_decode_sees_what_the_pages_stand_for(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever lies in them before the window and behind the context."""
    launched = run_on_host(monkeypatch, tmp_path)
    device: Any = HostDevice(kv=FP8)
    attention = attention_of(shape, window=100)
    rng = np.random.default_rng(1)
    lengths = [1, 17, 300, 600]
    paged = make_paged(rng, lengths, attention.kv_heads, attention.head_dim, stride=64, kv=FP8)
    for sequence, length in enumerate(lengths):
        poison_before(paged, sequence, length - 100)
    case = attention, make_queries(rng, len(lengths), attention), paged, lengths
    decode = decode_attention(device, attention, max_context=1024)
    whole = whole_pieces(np.array(lengths), np.arange(len(lengths)), segment=256)
    for pieces in (NO_PIECES, whole) if shape[2] == 64 else (NO_PIECES,):
        assert_close(run_decode(device, decode, *case, pieces=pieces), decode_oracle(*case), ATTENTION)
    assert len(launched) == (2 if shape[2] == 64 else 1)


@pytest.mark.parametrize("launcher", [PortablePrefill, HopperPrefill])
def test_prefill_sees_what_the_pages_stand_for(
    launcher: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_on_host(monkeypatch, tmp_path)
    device: Any = HostDevice(kv=FP8)
    attention = attention_of((2, 1, 80))
    rng = np.random.default_rng(2)
    lengths, chunks = [140, 201, 134], [140, 1, 70]
    paged = make_paged(rng, lengths, attention.kv_heads, attention.head_dim, kv=FP8)
    qkv = make_queries(rng, sum(chunks), attention)
    case = attention, qkv, paged, lengths, chunks
    actual = run_prefill(device, launcher(device, attention), *case)
    assert_close(actual, prefill_oracle(*case), ATTENTION)


def test_pages_keep_what_is_left_of_elements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_rows_on_host(monkeypatch, tmp_path)
    device: Any = HostDevice(kv=FP8)
    check_written(device, 64)
