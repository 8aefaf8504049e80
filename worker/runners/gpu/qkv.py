"""Queries, keys and values of a layer: one launch on Hopper, or a product and the kernel after it."""

from collections.abc import Callable, Sequence
from functools import partial

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device import Device
from nightmill.worker.runners.gpu.gemm import Gemm, Shortlist, nearest, nothing, padded_rows
from nightmill.worker.runners.gpu.hopper import HopperQkv, Kind, Tile, is_hopper
from nightmill.worker.runners.gpu.kernels import Kernels
from nightmill.worker.runners.gpu.steps import StepInputs
from nightmill.worker.runners.gpu.weights import LayerWeights

__all__ = ["Qkv"]


class Qkv:
    """Computes queries in place, keys and values into the pages; all ways give the same bits."""

    def __init__(
        self, device: Device, spec: ModelSpec, kernels: Kernels, gemm: Gemm, *, max_context: int
    ) -> None:
        self._device = device
        self._spec = spec
        self._kernels = kernels
        self._gemm = gemm
        self._outputs = spec.layers[0].attention.qkv
        self._fused = (
            HopperQkv(device, spec, kernels.rope_table, max_context)
            if is_hopper(device) and HopperQkv.suits(spec)
            else None
        )
        self._shortlist: Shortlist[Tile | None] = Shortlist()
        self._tuned: dict[int, Tile | None] = {}
        """By padded rows: the tile, or None for two launches."""

    def __call__(
        self, x: int, layer: LayerWeights, inputs: StepInputs, qkv: int, keys: int, values: int, tokens: int
    ) -> None:
        """Queue it for x (tokens, width) half, which has room for `padded_rows(tokens)`."""
        if tokens:
            self._run(
                self._choice(tokens), x, layer, inputs.positions, inputs.cache_rows, qkv, keys, values, tokens
            )

    def tune(
        self,
        x: int,
        layers: Sequence[LayerWeights],
        qkv: int,
        keys: int,
        values: int,
        numbers: int,
        rows: int,
        beside: Callable[[], None] = nothing,
    ) -> None:
        """Time the ways for so many rows and keep the fastest; waits for the device.

        numbers  room for an int32 a row
        beside   as for `Gemm.tune`

        What is at `qkv` and `numbers` is overwritten; the pages are not.
        """
        weights = [layer.qkv for layer in layers]
        self._gemm.tune(x, weights, qkv, (rows, self._outputs, self._spec.width, Kind.HALF), beside)
        if self._fused is None or padded_rows(rows) in self._tuned:
            return
        self._device.fill(numbers, 0xFF, 4 * rows)  # no row of the pages, and of positions the first

        def runs(tile: Tile | None) -> Callable[[int], None]:
            run = partial(self._run, tile, x)
            return lambda turn: run(layers[turn % len(layers)], numbers, numbers, qkv, keys, values, rows)

        few = self._shortlist.of(rows)
        ways = few or [None, *self._fused.tiles]
        ranked = self._gemm.ranked([runs(tile) for tile in ways], beside)
        if not few:
            self._shortlist.learn(rows, [ways[index] for index in ranked])
        self._tuned[padded_rows(rows)] = ways[ranked[0]]

    def _choice(self, tokens: int) -> Tile | None:
        """What was fastest for so many rows, or for the nearest number that was tried."""
        rows = padded_rows(tokens)
        if rows not in self._tuned:
            rows = nearest(self._tuned, rows) or rows
        return self._tuned.get(rows)

    def _run(
        self, tile: Tile | None, x: int, layer: LayerWeights, positions: int, cache_rows: int, qkv: int,
        keys: int, values: int, tokens: int,
    ) -> None:  # fmt: skip
        if tile is not None and self._fused is not None:
            self._fused.run(
                tile, x, layer.qkv, layer.qkv_bias, positions, cache_rows, qkv, keys, values, tokens,
                padded_rows(tokens),
            )  # fmt: skip
            return
        self._gemm(x, layer.qkv, qkv, tokens, self._outputs, self._spec.width)
        self._kernels.qkv_rope_write(
            qkv, layer.qkv_bias, layer.q_norm, layer.k_norm, positions, cache_rows, keys, values, tokens
        )
