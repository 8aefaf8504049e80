"""Products added to the residual stream by `hopper_relay.cu`, where blocks share K: shapes and launches."""

from dataclasses import dataclass

from worker.runners.gpu.compiler import compile_kernels, kernel_directory
from worker.runners.gpu.device import Device
from worker.runners.gpu.functions import Function, Module
from worker.runners.gpu.hopper import TensorMaps

__all__ = ["RELAYS", "HopperRelay", "Relay", "relays"]

_BOX_COLUMNS = 64  # elements of K in a box
_THREADS = 160
_WGMMA_ROWS = 64
_SHARED_ALIGNMENT = 1024
_MOST_ROWS = 256  # above, larger tiles win
_ONE_TILE = 64  # rows up to which each weight belongs to one tile only


@dataclass(frozen=True, slots=True)
class Relay:
    """A tile of `rows` by `columns` rows of the weight, whose K is shared by `parts` blocks of a cluster.

    boxes   boxes of 64 elements of K in a step
    down    tiles of rows in a cluster, which share weights
    stages  steps that a block has copies of
    lead    the first block's share of K
    """

    rows: int
    columns: int
    boxes: int
    parts: int
    down: int
    stages: int
    lead: float = 1.0

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        copies = self.stages * self.boxes * (self.rows + self.columns) * _BOX_COLUMNS * 2
        sums = _WGMMA_ROWS * self.columns * 4 if self.parts > 1 else 0
        read_past = (_WGMMA_ROWS - self.rows) * _BOX_COLUMNS * 2  # by wgmma
        return copies + sums + read_past + _SHARED_ALIGNMENT

    @property
    def name(self) -> str:
        """Of the kernel."""
        sizes = self.rows, self.columns, self.boxes, self.parts, self.down, self.stages
        return "relay_" + "_".join(map(str, sizes))

    @property
    def blocks(self) -> int:
        """In a cluster."""
        return self.parts * self.down

    def steps(self, inputs: int) -> int:
        """Steps through K, of all blocks."""
        return -(-inputs // (self.boxes * _BOX_COLUMNS))

    def lead_steps(self, inputs: int) -> int:
        """Those of the first block, so that each has one at least."""
        steps = self.steps(inputs)
        return max(1, min(round(steps * self.lead), steps - self.parts + 1))


RELAYS = (
    Relay(16, 16, 4, 2, 1, 13, 0.37),
    Relay(32, 16, 4, 2, 1, 9, 0.5),
    Relay(64, 16, 4, 2, 1, 5, 0.27),
    Relay(64, 32, 2, 2, 1, 9, 0.27),
    Relay(64, 32, 2, 1, 1, 9),
    Relay(64, 32, 2, 1, 2, 9),
    Relay(64, 64, 2, 1, 1, 7),
)


def relays(rows: int, inputs: int) -> list[Relay]:
    """Those that are worth timing for so many rows."""
    height = min((relay.rows for relay in RELAYS if relay.rows >= rows), default=_WGMMA_ROWS)
    return [
        relay
        for relay in RELAYS
        if relay.rows == height and rows <= _MOST_ROWS and relay.steps(inputs) >= relay.parts
        and (relay.down - 1) * relay.rows < rows
    ]  # fmt: skip


class HopperRelay:
    """y += x weight^T with one accumulator a result, to the bits of `HopperProducts`; on Hopper only."""

    def __init__(self, device: Device) -> None:
        source = kernel_directory() / "hopper_relay.cu"
        module = Module(device, compile_kernels(source, (), device.architecture), source.name)
        self._maps = TensorMaps(device)
        self._functions: dict[str, Function] = {
            relay.name: module.function(relay.name, "128s128sPPiiii", shared=relay.shared, dependent=True)
            for relay in RELAYS
        }

    def run(self, relay: Relay, x: int, weight: int, y: int, rows: int, outputs: int, inputs: int) -> None:
        """Queue y (rows, outputs) float += x weight^T; needs `relay.steps(inputs) >= relay.parts`."""
        x_map = self._maps(x, rows, inputs, relay.rows)
        weight_map = self._maps(weight, outputs, inputs, relay.columns)
        clusters = -(-outputs // relay.columns) * -(-rows // (relay.rows * relay.down))
        ahead = weight if rows <= _ONE_TILE else 0  # asked for by several tiles, more is lost than won
        self._functions[relay.name](
            (clusters * relay.blocks, 1, 1), (_THREADS, 1, 1), x_map, weight_map, ahead, y, rows, outputs,
            inputs, relay.lead_steps(inputs), shared=relay.shared,
        )  # fmt: skip
