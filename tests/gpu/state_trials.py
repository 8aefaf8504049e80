"""Layers with states, of random weights: their kernels, and in float64 the reference runner's mixing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.spec import GatedDeltaNet, Mamba2, Norm, Role, ShortConv
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, ELEMENT, FLOAT
from nightmill.worker.runners.gpu.states.convolution import ShortConvolution
from nightmill.worker.runners.gpu.states.delta_net import DeltaNet
from nightmill.worker.runners.gpu.states.mamba2 import Mamba
from nightmill.worker.runners.gpu.states.operands import LayerStates, Mixer, MixerWeights, Pieces, StepPieces
from nightmill.worker.runners.reference.mixing import mix
from nightmill.worker.runners.reference.states import Flow
from tests.gpu.oracles import nmse
from tests.support.elements import ROUNDED_ONCE, as_words, rounded
from tests.support.operands import buffer, elements, fetched, poisoned

Array = npt.NDArray[Any]
AnyMixer = GatedDeltaNet | Mamba2 | ShortConv

STATE = 1e-9
"""NMSE allowed to states; in float NumPy has 1e-13, and products of floats in parts 1e-10."""


@dataclass(frozen=True)
class Piece:
    """Tokens of a sequence: how many, and the position of the first."""

    length: int
    start: int = 0


@dataclass
class Results:
    """What a step left: rows of each piece as 16-bit words, and each piece's states."""

    out: list[Array]
    states: list[dict[str, Array]]


