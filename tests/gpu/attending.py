"""Drives the launchers of attention over paged caches, and says what they should give."""

from dataclasses import replace

import numpy as np

from nightmill.worker.model.spec import Attention
from nightmill.worker.runners.gpu.attention.pieces import NO_PIECES
from nightmill.worker.runners.gpu.attention.plans import Decode, Prefill
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, ELEMENT, Buffer
from nightmill.worker.runners.gpu.shapes import padded_rows
from tests.gpu.oracles import Paged, attention_oracle
from tests.support.operands import buffer, cache_of, elements, fetched, inputs_of, poisoned, shape_of


def run_decode(
    device: Device, decode: Decode, attention: Attention, qkv: np.ndarray, paged: Paged, lengths: list[int],
    pieces: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """pieces: in place of those that the launcher chooses; a padding piece is added."""
    contexts, count = np.array(lengths, dtype=np.int32), len(lengths)
    if pieces is None:
        pieces = decode.pieces(contexts, np.arange(count, dtype=np.int32))
    if len(pieces):
        pieces = np.concatenate([pieces, [[-1] * 4]]).astype(np.int32)
    inputs = inputs_of(
        device, table_width=paged.tables.shape[1], page_tables=paged.tables, context_lengths=contexts,
        pieces=pieces,
    )  # fmt: skip
    out = poisoned(device, (count, attention.heads, attention.head_dim), ELEMENT)
    step = shape_of(tokens=count, drawn=count, pieces=len(pieces))
    cache, sinks = cache_of(device, paged.k_cache, paged.v_cache), sinks_on(device, paged)
    decode(elements(device, qkv), cache, inputs, step, out, sinks)
    return fetched(device, out)


def run_split(
    device: Device, decode: Decode, attention: Attention, qkv: np.ndarray, paged: Paged, lengths: list[int]
) -> np.ndarray:
    """By split attention: so few sequences at a time that they do not fill a chip."""
    parts = [slice(first, first + 3) for first in range(0, len(lengths), 3)]
    few = [replace(paged, keys=[], values=[], tables=paged.tables[part]) for part in parts]
    return np.concatenate(
        [
            run_decode(device, decode, attention, qkv[part], some, lengths[part], pieces=NO_PIECES)
            for part, some in zip(parts, few, strict=True)
        ]
    )


def decode_oracle(attention: Attention, qkv: np.ndarray, paged: Paged, lengths: list[int]) -> np.ndarray:
    return np.concatenate(
        [
            attention_oracle(attention, qkv[s : s + 1], k, v, np.array([length]), paged.sinks)
            for s, (k, v, length) in enumerate(zip(paged.keys, paged.values, lengths, strict=True))
        ]
    )


def run_prefill(
    device: Device, prefill: Prefill, attention: Attention, qkv: np.ndarray, paged: Paged, lengths: list[int],
    chunks: list[int], drawn: int = 0,
) -> np.ndarray:  # fmt: skip
    starts, contexts = np.cumsum([0, *chunks]).astype(np.int32), np.array(lengths, dtype=np.int32)
    # Pages that become elements do so in groups: there is room for those of the longest context alone.
    prefill.reserve(slots=len(lengths), max_context=max(lengths), max_tokens=1, depth=1)
    tiles, groups = prefill.stage(0, paged.tables, starts, contexts, drawn)
    tiles = np.concatenate([tiles, [[-1, 0]]]).astype(np.int32)  # a padding tile
    queries = np.zeros((padded_rows(len(qkv)), *qkv.shape[1:]), dtype=np.float32)
    queries[: len(qkv)] = qkv
    inputs = inputs_of(
        device, table_width=paged.tables.shape[1], page_tables=paged.tables, sequence_starts=starts,
        context_lengths=contexts, tiles=tiles,
    )  # fmt: skip
    out = poisoned(device, (starts[-1], attention.heads, attention.head_dim), ELEMENT)
    cache = cache_of(device, paged.k_cache, paged.v_cache)
    step = shape_of(tokens=len(qkv), tiles=len(tiles), groups=groups)
    prefill(elements(device, queries), cache, inputs, step, out, sinks_on(device, paged))
    return fetched(device, out)


def prefill_oracle(
    attention: Attention, qkv: np.ndarray, paged: Paged, lengths: list[int], chunks: list[int]
) -> np.ndarray:
    ends, results = np.cumsum(chunks), []
    for end, chunk, length, keys, values in zip(ends, chunks, lengths, paged.keys, paged.values, strict=True):
        visible = length - chunk + np.arange(chunk) + 1
        own = qkv[end - chunk : end]
        results.append(attention_oracle(attention, own, keys, values, visible, paged.sinks))
    return np.concatenate(results)


def sinks_on(device: Device, paged: Paged) -> Buffer:
    """Those of the layer, on the device."""
    return ABSENT if paged.sinks is None else buffer(device, paged.sinks)


def make_sinks(rng: np.random.Generator, attention: Attention) -> np.ndarray:
    """Scores of which some are far above all others, some far below, and most among them."""
    sinks = rng.standard_normal(attention.heads).astype(np.float32) * 3
    sinks[:: max(attention.heads // 2, 2)] = 12.0
    sinks[-1] = -300.0
    return sinks
