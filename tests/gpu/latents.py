"""Drives the launchers of latent attention, and says what they should give."""

from dataclasses import dataclass, replace

import numpy as np

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import LatentAttention
from nightmill.worker.runners.gpu.attention.latent import as_attention
from nightmill.worker.runners.gpu.attention.latent_rows import HeadProducts, LatentRoom, LatentRows
from nightmill.worker.runners.gpu.attention.plans import Decode, Prefill
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, ELEMENT, Buffer
from nightmill.worker.runners.gpu.kv_cache import PAGE, LayerCache
from nightmill.worker.runners.gpu.shapes import padded_rows
from nightmill.worker.runners.gpu.step_inputs import NO_INPUTS
from nightmill.worker.runners.gpu.weights.layout import NO_MATRIX, HeadMatrices, LatentWeights
from nightmill.worker.runners.reference import ops
from tests.gpu.oracles import Paged, attention_oracle, make_paged
from tests.support.elements import rounded
from tests.support.operands import buffer, elements, fetched, inputs_of, poisoned, shape_of

Array = np.ndarray
NO_HEADS = HeadMatrices(0, 0, 0, 0)


def make_latents(
    rng: np.random.Generator, device: Device, attention: LatentAttention, lengths: list[int], stride: int = 0
) -> Paged:
    """Paged keys, of which the values are a part; whatever is no sequence's is NaN."""
    paged = make_paged(rng, lengths, 1, attention.kept, stride=stride, element=device.element)
    return replace(paged, values=paged.keys, v_cache=paged.k_cache)


def make_absorbed(rng: np.random.Generator, device: Device, attention: LatentAttention, tokens: int) -> Array:
    """Queries (T, H, D)."""
    return rounded(rng.standard_normal((tokens, attention.heads, attention.kept)), device.element)


def run_latent_decode(
    device: Device, decode: Decode, attention: LatentAttention, queries: Array, paged: Paged,
    lengths: list[int], pieces: Array | None = None,
) -> Array:  # fmt: skip
    """pieces: in place of those that the launcher chooses; a padding piece is added if some are cut."""
    contexts, count = np.array(lengths, dtype=np.int32), len(lengths)
    if pieces is None:
        pieces = decode.pieces(contexts, np.arange(count, dtype=np.int32))
    if len(pieces) > count:
        pieces = np.concatenate([pieces, [[-1] * 4]]).astype(np.int32)
    inputs = inputs_of(
        device, table_width=paged.tables.shape[1], page_tables=paged.tables, context_lengths=contexts,
        pieces=pieces,
    )  # fmt: skip
    out = poisoned(device, (count, attention.heads, attention.latent), ELEMENT)
    step = shape_of(tokens=count, drawn=count, pieces=len(pieces))
    decode(elements(device, queries), cache_on(device, paged), inputs, step, out)
    return fetched(device, out)


def run_latent_prefill(
    device: Device, prefill: Prefill, attention: LatentAttention, queries: Array, paged: Paged,
    lengths: list[int], chunks: list[int],
) -> Array:  # fmt: skip
    starts, contexts = np.cumsum([0, *chunks]).astype(np.int32), np.array(lengths, dtype=np.int32)
    tiles, groups = prefill.stage(0, paged.tables, starts, contexts, 0)
    tiles = np.concatenate([tiles, [[-1, 0]]]).astype(np.int32)  # a padding tile
    inputs = inputs_of(
        device, table_width=paged.tables.shape[1], page_tables=paged.tables, sequence_starts=starts,
        context_lengths=contexts, tiles=tiles,
    )  # fmt: skip
    out = poisoned(device, (starts[-1], attention.heads, attention.latent), ELEMENT)
    step = shape_of(tokens=len(queries), tiles=len(tiles), groups=groups)
    padded = np.zeros((padded_rows(len(queries)), *queries.shape[1:]), dtype=np.float32)
    padded[: len(queries)] = queries
    prefill(elements(device, padded), cache_on(device, paged), inputs, step, out)
    return fetched(device, out)


def cache_on(device: Device, paged: Paged) -> LayerCache:
    both = elements(device, paged.k_cache)
    return LayerCache(both, both)


def latent_oracle(
    attention: LatentAttention, queries: Array, paged: Paged, lengths: list[int], chunks: list[int]
) -> Array:
    """In float64; the last tokens of each context."""
    first, results = 0, []
    for keys, length, chunk in zip(paged.keys, lengths, chunks, strict=True):
        visible = length - chunk + np.arange(chunk) + 1
        own = queries[first : first + chunk]
        mixed = attention_oracle(as_attention(attention), own, keys, keys, visible)
        results.append(mixed[:, :, : attention.latent])
        first += chunk
    return np.concatenate(results)


