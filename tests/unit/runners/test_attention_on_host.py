"""The kernels of attention, compiled for the host, by their launchers against the reference in float64.

So what they compute is known without a GPU, but for timing; `tests/gpu` holds what nvcc makes of them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.worker.runners.gpu.attention.decode import DecodeAttention
from nightmill.worker.runners.gpu.attention.general import GeneralDecode
from nightmill.worker.runners.gpu.attention.pieces import decode_pieces
from nightmill.worker.runners.gpu.attention.prefill import HopperPrefill, PortablePrefill
from nightmill.worker.runners.gpu.device.element import Element
from tests.gpu.attending import decode_oracle, make_sinks, prefill_oracle, run_decode, run_prefill, run_split
from tests.gpu.oracles import (
    ATTENTION,
    Paged,
    assert_close,
    attention_of,
    make_paged,
    make_queries,
    poison_before,
)
from tests.unit.runners.host_kernels import HostDevice
from tests.unit.runners.host_launchers import run_on_host

pytestmark = pytest.mark.heavy

Shape = tuple[int, int, int]
TILE = 64  # keys, whose tiles count from a sequence's first
BF16_ERROR = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    return run_on_host(monkeypatch, folder)


def only(paged: Paged, sequence: int) -> Paged:
    """One of the sequences, in the same cache."""
    return replace(paged, tables=paged.tables[sequence : sequence + 1])


@pytest.mark.parametrize(
    ("shape", "scores", "kernels"),
    [
        ((3, 1, 64), {}, ["decode_attention_8_4", "split_attention_8"]),
        pytest.param(
            (3, 1, 64),
            {"window": 17, "softcap": 3.0},
            ["decode_attention_8_4", "split_attention_8"],
            marks=pytest.mark.slow,
        ),
        ((9, 1, 64), {"window": 300}, ["decode_attention_16_4", "split_attention_16"]),
        pytest.param(
            (10, 1, 80),
            {"window": 300},
            ["decode_attention_16_2", "split_attention_16"],
            marks=pytest.mark.slow,
        ),
        pytest.param((2, 1, 160), {}, ["decode_attention_8_1"], marks=pytest.mark.slow),
        ((10, 1, 256), {"window": 300}, ["decode_attention_8_1"]),
        ((2, 1, 256), {"hopper": True}, ["decode_attention_8_1", "decode_attention_8_3"]),
        ((2, 1, 40), {"window": 300, "softcap": 3.0, "sinks": True}, ["decode_attention_any"]),
        ((8, 1, 64), {"window": 128, "sinks": True}, ["decode_attention_8_4", "split_attention_8"]),
    ],
    ids=str,
)
def test_decode_in_pieces_and_split_gives_the_same_bits(
    launched: set[str], monkeypatch: pytest.MonkeyPatch, shape: Shape, scores: dict[str, Any],
    kernels: list[str],
) -> None:  # fmt: skip
    hopper = scores.get("hopper", False)
    monkeypatch.setattr(HostDevice, "hopper", hopper)
    monkeypatch.setattr(HostDevice, "multiprocessors", 5 if hopper else 40)
    device: Any = HostDevice()
    attention = attention_of(shape, **{name: value for name, value in scores.items() if name != "hopper"})
    rng = np.random.default_rng(1)
    lengths = [1, 17, 300, 1100]
    paged = make_paged(rng, lengths, attention.kv_heads, attention.head_dim, stride=72)
    for sequence, length in enumerate(lengths):
        poison_before(paged, sequence, length - (attention.window or 2000))
    qkv = make_queries(rng, len(lengths), attention)
    paged.sinks = make_sinks(rng, attention) if attention.sinks else None
    case = attention, qkv, paged, lengths
    if not DecodeAttention.suits(attention):
        results = [run_decode(device, GeneralDecode(device, attention), *case)]
    else:
        decode = DecodeAttention(device, attention, max_context=2048)
        contexts, everyone = np.array(lengths, dtype=np.int32), np.arange(len(lengths), dtype=np.int32)
        cuts = [decode_pieces(contexts, everyone, segment=256, at_once=n, most_cut=1000) for n in (1, 20)]
        assert len({len(pieces) for pieces in cuts}) == 2
        by_sections = [[3, 4 << 16, 1, 1100], [3, 4 | 5 << 16, 1, 1100]]
        cuts.append(np.concatenate([cuts[0][cuts[0][:, 0] < 3], by_sections]))
        results = [run_decode(device, decode, *case, pieces=pieces) for pieces in cuts]
        if attention.head_dim <= 128:
            results.append(run_split(device, decode, *case))
    assert_close(results[0], decode_oracle(*case), ATTENTION)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    assert launched == set(kernels)


@pytest.mark.parametrize(
    ("launcher", "shape", "scores"),
    [
        (PortablePrefill, (3, 1, 64), {"window": 70, "softcap": 3.0}),
        (PortablePrefill, (2, 1, 80), {}),
        (PortablePrefill, (2, 1, 256), {"window": 70, "sinks": True}),
        (HopperPrefill, (3, 1, 64), {"window": 70, "softcap": 3.0, "sinks": True}),
        (HopperPrefill, (4, 2, 128), {"window": 17}),
        (HopperPrefill, (2, 1, 192), {}),
        (HopperPrefill, (2, 1, 256), {"window": 70}),
    ],
    ids=str,
)
def test_prefill_in_chunks_gives_the_bits_of_the_whole(
    launched: set[str], launcher: Any, shape: Shape, scores: dict[str, Any]
) -> None:
    device: Any = HostDevice()
    attention = attention_of(shape, **scores)
    rng = np.random.default_rng(2)
    chunks, before = [140, 1, 70], [0, 200, 64]
    lengths = [chunk + earlier for chunk, earlier in zip(chunks, before, strict=True)]
    paged = make_paged(rng, lengths, attention.kv_heads, attention.head_dim)
    for sequence, earlier in enumerate(before):
        poison_before(paged, sequence, (earlier + 1 - (attention.window or 1000)) // TILE * TILE)
    qkv = make_queries(rng, sum(chunks), attention)
    paged.sinks = make_sinks(rng, attention) if attention.sinks else None
    prefill = launcher(device, attention)
    whole = run_prefill(device, prefill, attention, qkv, paged, lengths, chunks)
    assert_close(whole, prefill_oracle(attention, qkv, paged, lengths, chunks), ATTENTION)
    first = 0
    for chunk in (30, 2, 108):
        part = slice(first, first + chunk)
        first += chunk
        piece = run_prefill(device, prefill, attention, qkv[part], paged, [first], [chunk])
        np.testing.assert_array_equal(piece, whole[part])
    assert launched == {"hopper_attention" if launcher is HopperPrefill else "prefill_attention"}


@pytest.mark.parametrize(
    ("shape", "scores"),
    [
        ((4, 4, 64), {}),
        ((3, 1, 64), {"window": 90}),
        ((2, 2, 32), {}),
        ((2, 1, 40), {"window": 21, "sinks": True}),
    ],
    ids=str,
)
def test_tokens_of_an_encoder_see_those_behind_them(
    launched: set[str], shape: Shape, scores: dict[str, Any]
) -> None:
    """Whole texts, with NaN behind the end of each in its last page."""
    device: Any = HostDevice()
    attention = attention_of(shape, causal=False, **scores)
    rng = np.random.default_rng(4)
    texts = [200, 1, 64, 65]
    paged = make_paged(rng, texts, attention.kv_heads, attention.head_dim)
    qkv = make_queries(rng, sum(texts), attention)
    paged.sinks = make_sinks(rng, attention) if attention.sinks else None
    assert not HopperPrefill.suits(attention, hopper=True)
    prefill: Any = PortablePrefill(device, attention)
    whole = run_prefill(device, prefill, attention, qkv, paged, texts, texts)
    assert_close(whole, prefill_oracle(attention, qkv, paged, texts, texts), ATTENTION)
    alone = run_prefill(device, prefill, attention, qkv[201:265], only(paged, 2), [64], [64])
    np.testing.assert_array_equal(alone, whole[201:265])
    assert launched == {"prefill_attention" if shape[2] in (32, 64) else "prefill_attention_any"}


def test_attention_in_bfloat16(launched: set[str]) -> None:
    device: Any = HostDevice(Element.BF16)
    attention = attention_of((2, 1, 64))
    rng = np.random.default_rng(3)
    paged = make_paged(rng, [70], 1, 64, element=Element.BF16)
    qkv = make_queries(rng, 70, attention, Element.BF16)
    case = attention, qkv, paged, [70]
    actual = run_prefill(device, HopperPrefill(device, attention), *case, [70])
    assert_close(actual, prefill_oracle(*case, [70]), BF16_ERROR)
    decode = DecodeAttention(device, attention, max_context=1024)
    last = attention, qkv[-1:], paged, [70]
    assert_close(run_split(device, decode, *last), decode_oracle(*last), BF16_ERROR)
