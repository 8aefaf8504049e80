"""Device memory of mixtures of experts, which one layer after the other uses.

Tokens go through experts in slices: so what their copies take is bounded, whatever a step has. A token's
result hangs on that token alone, and so not on slices.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nightmill.worker.model.spec import Experts, ModelSpec
from nightmill.worker.runners.gpu.device.arena import aligned
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, FP8, INT, Buffer
from nightmill.worker.runners.gpu.shapes import padded_rows
from nightmill.worker.runners.gpu.weights.router import router_rows

__all__ = ["SLICE", "ExpertRoom", "most_tiles"]

SLICE = 8192
"""Tokens that go through experts at once."""
_LEAST_TILE = 8  # rows of a tile of the products
_TILE = np.dtype("V16")


@dataclass(frozen=True, slots=True)
class ExpertRoom:
    """The buffers of a layer's experts, for a slice of T tokens, and their N = T `used` choices."""

    logits: Buffer  # of the router, its parts and the shared expert's gate, float (T, router_rows)
    chosen: Buffer  # int (T, used)
    shares: Buffer  # what their outputs count, float (T, used)
    places: Buffer  # their positions, int (T, used)
    sources: Buffer  # the token of each position, int (N,)
    tiles: Buffer  # of positions, as route.cu says
    total: Buffer  # of tiles that there are, int (1,)
    activated: Buffer  # elements (N, F)
    ups: Buffer  # of matrices in two formats, the product of the second, float (N, F); then outputs
    outputs: Buffer  # float (N, R)
    # No rows where the model needs none:
    latent: Buffer  # what experts read, if that is not the layer's input, elements (T, R)
    mixed: Buffer  # the sum of their outputs then, elements (T, R)
    raised: Buffer  # and its product, float (T, width)
    shared: Buffer  # of the shared expert, float (T, width)
    routing: Buffer  # what the router reads, if that is not the layer's input, elements (T, width)
    read: Buffer  # what experts read then, elements (T, width)
    read_fp8: Buffer  # what experts read in FP8 (T, R), with scales
    activated_fp8: Buffer  # (N, F), with scales

    @classmethod
    def at(cls, address: int, experts: Experts, width: int, tokens: int, *, fp8: bool) -> "ExpertRoom":
        """Lay it out from an address on, with room for steps of so many tokens."""
        buffers = {}
        for name, shape, dtype, place, size in _laid_out(experts, width, tokens, fp8=fp8):
            start = address + place
            scales = start + size - shape[0] * FLOAT.itemsize if dtype == FP8 else 0
            buffers[name] = Buffer(start, shape, dtype, scales)
        return cls(**buffers)

    @staticmethod
    def workspace(spec: ModelSpec, tokens: int, *, fp8: bool) -> int:
        """Bytes that it takes for the layer of a model that needs most, for steps of so many tokens."""
        return max(
            (
                aligned(place + size)
                for experts in spec.experts
                for *_, place, size in _laid_out(experts, spec.width, tokens, fp8=fp8)
            ),
            default=0,
        )


def most_tiles(experts: Experts, tokens: int, rows: int) -> int:
    """Tiles of so many rows that there may be at most for so many tokens."""
    choices = tokens * experts.used
    return min(experts.count, choices) + choices // rows


def _laid_out(
    experts: Experts, width: int, tokens: int, *, fp8: bool
) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any], int, int]]:
    """Names, shapes and types of the buffers for steps of so many tokens; where they begin, and bytes."""
    place, ups = 0, (0, 0)
    for name, shape, dtype in _arrays(experts, width, min(padded_rows(tokens), SLICE), fp8=fp8):
        size = _bytes(name, shape, dtype)
        if name == "ups":
            ups = place, place + size
        if name == "outputs":  # when these are written, activations are made of ups
            place = ups[0]
        yield name, shape, dtype, place, size
        place = aligned(place + size if name != "outputs" else max(place + size, ups[1]))


def _arrays(
    experts: Experts, width: int, tokens: int, *, fp8: bool
) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    """Names, shapes and types of the buffers."""
    read, used = experts.latent or width, experts.used
    positions, of_latent = tokens * used, tokens * (experts.latent is not None)
    yield "logits", (tokens, router_rows(experts.count + experts.shared_gated)), FLOAT
    yield "chosen", (tokens, used), INT
    yield "shares", (tokens, used), FLOAT
    yield "places", (tokens, used), INT
    yield "sources", (positions,), INT
    yield "tiles", (most_tiles(experts, tokens, _LEAST_TILE),), _TILE
    yield "total", (1,), INT
    yield "activated", (positions, experts.width), ELEMENT
    yield "ups", (positions * experts.gated, experts.width), FLOAT
    yield "outputs", (positions, read), FLOAT
    yield "latent", (of_latent, read), ELEMENT
    yield "mixed", (of_latent, read), ELEMENT
    yield "raised", (of_latent, width), FLOAT
    yield "shared", (tokens * (experts.shared is not None), width), FLOAT
    yield "routing", (tokens * (experts.beside is not None), width), ELEMENT
    yield "read", (tokens * (experts.beside is not None), width), ELEMENT
    yield "read_fp8", (tokens * fp8, read), FP8
    yield "activated_fp8", (positions * fp8, experts.width), FP8


def _bytes(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Bytes of a buffer, with a scale for each row behind numbers of FP8."""
    numbers = int(np.prod(shape)) * dtype.itemsize
    return -(-numbers // 16) * 16 + shape[0] * FLOAT.itemsize if dtype == FP8 else numbers
