"""Recurrences over prompts in chunks of 64 tokens: what is prepared, and how blocks share the columns."""

from dataclasses import dataclass

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.spec import GatedDeltaNet, Mamba2
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.states.operands import LayerStates, MixerWeights, Pieces

__all__ = ["DeltaChunks", "MambaChunks", "controls_of", "delta_sizes", "mamba_sizes"]

_TOKENS = 64  # of a chunk (`STATE_CHUNK`)
_TIMES = 4 * 4 * _TOKENS  # bytes of what a chunk's tokens keep, ...
_TRIANGLE = 2 * 2 * 10 * 16 * 16  # ... of a triangle of 64 x 64 in two parts, ...
_PRODUCTS = 4 * 10 * 16 * 16  # ... of one of floats, ...
_DIAGONAL = 4 * 4 * 16 * 17  # ... and of blocks that are inverted: see chunk.cuh and the kernels
_RECORD = 2 * _TRIANGLE + _TIMES
_TILE = 1024  # bytes that tiles of wgmma are aligned to
_VALUES = 4 * _TOKENS * 20 // 16  # bytes of a column's values in a chunk: see delta_hopper.cu
_NARROW = 32  # columns
_PREPARING = (256, 1, 1)  # threads
_MOST_PIECES = 64  # whose chunks are prepared at the same time


@dataclass(frozen=True, slots=True)
class _Width:
    """A kernel whose blocks have so many columns, of one head or several.

    stage  bytes of shared memory for a chunk; beside: for what chunks share
    """

    name: str
    columns: int
    threads: int
    stage: int
    beside: int = 0


