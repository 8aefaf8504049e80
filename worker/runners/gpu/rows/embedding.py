"""Rows of the embedding table, and rows picked from other arrays."""

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPair, KernelPairs, blocks_for
from nightmill.worker.runners.gpu.device.operands import ABSENT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, source_of

__all__ = ["Embedding"]

_BLOCK = (256, 1, 1)


class Embedding:
    """Launches `embedding.cu`; `scale`: what embeddings are multiplied by."""

    def __init__(self, device: Device, vocab: int, scale: float = 1.0) -> None:
        self._vocab = vocab
        self._scale = scale
        self._kernels = kernels = KernelPairs(device, source_of("embedding"))
        self._embed: dict[Format, KernelPair] = {}
        self._gather_rows = kernels.function("gather_rows", "PPPii")
        self._add = kernels.function("add_embeddings", "PPPPiii")

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [source_of("embedding")]

    def embed(self, tokens: Buffer, table: Matrix, out: Buffer, rows: int) -> None:
        """The table's rows (vocab, width) for tokens (rows,) -> out (rows, width) float."""
        if rows:
            width = table.columns
            self._of(table.format).of(rows)(
                blocks_for(rows * width // 8), _BLOCK, tokens.address, table.address, out.address, rows,
                width, self._vocab, self._scale,
            )  # fmt: skip

    def add(self, positions: int, table: Buffer, row: Buffer, x: Buffer, rows: int) -> None:
        """x (rows, width) float += table[positions] + row, floats.

        positions  address of those of the rows, int32
        table      (places, width), or ABSENT
        row        (1 or more, width), of which the first is taken, or ABSENT
        """
        if rows:
            width, places = x.shape[1], 0 if table is ABSENT else table.shape[0]
            self._add.of(rows)(
                blocks_for(rows * width // 8), _BLOCK, positions, table.address, row.address, x.address, rows,
                width, places,
            )  # fmt: skip

    def _of(self, format_: Format) -> KernelPair:
        """The kernel for tables of a format."""
        if format_ not in self._embed:
            name = f"embed_{format_.name}" if format_.packed else "embed"
            self._embed[format_] = self._kernels.function(name, "PPPiiif")
        return self._embed[format_]

    def gather_rows(self, x: Buffer, indices: int, out: Buffer, rows: int) -> None:
        """out[r] = x[indices[r]], rows of a multiple of 16 bytes; zeros where indices[r] is negative."""
        if rows:
            chunks = x.shape[1] * x.dtype.itemsize // 16
            grid = blocks_for(rows * chunks)
            self._gather_rows.of(rows)(grid, _BLOCK, x.address, indices, out.address, rows, chunks)
