"""Kernels of layers with states: microseconds, and bytes or FLOPs a second, one JSON line a case.

    python -m benchmarks.states [delta_decode | delta_prefill | mamba_decode | mamba_prefill | short ...]

Launches as in `benchmarks.kernels`. `bytes` of decoding are those of the states, read and written once;
`us` is of the recurrence with norm and gate, `mixer_us` of these and the convolution. FLOPs of prompts are
those of the formulas, not of the three products that each product of floats is.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.kernels import Bench
from nightmill.worker.model.spec import GatedDeltaNet, Mamba2, Norm, ShortConv
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, FLOAT, Buffer
from nightmill.worker.runners.gpu.states.convolution import ShortConvolution
from nightmill.worker.runners.gpu.states.delta_net import DeltaNet
from nightmill.worker.runners.gpu.states.mamba2 import Mamba
from nightmill.worker.runners.gpu.states.operands import LayerStates, MixerWeights, Pieces, StepPieces

DELTA = {"0.8B": (16, 16), "9B": (16, 32), "27B": (16, 48)}  # Qwen3.5: heads of keys, and of values
MAMBA = {"Nemotron 30B": (64, 64, 8, 128), "Granite 4 H-Tiny": (48, 64, 1, 128)}
DECODE = (1, 64, 256)
PREFILL = ((1, 4096), (16, 1024))
CHUNK = 64
ROUND_BYTES = 192 << 20  # as of `benchmarks.kernels`


class Layer:
    """A mixer with random weights and states, and rows for so many tokens."""

    def __init__(
        self, bench: Bench, mixer: GatedDeltaNet | Mamba2 | ShortConv, tokens: int, slots: int
    ) -> None:
        self.bench, self.mixer = bench, mixer
        device = bench.device

        def floats(*shape: int) -> Buffer:
            return bench.random(*shape, dtype=np.float32)

        self.launcher: Any
        if isinstance(mixer, ShortConv):
            channels, columns, width, steering = mixer.width, 3 * mixer.width, mixer.width, 0
            self.launcher = ShortConvolution(device, mixer)
            self.weights = MixerWeights(floats(channels, mixer.kernel))
        else:
            channels = mixer.convolved
            kind: Any = Mamba if isinstance(mixer, Mamba2) else DeltaNet
            work = device.allocate(kind.workspace(mixer, tokens))
            device.fill(work, 0, kind.workspace(mixer, tokens))
            self.launcher = kind(device, mixer, work, tokens)
            if isinstance(mixer, Mamba2):
                heads, width = mixer.heads, mixer.inner
                steering = heads
                norm = floats(mixer.inner)
            else:
                heads, width = mixer.value_heads, mixer.values
                steering = 2 * heads
                norm = floats(mixer.value_dim)
            columns = channels + width
            decay = Buffer(device.upload(np.full(heads, -0.01, dtype=np.float32)), (heads,), FLOAT)
            self.weights = MixerWeights(
                floats(channels, mixer.kernel), floats(channels), floats(heads), decay, floats(heads), norm
            )
        self.x = bench.random(tokens, columns)
        self.controls = floats(tokens, steering) if steering else ABSENT
        self.out = bench.random(tokens, width)
        self.states = [
            LayerStates(*(floats(slots, *array.shape).address for array in mixer.state))
            for _ in range(min(-(-ROUND_BYTES // (slots * self.state_bytes)), 40))
        ]

    @property
    def state_bytes(self) -> int:
        return sum(array.bytes for array in self.mixer.state)

    def pieces(self, lengths: list[int], start: int) -> Pieces:
        """One after the other, in slots of their own."""
        count = len(lengths)
        ends = np.cumsum(lengths)
        arrays = (ends - lengths, np.array(lengths), self.bench.rng.permutation(count), np.full(count, start))
        return Pieces(*(self.bench.ints(array) for array in arrays), count=count, rows=int(ends[-1]))

    def launch(self, pieces: StepPieces) -> Callable[[int], None]:
        """All of its kernels."""
        return lambda i: self.launcher(self.x, self.controls, self.weights, self.states[i], pieces, self.out)

    def recurrence(self, pieces: StepPieces) -> Callable[[int], None]:
        """The recurrence alone, of drawn tokens or of prompts."""
        return lambda i: self.launcher.recur(
            self.x, self.controls, self.weights, self.states[i], pieces, self.out
        )


def decode(bench: Bench, name: str, mixer: GatedDeltaNet | Mamba2 | ShortConv) -> Iterator[dict[str, Any]]:
    """Sequences that draw a token each."""
    for count in DECODE:
        layer = Layer(bench, mixer, count, count)
        pieces = StepPieces(drawn=layer.pieces([1] * count, 100))
        rounds = len(layer.states)
        line = {"size": f"{name} {count}", "mixer_us": bench.seconds(layer.launch(pieces), rounds)}
        moved = 2 * count * layer.state_bytes
        if not isinstance(mixer, ShortConv):
            line["us"] = bench.seconds(layer.recurrence(pieces), rounds)
            moved = 2 * count * mixer.state[1].bytes
        yield line | {"bytes": moved}


def prefill(bench: Bench, name: str, mixer: GatedDeltaNet | Mamba2 | ShortConv) -> Iterator[dict[str, Any]]:
    """Prompts."""
    for count, length in PREFILL:
        layer = Layer(bench, mixer, count * length, count)
        pieces = StepPieces(prompts=layer.pieces([length] * count, 0))
        line: dict[str, Any] = {"size": f"{name} {count}x{length}"}
        line["mixer_us"] = bench.seconds(layer.launch(pieces), 1)
        if not isinstance(mixer, ShortConv):
            line["us"] = bench.seconds(layer.recurrence(pieces), 1)
            heads, keys, values = mixer.state[1].shape
            squares = 2 * CHUNK * keys + CHUNK * values  # products of a token with those of its chunk, halved
            through = 2 * keys * values
            if isinstance(mixer, GatedDeltaNet):
                squares, through = squares + CHUNK * values, 3 * keys * values
            else:
                squares -= CHUNK * keys
            line["flops"] = 2 * count * length * heads * (squares // 2 + through)
        yield line


def main() -> None:
    """Measure the groups named on the command line, or all."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("groups", nargs="*", metavar="GROUP")
    wanted = arguments.parse_args().groups
    delta = {
        name: GatedDeltaNet(
            key_heads=keys, value_heads=values, key_dim=128, value_dim=128, kernel=4, norm=Norm(1e-6)
        )
        for name, (keys, values) in DELTA.items()
    }
    mamba = {
        name: Mamba2(heads=heads, head_dim=size, groups=groups, state_size=state, kernel=4, norm=Norm(1e-5))
        for name, (heads, size, groups, state) in MAMBA.items()
    }
    short = {"LFM2 1.2B": ShortConv(width=2048, kernel=3)}
    groups: list[tuple[str, Callable[..., Iterator[dict[str, Any]]], dict[str, Any]]] = [
        ("delta_decode", decode, delta), ("delta_prefill", prefill, delta),
        ("mamba_decode", decode, mamba), ("mamba_prefill", prefill, mamba),
        ("short", decode, short), ("short", prefill, short),
    ]  # fmt: skip
    copy = 0.0
    for group, measured, mixers in groups:
        if wanted and group not in wanted:
            continue
        for name, mixer in mixers.items():
            with Device(0) as device:
                bench = Bench(device)
                if not copy:
                    copy = bench.copy_rate()
                    print(json.dumps({"gpu": device.name, "copy_gb_s": round(copy / 1e9)}), flush=True)
                for line in measured(bench, name, mixer):
                    print(json.dumps({"kernel": group} | shown(line, copy)), flush=True)


def shown(line: dict[str, Any], copy: float) -> dict[str, Any]:
    """Times in microseconds, with the rates that they make."""
    seconds = line.get("us", line["mixer_us"])
    rates: dict[str, Any] = {}
    if "bytes" in line:
        rate = line["bytes"] / seconds
        rates = {"gb_s": round(rate / 1e9), "of_copy": round(rate / copy, 3)}
    if "flops" in line:
        rates = {"tflop_s": round(line["flops"] / seconds / 1e12, 1)}
    return line | {key: round(line[key] * 1e6, 2) for key in ("us", "mixer_us") if key in line} | rates


if __name__ == "__main__":
    main()