class _Scan:
    """A file's kernels that go through chunks in order, by the columns that a block has.

    Columns know nothing of each other, so that bits do not depend on it.
    """

    def __init__(self, device: Device, kernels: KernelPairs, arguments: str, widths: list[_Width]) -> None:
        most = device.features.block_shared
        self._multiprocessors = device.multiprocessors
        self._kernels = []
        for width in widths:
            stages = min((most - width.beside) // width.stage, 2)
            if stages:
                shared = stages * width.stage + width.beside
                kernel = kernels.function(width.name, arguments, shared=shared).few
                self._kernels.append((width, kernel, stages, shared))
        if not self._kernels:
            least = min(width.stage + width.beside for width in widths)
            raise RunnerError(
                f"states of this model take {least:,} bytes of a GPU's shared memory and this one has "
                f"{most:,}; `--reference` generates without a GPU"
            )

    def __call__(self, columns: int, pieces: int, *arguments: int) -> None:
        """Queue it for so many columns of all heads together, and so many pieces.

        Takes the kernel with the most columns with which there is a block for each multiprocessor.
        """
        wide = (one for one in self._kernels if self._fills(one[0], columns, pieces))
        width, kernel, stages, shared = next(wide, self._kernels[-1])
        grid = columns // width.columns, pieces
        kernel(grid, (width.threads, 1, 1), *arguments, stages, shared=shared)

    def _fills(self, width: _Width, columns: int, pieces: int) -> bool:
        return columns // width.columns * pieces >= self._multiprocessors


def _widths(name: str, columns: int, stage: int, beside: int = 0) -> list[_Width]:
    """Blocks that have a head of so many columns, and, if that is more, a narrow part of one."""
    widths = [_Width(f"{name}_wide", columns, 32 * max(columns // 16, 4), stage, beside)]
    if columns % _NARROW == 0 and columns > _NARROW:
        widths.append(_Width(f"{name}_narrow", _NARROW, 128, stage, beside))
    return widths


class DeltaChunks:
    """Launches `delta_chunked.cu`, and what there is of `delta_hopper.cu`.

    records  the address of `bytes`
    """

    def __init__(self, device: Device, mixer: GatedDeltaNet, records: int) -> None:
        keys, values, self._mixer = mixer.key_dim, mixer.value_dim, mixer
        *on_hopper, source = self.sources(mixer, hopper=device.hopper)
        kernels = KernelPairs(device, source)
        self._shared = _operands(keys) + _RECORD + _DIAGONAL
        self._prepare = kernels.function("delta_prepare", "PiPPPPiPPPPPPPiii", shared=self._shared).few
        widths = _widths("delta_scan", values, _operands(keys) + _RECORD)
        if on_hopper:
            stage = -(-(_parts_of(keys) + _RECORD) // _TILE) * _TILE
            widths = [
                _Width(name, columns, 2 * columns, stage, columns * _VALUES)
                for name, columns in (("delta_hopper_wide", 128), ("delta_hopper_narrow", 64))
                if columns <= values
            ]
            kernels = KernelPairs(device, *on_hopper)
        self._scan = _Scan(device, kernels, "PPPPPPPiii", widths)
        self._records = records

    @staticmethod
    def sources(mixer: GatedDeltaNet, *, hopper: bool) -> list[Source]:
        """List the kernel files for a mixer: what Hopper has of its own, then what all have."""
        sizes = delta_sizes(mixer)
        own = hopper and {mixer.key_dim, mixer.value_dim} <= {64, 128}
        on_hopper = [source_of("delta_hopper", *sizes)] if own else []
        return [*on_hopper, source_of("delta_chunked", *sizes, f"-DTAPS={mixer.kernel}")]

    @staticmethod
    def least_shared(mixer: GatedDeltaNet) -> int:
        """Bytes of shared memory that a block needs where kernels are not those for Hopper."""
        return _operands(mixer.key_dim) + _RECORD + _DIAGONAL

    @staticmethod
    def bytes(rows: int, heads: int) -> int:
        """Memory for what is prepared of steps of up to so many rows."""
        return _most_chunks(rows) * heads * _RECORD

    def __call__(
        self, x: Buffer, controls: tuple[int, int], weights: MixerWeights, states: LayerStates, work: int,
        prompts: Pieces,
    ) -> None:  # fmt: skip
        """Queue it for rows x, and values that were convolved, in `work`, where results take their place.

        controls  address and stride of floats beside x
        """
        heads, key_heads = self._mixer.value_heads, self._mixer.key_heads
        for some in _parts(prompts):
            self._prepare(
                (some.rows // _TOKENS + some.count, key_heads), _PREPARING, x.address, x.shape[1],
                states.inputs, weights.convolution.address, work, *controls, weights.time_step_bias.address,
                weights.decay.address, self._records, *some.addresses, some.count, heads, key_heads,
                shared=self._shared,
            )  # fmt: skip
            self._scan(
                self._mixer.values, some.count, work, self._records, states.matrix, *some.addresses, heads,
                key_heads,
            )  # fmt: skip


class MambaChunks:
    """Launches `mamba_chunked.cu`, and what there is of `mamba_hopper.cu`.

    room  the address of `bytes` for steps of up to so many rows
    """

    def __init__(self, device: Device, mixer: Mamba2, room: int, rows: int) -> None:
        self._mixer, size, head_dim = mixer, mixer.state_size, mixer.head_dim
        *on_hopper, source = self.sources(mixer, hopper=device.hopper)
        kernels = KernelPairs(device, source)
        self._shared = _operands(size)
        self._prepare = kernels.function("mamba_prepare", "PPiPiPPPPPPPPiii", shared=self._shared).few
        pairs = head_dim <= 64 and mixer.heads // mixer.groups % 2 == 0  # a block may have two heads
        if on_hopper:
            kernels = KernelPairs(device, *on_hopper)
            wide = [("mamba_hopper_wide", 128)] if pairs or head_dim == 128 else []
            widths = []
            for name, columns in (*wide, ("mamba_hopper_narrow", 64)):
                heads = max(columns // head_dim, 1)
                stage = -(-(_parts_of(size) + _PRODUCTS + heads * _TIMES) // _TILE) * _TILE
                beside = heads * _TRIANGLE + columns * _VALUES
                widths.append(_Width(name, columns, 2 * columns, stage, beside))
        else:
            stage = _operands(size) + _PRODUCTS + _TIMES
            widths = _widths("mamba_scan", head_dim, stage, _TRIANGLE)
            if pairs:
                threads = 32 * max(head_dim // 8, 4)
                pair = _Width("mamba_scan_pair", 2 * head_dim, threads, stage + _TIMES, 2 * _TRIANGLE)
                widths.insert(0, pair)
        self._scan = _Scan(device, kernels, "PPPPPPPPPiii", widths)
        self._products, self._times = room, room + _most_chunks(rows) * mixer.groups * _PRODUCTS

    @staticmethod
    def sources(mixer: Mamba2, *, hopper: bool) -> list[Source]:
        """List the kernel files for a mixer: what Hopper has of its own, then what all have."""
        sizes = mamba_sizes(mixer)
        own = hopper and {mixer.state_size, mixer.head_dim} <= {64, 128}
        on_hopper = [source_of("mamba_hopper", *sizes)] if own else []
        return [*on_hopper, source_of("mamba_chunked", *sizes)]

    @staticmethod
    def least_shared(mixer: Mamba2) -> int:
        """Bytes of shared memory that a block needs where kernels are not those for Hopper."""
        return _operands(mixer.state_size) + _PRODUCTS + _TIMES + _TRIANGLE

    @staticmethod
    def bytes(rows: int, heads: int, groups: int) -> int:
        """Memory for what is prepared of steps of up to so many rows."""
        return _most_chunks(rows) * (groups * _PRODUCTS + heads * _TIMES)

    def __call__(
        self,
        work: int,
        steering: tuple[int, ...],
        weights: tuple[int, int, int],
        matrix: int,
        prompts: Pieces,
    ) -> None:
        """Queue it for what the convolution left in `work`, where results take the place of x.

        steering  addresses of elements and floats of controls, with their strides
        weights   addresses of biases of time steps, of decays and of skips
        """
        heads, groups, (biases, decays, skips) = self._mixer.heads, self._mixer.groups, weights
        prepared = self._products, self._times
        for some in _parts(prompts):
            self._prepare(
                (some.rows // _TOKENS + some.count, groups), _PREPARING, work, *steering, biases, decays,
                *prepared, *some.addresses, some.count, heads, groups, shared=self._shared,
            )  # fmt: skip
            self._scan(
                self._mixer.inner, some.count, work, *prepared, skips, matrix, *some.addresses, heads, groups
            )


def _parts(pieces: Pieces) -> list[Pieces]:
    """Pieces that are prepared at the same time."""
    starts = range(0, pieces.count, _MOST_PIECES)
    return [pieces.part(first, min(_MOST_PIECES, pieces.count - first)) for first in starts]


def _most_chunks(rows: int) -> int:
    """Numbers of chunks that are prepared at the same time (`record_of` in chunk.cuh)."""
    return rows // _TOKENS + _MOST_PIECES


def _operands(keys: int) -> int:
    """Bytes of keys and queries of a chunk, in padded rows."""
    return _parts_of(keys + 8)


def _parts_of(keys: int) -> int:
    """Bytes of keys and queries of a chunk, each in two parts of two bytes."""
    return 2 * 2 * 2 * _TOKENS * keys


def delta_sizes(mixer: GatedDeltaNet) -> tuple[str, ...]:
    """Options of files that are compiled for a mixer's heads."""
    sizes = {"KEY_DIM": mixer.key_dim, "VALUE_DIM": mixer.value_dim, "NEIGHBOURS": int(mixer.by_key_head)}
    return tuple(f"-D{name}={size}" for name, size in sizes.items())


def mamba_sizes(mixer: Mamba2) -> tuple[str, str]:
    """Options of files that are compiled for a mixer's heads."""
    return f"-DSTATE_SIZE={mixer.state_size}", f"-DHEAD_DIM={mixer.head_dim}"


def controls_of(controls: Buffer) -> tuple[int, int]:
    """Address and stride of a row's floats that steer heads; 0 where there are none."""
    return controls.address, controls.shape[1] if controls.address else 0
