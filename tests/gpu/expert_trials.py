"""Mixtures of experts of random weights: their kernels, and in float64 the reference runner's arithmetic."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.spec import Activation, Experts, FeedForward, Norm, RouterScores
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, FP8, INT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.experts.combine import Branches, Combine
from nightmill.worker.runners.gpu.experts.grouped import Given, GroupedProducts
from nightmill.worker.runners.gpu.experts.room import ExpertRoom
from nightmill.worker.runners.gpu.experts.route import Routing
from nightmill.worker.runners.gpu.experts.tiles import ExpertTile, Multiplier
from nightmill.worker.runners.gpu.rows.norms import Ending
from nightmill.worker.runners.gpu.weights.layout import NormWeight
from nightmill.worker.runners.gpu.weights.router import PART_SCALE, part_rows
from nightmill.worker.runners.reference import ops
from nightmill.worker.runners.reference.experts import choose
from nightmill.worker.runners.reference.rounding import to_fp8
from tests.gpu.oracles import nmse
from tests.support.elements import ROUNDED_ONCE, rounded
from tests.support.operands import buffer, e4m3_numbers, elements, fetched, matrix
from tests.support.packed_weights import packed, weights_of
from tests.support.specs import mixture

Array = npt.NDArray[Any]

SUMS = 1e-10
"""NMSE allowed to sums in float, as to those of other products (`test_reference_kernels`)."""
SUMS_OF_FP8 = 1e-6
"""The same of sums that tensor cores make of E4M3, as in `test_fp8`."""
PADDING = 77  # slot of tokens of padding
NORM = Norm(1e-6)
QWEN = Experts(count=8, used=2, width=96, normalise=True)
KINDS = {
    "qwen": QWEN,
    "of the chosen, biases, clamped": Experts(
        count=6, used=4, width=104, activation=Activation.CLAMPED_SWIGLU, bias=True, router_bias=True,
        scores=RouterScores.SOFTMAX_OF_CHOSEN,
    ),
    "groups, squared": Experts(
        count=12, used=3, width=64, activation=Activation.RELU_SQUARED, gated=False, scale=2.5,
        scores=RouterScores.SIGMOID, selection_bias=True, groups=4, groups_used=2, normalise=True,
    ),
    "fused, GELU, scales": Experts(
        count=5, used=5, width=40, activation=Activation.GELU, fused=True, expert_scales=("down",),
        groups=1, scale=0.5,
    ),
    "scales of all, groups of one": Experts(
        count=40, used=1, width=32, expert_scales=("gate", "up", "down"), groups=40, groups_used=7
    ),
    "shared": replace(QWEN, shared=FeedForward(width=32), shared_gated=True),
    "beside": replace(QWEN, shared=FeedForward(width=32), beside=Norm(1e-5), activation=Activation.GELU),
}  # fmt: skip
ACTIVATED = {
    (Activation.SILU, True): ops.swiglu, (Activation.GELU, True): ops.geglu,
    (Activation.RELU_SQUARED, False): ops.relu_squared,
    (Activation.CLAMPED_SWIGLU, True): ops.clamped_swiglu,
}  # fmt: skip


@dataclass
class Weights:
    """Rows of a matrix on the device, and the numbers that they are."""

    held: Matrix
    numbers: Array


@dataclass
class Routed:
    """What a launch left; positions that nobody has are NaN."""

    chosen: Array  # (T, used)
    shares: Array  # (T, used)
    places: Array  # (T, used)
    sources: Array  # (N,)
    tiles: Array  # (tiles, 4)
    activated: Array  # (N, F)
    outputs: Array  # (N, R)
    mixed: Array  # words (T, R)
    stream: Array  # (T, R)
    normed: Array  # words (T, R)
    tile_rows: int
    by: Multiplier


@dataclass
class ExpertTrial:
    """Experts with random weights, which read rows of `width` elements.

    kept        format of gate and up; None: the device's elements
    kept_second  of up and down, if that is another
    among       tiles to choose from, if not from all
    """

    device: Device
    experts: Experts
    width: int = 72
    kept: Format | None = None
    kept_second: Format | None = None
    seed: int = 0
    among: tuple[ExpertTile, ...] = ()
    _small: dict[str, Array] = field(init=False)
    _gate_up: list[Weights] = field(init=False)
    _down: Weights = field(init=False)

    def __post_init__(self) -> None:
        experts, rng = self.experts, np.random.default_rng(self.seed)
        normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
        count, inner, width = experts.count, experts.width, self.width
        first = self.kept or self.device.element.format
        second = self.kept_second or first
        rows = count * inner
        if not experts.gated:
            sizes = [(rows, first)]
        elif first is second:
            sizes = [(2 * rows, first)]
        else:
            sizes = [(rows, first), (rows, second)]
        self._gate_up = [self._weights(rng, format_, rows, width) for rows, format_ in sizes]
        self._down = self._weights(rng, second, count * width, inner)
        sides = 2 if experts.gated else 1
        self._small = {
            "router_bias": normal(count) * experts.router_bias,
            "selection_bias": normal(count) * experts.selection_bias,
            "gate_up_bias": normal(sides * count, inner) * experts.bias,
            "down_bias": normal(count * width) * experts.bias,
            "norm": 1 + normal(width) / 4,
            "routed": 1 + normal(width) / 4,
            "of_shared": 1 + normal(width) / 4,
            "factor": np.full(1, 0.7, dtype=np.float32),
        } | {part: 1 + normal(count) / 4 for part in experts.expert_scales}

    def _weights(self, rng: np.random.Generator, format_: Format, rows: int, columns: int) -> Weights:
        device = self.device
        if format_.packed:
            raw, numbers = weights_of(format_, rows, columns, device.element)
            return Weights(
                packed(device, format_, raw, columns), rounded(numbers, device.element).astype(np.float64)
            )
        if format_ is Format.FP8:
            words = rng.integers(0, 127, (rows, columns), dtype=np.uint8)
            words |= rng.integers(0, 2, (rows, columns), dtype=np.uint8) << 7
            scales = (rng.uniform(0.5, 2, rows) / 200 / np.sqrt(columns)).astype(np.float32)
            held = Matrix(device.upload(words), rows, columns, format_, device.upload(scales))
            return Weights(held, e4m3_numbers()[words].astype(np.float64) * scales[:, None])
        numbers = rounded(rng.standard_normal((rows, columns)) / np.sqrt(columns), device.element)
        return Weights(matrix(device, numbers), numbers.astype(np.float64))

    def inputs(self, tokens: int, seed: int = 1) -> tuple[Array, Array]:
        """Rows of elements, as floats (T, width), and logits (T, count), with a gate's behind them."""
        rng = np.random.default_rng((self.seed, seed))
        # Products are as large as 1, whatever random weights of a packed format are.
        size = np.sqrt(self.width) * self._gate_up[0].numbers.std()
        x = rounded(rng.standard_normal((tokens, self.width)) / size, self.device.element).astype(np.float32)
        logits = rng.standard_normal((tokens, self.experts.count + 1)).astype(np.float32)
        return x, logits * 2

    def run(self, x: Array, logits: Array, padding: Array | None = None) -> Routed:
        """Take tokens through the kernels; padding: which are no tokens."""
        device, experts, tokens, width = self.device, self.experts, len(x), self.width
        fp8 = (self.kept or device.element.format) is Format.FP8
        size = ExpertRoom.workspace(replace(mixture(experts), width=width), tokens, fp8=fp8)
        address = device.allocate(size, "experts")
        device.fill(address, 0xFF, size)
        at = ExpertRoom.at(address, experts, width, tokens, fp8=fp8)
        self._put_logits(at, logits)
        slots, given = 0, {name: buffer(device, one) for name, one in self._small.items()}
        if padding is not None:
            slots = device.upload(np.where(padding, PADDING, 3).astype(np.int32))
        of = lambda name, there=True: given[name] if there else ABSENT  # noqa: E731
        routing = Routing(device, experts)
        grouped = GroupedProducts(device, self._formats, self.among)
        tile = grouped.tile(experts, tokens)
        routing(
            of("router_bias", experts.router_bias), of("selection_bias", experts.selection_bias), at, tokens,
            tile, slots=slots, padding=PADDING,
        )  # fmt: skip
        parts = [given.get(part, ABSENT) for part in (("gate", "up") if experts.gated else ("up", ""))]
        read = self._rounded(x) if fp8 else elements(device, x)
        grouped.gate_up(
            experts, read, self._matrix, Given(of("gate_up_bias", experts.bias), *parts), at, tokens, tile
        )
        device.synchronize()
        activated, choices = fetched(device, at.activated), tokens * experts.used
        entering = at.activated
        if fp8:
            rows = np.where(np.isnan(activated), 0, activated)[:choices].astype(np.float32)
            entering = self._rounded(rows)
        down = Given(of("down_bias", experts.bias), given.get("down", ABSENT))
        grouped.down(experts, entering, self._down.held, down, at, tokens, tile)
        combine = Combine(device)
        stream, normed, mixed = self._combined(combine, routing, at, tokens, given)
        chosen, shares, places = (fetched(device, one, tokens) for one in (at.chosen, at.shares, at.places))
        total = fetched(device, at.total)[0]
        tiles = device.download(at.tiles.address, (total, 4), INT)
        return Routed(
            chosen, shares, places, fetched(device, at.sources, choices), tiles, activated[:choices],
            fetched(device, at.outputs, choices), mixed, stream, normed, tile.rows, tile.by,
        )  # fmt: skip

    def _combined(
        self, combine: Combine, routing: Routing, at: ExpertRoom, tokens: int, given: dict[str, Buffer]
    ) -> tuple[Array, Array, Array]:
        """The stream, its norm, and the sum alone."""
        device, experts, width = self.device, self.experts, self.width
        x = buffer(device, self.stream(tokens))
        out = elements(device, np.full((tokens, width), np.nan))
        if experts.shared is not None:
            device.copy_in(at.shared.address, self.shared(tokens))
        ending, branches = Ending(scale=0.75, before=NormWeight(given["norm"], NORM.eps)), None
        if experts.beside is not None:
            eps, ending = experts.beside.eps, replace(ending, factor=given["factor"])
            branches = Branches(NormWeight(given["routed"], eps), NormWeight(given["of_shared"], eps))
        combine.add(experts, at, routing.gates(at), ending, x, out, tokens, branches)
        latent = replace(at, mixed=elements(device, np.full((tokens, width), np.nan)))
        combine.mix(experts, latent, tokens)
        device.synchronize()
        words = (device.download(one.address, (tokens, width), np.uint16) for one in (out, latent.mixed))
        normed, mixed = words
        return fetched(device, x), normed, mixed

    def tile_rows(self, tokens: int) -> int:
        """Positions of the tile that so many tokens have."""
        return GroupedProducts(self.device, self._formats, self.among).tile(self.experts, tokens).rows

    @property
    def _formats(self) -> set[Format]:
        return {one.held.format for one in (*self._gate_up, self._down)}

    @property
    def _matrix(self) -> Matrix:
        parts = tuple(one.held for one in self._gate_up)
        if len(parts) == 1:
            return parts[0]
        rows = sum(part.rows for part in parts)
        return Matrix(parts[0].address, rows, self.width, Format.MIXED, parts=parts)

    def _rounded(self, x: Array) -> Buffer:
        """Rows in FP8, with the bits of `quantise.cu`."""
        numbers, scales = to_fp8(x)
        table = e4m3_numbers()[:127]
        words = np.searchsorted(table, np.abs(numbers)).astype(np.uint8)
        words |= (np.signbit(numbers) << 7).astype(np.uint8)
        device = self.device
        held = device.upload(scales.astype(np.float32).reshape(-1))
        return Buffer(device.upload(words), x.shape, FP8, held)

    def _put_logits(self, at: ExpertRoom, logits: Array) -> None:
        """As a router's product leaves them: in two parts, between NaN."""
        experts = self.experts
        count = experts.count + experts.shared_gated
        held = np.full((len(logits), at.logits.shape[1]), np.nan, dtype=np.float32)
        high = rounded(logits[:, :count], self.device.element).astype(np.float32)
        part = part_rows(count)
        with np.errstate(invalid="ignore"):  # infinity less itself
            low = (logits[:, :count] - high) / PART_SCALE
        held[:, :count], held[:, part : part + count] = high, low
        self.device.copy_in(at.logits.address, held)
        self.device.synchronize()

    def stream(self, tokens: int) -> Array:
        """What the residual stream is before."""
        return np.random.default_rng(9).standard_normal((tokens, self.width)).astype(np.float32)

    def shared(self, tokens: int) -> Array:
        """What a shared expert gives."""
        array = self.device.pinned((tokens, self.width), np.float32)
        array[:] = np.random.default_rng(8).standard_normal((tokens, self.width))
        return array

    def check(self, x: Array, logits: Array, padding: Array | None = None) -> Routed:
        """Run tokens, and hold each step against float64, given what the one before left."""
        routed, experts = self.run(x, logits, padding), self.experts
        real = np.ones(len(x), dtype=bool) if padding is None else ~padding
        bias = self._small["selection_bias"].astype(np.float64) if experts.selection_bias else None
        exact = logits[:, : experts.count].astype(np.float64) + self._small["router_bias"]
        chosen, shares = choose(experts, exact, bias)
        np.testing.assert_array_equal(routed.chosen[real], chosen[real])
        np.testing.assert_allclose(routed.shares[real], shares[real], rtol=3e-6)
        assert (routed.chosen[~real] == -1).all()
        assert (routed.places[~real] == -1).all()
        self._check_places(routed)
        owners = routed.chosen.reshape(-1)
        order = np.argsort(owners, kind="stable")[np.count_nonzero(owners < 0) :]
        of_position = owners[order]
        count = len(order)
        assert np.isnan(routed.activated[count:]).all()
        assert np.isnan(routed.outputs[count:]).all()
        fp8 = Format.FP8 in self._formats
        entering = self._as_read(x, fp8=fp8)[routed.sources[:count]]
        activated = self._activated(entering, of_position)
        native = fp8 and routed.by is Multiplier.GEMM
        once = ROUNDED_ONCE[self.device.element] * (4 if native else 1)
        assert nmse(routed.activated[:count], activated) < once
        outputs = self._outputs(self._as_read(routed.activated[:count], fp8=fp8), of_position)
        assert nmse(routed.outputs[:count], outputs) < (SUMS_OF_FP8 if native else SUMS)
        self._check_sums(routed, logits)
        return routed

    def _as_read(self, x: Array, *, fp8: bool) -> Array:
        x = x.astype(np.float32)
        if not fp8:
            return x.astype(np.float64)
        numbers, scales = to_fp8(x)
        return numbers.astype(np.float64) * scales

    def _check_places(self, routed: Routed) -> None:
        owners = routed.chosen.reshape(-1)
        order = np.argsort(owners, kind="stable")[np.count_nonzero(owners < 0) :]
        np.testing.assert_array_equal(routed.places.reshape(-1)[order], np.arange(len(order)))
        np.testing.assert_array_equal(routed.sources[: len(order)], order // self.experts.used)
        rows, expected, first = routed.tile_rows, [], 0
        for expert, count in enumerate(np.bincount(owners[order], minlength=self.experts.count)):
            tiles = -(-count // rows)
            expected += [
                (expert, first + at, min(rows, count - at), tiles + (at // rows << 16))
                for at in range(0, count, rows)
            ]
            first += count
        np.testing.assert_array_equal(routed.tiles, np.array(expected).reshape(-1, 4))

    def _activated(self, x: Array, of_position: Array) -> Array:
        experts, inner = self.experts, self.experts.width
        stacked = np.concatenate([one.numbers for one in self._gate_up]).reshape(-1, inner, self.width)
        bias = self._small["gate_up_bias"].reshape(-1, inner)
        activate = ACTIVATED[experts.activation, experts.gated]
        found = np.empty((len(x), inner))
        for expert in range(experts.count):
            mine = of_position == expert
            if experts.fused:
                sides = [2 * expert, 2 * expert + 1]
            else:
                sides = list(range(expert, len(stacked), experts.count))
            names = ("gate", "up") if experts.gated else ("up",)
            parts = [
                x[mine] @ stacked[side].T * self._small.get(name, np.ones(experts.count))[expert] + bias[side]
                for side, name in zip(sides, names, strict=True)
            ]
            found[mine] = activate(np.concatenate(parts, axis=1))
        return found

    def _outputs(self, x: Array, of_position: Array) -> Array:
        experts = self.experts
        stacked = self._down.numbers.reshape(experts.count, self.width, -1)
        scales = self._small.get("down", np.ones(experts.count))
        bias = self._small["down_bias"].reshape(experts.count, -1)
        found = np.empty((len(x), self.width))
        for expert in range(experts.count):
            mine = of_position == expert
            found[mine] = x[mine] @ stacked[expert].T * scales[expert] + bias[expert]
        return found

    def _check_sums(self, routed: Routed, logits: Array) -> None:
        """Of what positions have, the sum, the stream and its norm."""
        experts, element = self.experts, self.device.element
        held = routed.outputs.astype(np.float64)
        total = np.zeros((len(routed.chosen), self.width))
        for rank in range(experts.used):
            there = routed.places[:, rank] >= 0
            rows = held[routed.places[there, rank]]
            total[there] += rows * routed.shares[there, rank : rank + 1]
        mixed = rounded(total, element).astype(np.float64)
        assert nmse(from_words_of(routed.mixed, self), mixed) < ROUNDED_ONCE[element]
        if experts.shared is not None:
            shared = np.random.default_rng(8).standard_normal(total.shape).astype(np.float32)
            if experts.beside is None:
                total += shared * ops.sigmoid(logits[:, experts.count :].astype(np.float64))
            else:
                total = ops.rms_norm(total, self._small["routed"], experts.beside.eps)
                shared = shared.astype(np.float64)
                total += ops.rms_norm(shared, self._small["of_shared"], experts.beside.eps)
        stream = self.stream(len(total)) + 0.75 * total
        stream *= 1.0 if experts.beside is None else float(self._small["factor"][0])
        assert nmse(routed.stream, stream) < SUMS
        normed = stream / np.sqrt(np.square(stream).mean(1, keepdims=True) + NORM.eps) * self._small["norm"]
        assert nmse(from_words_of(routed.normed, self), normed) < ROUNDED_ONCE[element]


def from_words_of(words: Array, trial: ExpertTrial) -> Array:
    """Rows of words as numbers."""
    bits = words.astype(np.uint32) << 16
    return words.view(np.float16) if trial.device.element.value == "f16" else bits.view(np.float32)


def results(routed: Routed, rows: Array | slice) -> tuple[Array, ...]:
    """What must be equal to the bit, of some tokens: choices, shares, sums, stream and norm."""
    of_ranks = routed.outputs[routed.places[rows].clip(0)]
    return routed.chosen[rows], routed.shares[rows], of_ranks, routed.mixed[rows]


def assert_same(one: tuple[Array, ...], other: tuple[Array, ...]) -> None:
    """Equal to the bit."""
    for mine, its in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine.view(np.uint8), its.view(np.uint8))
