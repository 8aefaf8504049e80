"""A few tokens through experts by the kernels for any number, and by those for a few: the same bits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.spec import Experts
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, FLOAT, INT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.experts.combine import Combine
from nightmill.worker.runners.gpu.experts.few import FewExperts
from nightmill.worker.runners.gpu.experts.grouped import Given, GroupedProducts
from nightmill.worker.runners.gpu.experts.room import ExpertRoom
from nightmill.worker.runners.gpu.experts.route import Routing
from nightmill.worker.runners.gpu.experts.tiles import ExpertTile
from nightmill.worker.runners.gpu.rows.norms import Ending
from nightmill.worker.runners.gpu.weights.layout import NormWeight
from nightmill.worker.runners.gpu.weights.router import router_parts
from tests.gpu.expert_trials import NORM, PADDING, ExpertTrial
from tests.support.operands import buffer, elements
from tests.support.specs import mixture

Array = npt.NDArray[Any]
Bits = dict[str, Array]
Product = Callable[[Buffer, Matrix, Buffer, int], None]
"""Queues a router's product of so many rows, as layers do: one of `Products`."""

ROWS = 16  # room for rows of products


class FewTrial:
    """Experts with random weights and their router.

    among  the tile by which others compute, if not that which they choose
    """

    def __init__(
        self, device: Device, experts: Experts, width: int, kept: Format, product: Product,
        among: tuple[ExpertTile, ...] = (),
    ) -> None:  # fmt: skip
        self.device, self.experts, self.width, self._product = device, experts, width, product
        self._trial = ExpertTrial(device, experts, width, kept, among=among)
        rng = np.random.default_rng(7)
        weights = (rng.standard_normal((experts.count, width)) / np.sqrt(width)).astype(np.float32)
        words = router_parts(weights, device.element)
        self._router = Matrix(device.upload(words), *words.shape, device.element.format)
        self._given = {name: buffer(device, one) for name, one in self._trial._small.items()}
        self._routing, self._combine = Routing(device, experts), Combine(device)
        self._grouped = GroupedProducts(device, {kept}, among)
        self._few = FewExperts(device, {kept})

    def agrees(self, x: Array, padding: Array | None = None, *, normed: bool = True) -> Bits:
        """Compute rows of elements, as floats, both ways, and the second way again; return what they left.

        padding  which are no tokens
        """
        apart, together, again = (
            self.computed(x, padding, few=few, normed=normed) for few in (False, True, True)
        )
        for name, bits in apart.items():
            for others in (together, again):
                np.testing.assert_array_equal(others[name].view(np.uint8), bits.view(np.uint8), name)
        arrived = self.device.download(self._few._arrived, (2,), INT)
        assert not arrived.any()
        return together

    def inputs(self, tokens: int, seed: int = 1) -> Array:
        """Random rows."""
        return self._trial.inputs(tokens, seed)[0]

    def computed(self, x: Array, padding: Array | None, *, few: bool, normed: bool = True) -> Bits:
        """What is left of these tokens, by name."""
        device, experts, tokens, width = self.device, self.experts, len(x), self.width
        size = ExpertRoom.workspace(replace(mixture(experts), width=width), ROWS, fp8=False)
        address = device.allocate(size, "experts")
        device.fill(address, 0xFF, size)
        at = ExpertRoom.at(address, experts, width, ROWS, fp8=False)
        held = elements(device, np.concatenate([x, np.full((ROWS - tokens, width), np.nan)]))
        stream = buffer(device, self._trial.stream(tokens))
        out = elements(device, np.full((tokens, width), np.nan))
        of = lambda name, there=True: self._given[name] if there else ABSENT  # noqa: E731
        biases = of("router_bias", experts.router_bias), of("selection_bias", experts.selection_bias)
        parts = of("gate", "gate" in self._given), of("up", "up" in self._given)
        gate_up = Given(of("gate_up_bias", experts.bias), *parts)
        down = Given(of("down_bias", experts.bias), of("down", "down" in self._given))
        norm = NormWeight(self._given["norm"], NORM.eps) if normed else None
        ending = Ending(scale=0.75, factor=self._given["factor"], before=norm)
        slots = 0
        if padding is not None:
            slots = device.upload(np.where(padding, PADDING, 3).astype(np.int32))
        matrices = self._trial._matrix, self._trial._down.held
        if few:
            assert self._few.takes(experts, self._router, matrices, ending, tokens)
            self._few.route(self._routing, held, self._router, biases, at, tokens, (slots, PADDING))
            self._few.gate_up(experts, held, matrices[0], gate_up, at, tokens)
            self._few.add(experts, matrices[1], down, at, ending, stream, out, tokens)
        else:
            tile = self._grouped.tile(experts, tokens)
            self._product(held, self._router, at.logits, tokens)
            self._routing(*biases, at, tokens, tile, slots=slots, padding=PADDING)
            self._grouped.gate_up(experts, held, matrices[0], gate_up, at, tokens, tile)
            self._grouped.down(experts, at.activated, matrices[1], down, at, tokens, tile)
            self._combine.add(experts, at, ABSENT, ending, stream, out, tokens)
        device.synchronize()
        return self._left(at, stream, out, tokens)

    def _left(self, at: ExpertRoom, stream: Buffer, out: Buffer, tokens: int) -> Bits:
        device, used = self.device, self.experts.used
        get = device.download
        places = get(at.places.address, (tokens, used), INT)
        total, positions = int(get(at.total.address, (1,), INT)[0]), int((places >= 0).sum())
        return {
            "logits": get(at.logits.address, (tokens, at.logits.shape[1]), FLOAT), "places": places,
            "chosen": get(at.chosen.address, (tokens, used), INT),
            "shares": get(at.shares.address, (tokens, used), FLOAT), "total": np.array([total]),
            "sources": get(at.sources.address, (positions,), INT),
            "tiles": get(at.tiles.address, (total, 4), INT),
            "activated": get(at.activated.address, (positions, self.experts.width), np.uint16),
            "stream": get(stream.address, (tokens, self.width), FLOAT),
            "normed": get(out.address, (tokens, self.width), np.uint16),
        }  # fmt: skip


def few_agree(trial: FewTrial, rows: tuple[int, ...]) -> None:
    """So many tokens, and each of these alone is as among the others."""
    x = trial.inputs(max(rows))
    found = {tokens: trial.agrees(x[:tokens]) for tokens in rows}
    for tokens, left in found.items():
        for name in ("logits", "chosen", "shares", "stream", "normed"):
            among = found[max(rows)][name][:tokens]
            np.testing.assert_array_equal(left[name].view(np.uint8), among.view(np.uint8), name)


def few_strange(trial: FewTrial, tokens: int) -> None:
    """Check that padding of some or all tokens, and a norm left out, change nothing else.

    What is not a number must stay in its row.
    """
    x = trial.inputs(tokens)
    clean = trial.agrees(x)
    trial.agrees(x, np.arange(tokens) % 2 == 1)
    trial.agrees(x, np.ones(tokens, dtype=bool), normed=False)
    x[tokens - 1, 5] = np.nan
    poisoned = trial.agrees(x)
    for name in ("logits", "chosen", "shares", "stream", "normed"):
        others = slice(tokens - 1)
        np.testing.assert_array_equal(poisoned[name][others], clean[name][others], name)
    assert np.isnan(poisoned["stream"][-1]).all()