@dataclass
class Trial:
    """A layer with random weights, and sequences of random inputs: a position of one is always the same.

    controls  beta, alpha and time steps are floats beside the elements
    """

    device: Device
    mixer: AnyMixer
    seed: int = 0
    controls: bool = True
    weights: dict[Role, Array] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        mixer = self.mixer
        channels = mixer.width if isinstance(mixer, ShortConv) else mixer.convolved
        normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
        self.weights = {Role.CONVOLUTION: normal(channels, mixer.kernel)}
        if isinstance(mixer, ShortConv):
            return
        heads = mixer.heads if isinstance(mixer, Mamba2) else mixer.value_heads
        decay = -np.exp(rng.uniform(-6, 2, heads)).astype(np.float32)
        self.weights[Role.TIME_STEP_BIAS] = normal(heads) - 1
        if isinstance(mixer, Mamba2):
            if mixer.convolution_bias:
                self.weights[Role.CONVOLUTION_BIAS] = normal(channels)
            self.weights[Role.DECAY], self.weights[Role.SKIP] = decay[:, None], normal(heads, 1)
            self.weights[Role.MIXER_NORM] = normal(mixer.groups, mixer.inner // mixer.groups)
        else:
            self.weights[Role.DECAY], self.weights[Role.MIXER_NORM] = decay, normal(mixer.value_dim)

    @property
    def _columns(self) -> tuple[int, int]:
        """Columns of a row that are elements, and those that may be floats beside them."""
        mixer = self.mixer
        if isinstance(mixer, ShortConv):
            return 3 * mixer.width, 0
        if isinstance(mixer, Mamba2):
            return mixer.inner + mixer.convolved, mixer.heads
        return mixer.convolved + mixer.values, 2 * mixer.value_heads

    def inputs(self, sequence: int, piece: Piece) -> Array:
        """Rows of a sequence as float32 numbers, which elements are, but for controls that are floats."""
        plain, steering = self._columns
        rows = np.empty((piece.length, plain + steering), dtype=np.float32)
        for at in range(piece.length):
            rng = np.random.default_rng((self.seed, sequence, piece.start + at))
            rows[at] = rng.standard_normal(plain + steering)
        kept = rounded(rows, self.device.element).astype(np.float32)
        if self.controls and steering:
            kept[:, plain:] = rows[:, plain:]
        return kept

    def _as_in_files(self, x: Array) -> Array:
        """Rows with what steers heads in the order of the file's tensors, not of the kernels."""
        mixer = self.mixer
        if isinstance(mixer, GatedDeltaNet) and mixer.by_key_head:
            plain = self._columns[0]
            steering = x[:, plain:].reshape(len(x), 2, mixer.key_heads, -1)
            x[:, plain:] = steering.swapaxes(1, 2).reshape(len(x), -1)
        return x

    def states(self, sequence: int, piece: Piece) -> dict[str, Array]:
        """What a sequence's state is before a piece: zeros at its start, else random."""
        rng = np.random.default_rng((self.seed, sequence, piece.start, 1))
        return {
            array.name: rng.standard_normal(array.shape).astype(np.float32) * (piece.start > 0)
            for array in self.mixer.state
        }

    def launcher(self, rows: int) -> Mixer:
        """Its kernels, with room for so many rows."""
        device: Any = self.device
        mixer: Any = self.mixer
        if isinstance(mixer, ShortConv):
            return ShortConvolution(device, mixer)
        kind = Mamba if isinstance(mixer, Mamba2) else DeltaNet
        work = poisoned(device, (kind.workspace(mixer, rows) // FLOAT.itemsize,), FLOAT)
        return kind(device, mixer, work.address, rows)

    def run(
        self, prompts: Sequence[Piece], drawn: Sequence[Piece] = (), *, padding: int = 0,
        before: Sequence[dict[str, Array]] | None = None, first_sequence: int = 0, launches: int = 1,
    ) -> Results:  # fmt: skip
        """Take pieces through the kernels; what is not theirs is NaN before and has to be after.

        Piece n, drawn ones first, is of sequence n + first_sequence. padding: drawn pieces of no tokens.
        before: the states of pieces, if not `states`. launches: of fresh arrays, all of which have to agree.
        """
        pieces = [*drawn, *prompts]
        count, slots = len(pieces), len(pieces) + 3
        given = [self.states(first_sequence + n, piece) for n, piece in enumerate(pieces)]
        if before is not None:
            given = list(before)
        starts = [0]
        for n, piece in enumerate(pieces):  # a row of nobody behind each drawn piece
            starts.append(starts[-1] + piece.length + (n < len(drawn)))
        total, (plain, steering) = starts[-1] + 2, self._columns
        stride = -(-(plain + (0 if self.controls else steering)) // 8) * 8 + 8
        x = np.full((total, stride), np.nan, dtype=np.float32)
        floats = np.full((total, max(steering, 1) + 1), np.nan, dtype=np.float32)
        for n, piece in enumerate(pieces):
            rows = self.inputs(first_sequence + n, piece)
            mine = slice(starts[n], starts[n] + piece.length)
            kept = plain if self.controls else plain + steering
            x[mine, :kept] = rows[:, :kept]
            floats[mine, :steering] = rows[:, plain:]
        order = np.random.default_rng(self.seed + count).permutation(slots)[:count].astype(np.int32)
        results = []
        for _ in range(launches):
            arrays = {}
            for array in self.mixer.state:
                held = np.full((slots, *array.shape), np.nan, dtype=np.float32)
                for n, piece in enumerate(pieces):
                    if piece.start:
                        held[order[n]] = given[n][array.name]
                arrays[array.name] = held
            results.append(self._launch(x, floats, arrays, order, starts, pieces, len(drawn), padding))
        for other in results[1:]:
            assert_same(results[0], other)
        return results[0]

    def _launch(
        self, x: Array, floats: Array, arrays: dict[str, Array], order: Array, starts: list[int],
        pieces: list[Piece], drawn: int, padding: int,
    ) -> Results:  # fmt: skip
        device, total = self.device, len(x)
        held = {name: buffer(device, array) for name, array in arrays.items()}
        small = {role: buffer(device, array) for role, array in self.weights.items()}
        width = self._columns[0] if not isinstance(self.mixer, ShortConv) else self.mixer.width
        if isinstance(self.mixer, GatedDeltaNet):
            width = self.mixer.values
        elif isinstance(self.mixer, Mamba2):
            width = self.mixer.inner
        out = poisoned(device, (total, width), ELEMENT)
        lengths = [piece.length for piece in pieces]
        begins = [piece.start for piece in pieces]

        def pieces_of(part: slice, more: int = 0) -> Pieces:
            columns = [starts[:-1][part], lengths[part], order.tolist()[part], begins[part]]
            odd = [2**30, 0, 2**30, 2**30]
            filled = [[*column, *[other] * more] for column, other in zip(columns, odd, strict=True)]
            addresses = [device.upload(np.array(one, dtype=np.int32)) for one in filled]
            return Pieces(*addresses, count=len(filled[0]), rows=sum(lengths[part]))

        launcher = self.launcher(total)
        launcher(
            elements(device, x),
            buffer(device, floats) if self.controls and self._columns[1] else ABSENT,
            MixerWeights(
                small[Role.CONVOLUTION], small.get(Role.CONVOLUTION_BIAS, ABSENT),
                small.get(Role.TIME_STEP_BIAS, ABSENT), small.get(Role.DECAY, ABSENT),
                small.get(Role.SKIP, ABSENT), small.get(Role.MIXER_NORM, ABSENT),
            ),
            LayerStates(held["inputs"].address, held["matrix"].address if "matrix" in held else 0),
            StepPieces(pieces_of(slice(drawn, None)), pieces_of(slice(0, drawn), padding)),
            out,
        )  # fmt: skip
        device.synchronize()
        words = device.download(out.address, (total, width), np.uint16)
        after = {name: fetched(device, one) for name, one in held.items()}
        mine = np.zeros(total, dtype=bool)
        for n, length in enumerate(lengths):
            mine[starts[n] : starts[n] + length] = True
        strange = np.flatnonzero(~mine)
        poison = as_words(np.full((len(strange), width), np.nan), device.element)
        np.testing.assert_array_equal(words[strange], poison, "rows of nobody")
        for name, array in arrays.items():
            free = np.setdiff1d(np.arange(len(array)), order)
            np.testing.assert_array_equal(after[name][free], array[free], f"{name} of free slots")
        return Results(
            [words[starts[n] : starts[n] + length] for n, length in enumerate(lengths)],
            [{name: array[order[n]] for name, array in after.items()} for n in range(len(pieces))],
        )

    def check(self, prompts: Sequence[Piece], drawn: Sequence[Piece] = (), *, padding: int = 0) -> None:
        """Run them, and hold rows and states against the reference runner in float64."""
        actual = self.run(prompts, drawn, padding=padding)
        weights: Any = {role: array.astype(np.float64) for role, array in self.weights.items()}
        errors = []
        for n, piece in enumerate([*drawn, *prompts]):
            x = self._as_in_files(self.inputs(n, piece).astype(np.float64))
            state = {name: one.astype(np.float64)[None] for name, one in self.states(n, piece).items()}
            whole, token = [(slice(0, piece.length), 0)], np.zeros(1, dtype=np.intp)
            flow = (
                Flow([], [(token + at, token) for at in range(piece.length)])
                if n < len(drawn)
                else Flow(whole, [])
            )
            expected = mix(self.mixer, weights, x, state, flow)
            out = fetched_rows(actual.out[n], self.device)
            kind = f"{'drawn' if n < len(drawn) else 'prompt'} {n}: {piece}"
            errors.append((kind, "out", out, expected, ROUNDED_ONCE[self.device.element]))
            errors += [(kind, name, actual.states[n][name], one[0], STATE) for name, one in state.items()]
        wrong = []
        for kind, name, got, right, limit in errors:
            finite = np.isfinite(got)
            error = nmse(got, right) if finite.all() else np.inf
            if not error <= limit:
                wrong.append(f"{kind}, {name}: NMSE {error:.3g} > {limit:g}; {describe(got, right)}")
        assert not wrong, f"{self.mixer}\n" + "\n".join(wrong[:12])


def fetched_rows(words: Array, device: Device) -> Array:
    """Rows of words as numbers."""
    bits = words.astype(np.uint32) << 16
    return words.view(np.float16) if device.element.value == "f16" else bits.view(np.float32)


def describe(got: Array, right: Array) -> str:
    """Say where the numbers differ most."""
    off = np.abs(got.astype(np.float64) - right)
    off[~np.isfinite(got)] = np.inf
    far = off > 0.02 * np.abs(right).max()
    places = np.argwhere(far)
    text = f"{len(places)} of {got.size} are far off in {got.shape}"
    if len(places):
        text += f", within {places.min(0).tolist()} to {places.max(0).tolist()}"
        text += "".join(
            f"; {tuple(p.tolist())}: {got[tuple(p)]:.5g}, not {right[tuple(p)]:.5g}" for p in places[:3]
        )
    return text


def assert_same(one: Results, other: Results) -> None:
    """Equal to the bit."""
    for n, (left, right) in enumerate(zip(one.out, other.out, strict=True)):
        np.testing.assert_array_equal(left, right, f"rows of piece {n}")
    for n, (mine, its) in enumerate(zip(one.states, other.states, strict=True)):
        for name in mine:
            np.testing.assert_array_equal(mine[name], its[name], f"{name} of piece {n}")


def delta_net(
    key_heads: int,
    value_heads: int,
    key_dim: int = 128,
    value_dim: int = 128,
    kernel: int = 4,
    *,
    by_key_head: bool = False,
) -> GatedDeltaNet:
    """A mixer of those sizes."""
    return GatedDeltaNet(
        key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, kernel=kernel,
        norm=Norm(1e-6), by_key_head=by_key_head,
    )  # fmt: skip


def mamba(
    heads: int,
    head_dim: int = 64,
    groups: int = 1,
    state_size: int = 128,
    kernel: int = 4,
    *,
    bias: bool = True,
) -> Mamba2:
    """A mixer of those sizes."""
    return Mamba2(
        heads=heads, head_dim=head_dim, groups=groups, state_size=state_size, kernel=kernel,
        norm=Norm(1e-5), convolution_bias=bias,
    )  # fmt: skip