@dataclass
class Rows:
    """Rows of latent attention before it, on the device, and in float64 as they are to become."""

    room: LatentRoom
    cache: LayerCache
    kept: Array  # (T, latent + rotated)
    down: Array  # (T, query latent)
    turned: Array  # (T, H, rotated)


def run_rows(device: Device, attention: LatentAttention, tokens: int, context: int) -> Rows:
    """Keep and turn random rows; every fifth token has no row of the pages."""
    rng = np.random.default_rng(attention.heads)
    latent, heads = attention.latent, attention.heads
    query_latent = attention.query_latent or 0

    def numbers(width: int) -> Array:
        scale = np.exp(rng.standard_normal((tokens, 1)))
        return rounded(rng.standard_normal((tokens, width)) * scale, device.element)

    kept, down, queries = numbers(attention.kept), numbers(query_latent), numbers(heads * attention.head_dim)
    norms = [1 + 0.1 * rng.standard_normal(width).astype(np.float32) for width in (latent, query_latent)]
    positions = rng.integers(0, context, tokens, dtype=np.int32)
    rows = np.where(np.arange(tokens) % 5 == 4, -1, rng.permutation(tokens)).astype(np.int32)
    pages = poisoned(device, (-(-tokens // PAGE), 1, PAGE * attention.kept), ELEMENT)
    room = LatentRoom(
        queries=elements(device, queries),
        kept=elements(device, kept),
        down=elements(device, down) if query_latent else ABSENT,
        absorbed=poisoned(device, (tokens, heads * attention.kept), ELEMENT),
        mixed=ABSENT,
    )
    weights = LatentWeights(
        NO_MATRIX,
        buffer(device, norms[1]),
        NO_MATRIX,
        NO_MATRIX,
        buffer(device, norms[0]),
        NO_HEADS,
        NO_HEADS,
    )
    inputs = replace(NO_INPUTS, positions=device.upload(positions), cache_rows=device.upload(rows))
    launcher = LatentRows(device, attention, max_context=context)
    launcher.keep(room, weights, inputs, LayerCache(pages, pages), tokens)
    keys = rng.standard_normal((heads, latent, attention.key_dim)) / np.sqrt(attention.key_dim)
    matrices = HeadMatrices(
        elements(device, keys).address, latent * attention.key_dim, latent, attention.key_dim
    )
    products = HeadProducts(device, heads, launcher)
    products.of_queries(room.queries, matrices, room.absorbed, inputs, tokens)
    rope = attention.rope
    angles = ops.rope_table(positions, rope.frequencies(), rope.magnitude, np.float64)
    neighbours = rope.style is RopeStyle.PAIRS

    def turn(part: Array) -> Array:
        turned: Array = ops.rope(part.astype(np.float64), *angles, interleaved=neighbours)
        return turned

    exact = ops.rms_norm(kept[:, :latent].astype(np.float64), norms[0], attention.norm.eps)
    exact = np.concatenate([exact, turn(kept[:, None, latent:])[:, 0]], axis=1)
    held = np.full((pages.shape[0] * PAGE, attention.kept), np.nan)
    held[rows[rows >= 0]] = exact[rows >= 0]
    return Rows(
        room,
        LayerCache(pages, pages),
        held,
        ops.rms_norm(down.astype(np.float64), norms[1], attention.norm.eps),
        turn(queries.reshape(tokens, heads, -1)[:, :, attention.key_dim :]),
    )


def run_heads(device: Device, x: Array, weights: Array, *, turned: bool, pitch: int) -> Array:
    """Products of heads of x (T, H, n) with matrices (H, m, n); of `pitch` elements the rest stay free."""
    tokens, heads, inputs = x.shape
    outputs = weights.shape[1]
    held = weights.swapaxes(1, 2) if turned else weights
    matrices = HeadMatrices(
        elements(device, np.ascontiguousarray(held)).address, outputs * inputs, outputs, inputs, turned
    )
    wide = np.full((tokens, heads, inputs + 8), np.nan)
    wide[:, :, :inputs] = x
    y = poisoned(device, (tokens, heads * pitch), ELEMENT)
    given = elements(device, wide.reshape(tokens, -1))
    HeadProducts(device, heads)(given, matrices, y, tokens)
    return fetched(device, Buffer(y.address, (tokens, heads, pitch), ELEMENT))
