"""Launchers of the kernels in `cuda/`: one method a kernel, sizes checked, queued on the device's stream.

Pointers are device addresses. No method but the constructor and `set_rope` allocates, waits, or looks at the
device's data, and launch shapes hang on the arguments alone: all can be captured in a CUDA graph, which then
serves whatever the arrays hold. Shapes and layouts of the arrays are told at the top of each `.cu` file. T is
the number of tokens, S of sequences, R of rows that draw, H and G of query and KV heads, D a head's size.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.compiler import compile_all
from nightmill.worker.runners.gpu.decode import NO_PIECES, DecodeAttention
from nightmill.worker.runners.gpu.device import Device
from nightmill.worker.runners.gpu.functions import KernelPair, Module
from nightmill.worker.runners.gpu.hopper import is_hopper
from nightmill.worker.runners.gpu.prefill import TILE_ROWS, HopperPrefill, prefill_tiles
from nightmill.worker.runners.gpu.sizes import check_sizes
from nightmill.worker.runners.gpu.sources import TENSOR_CORE_HEADS, source_of

__all__ = ["Kernels", "Slots"]

IntArray = npt.NDArray[np.int32]

_BLOCK = (256, 1, 1)
_SAMPLE_BLOCKS = 4  # blocks of `sample` that a multiprocessor holds
_BEST_BYTES = 12
_LOG2_E = 1.4426950408889634


class Slots(Protocol):
    """Addresses of the per-slot arrays that sampling reads and writes, and the words of a row of `seen`."""

    temperature: int
    top_k: int
    top_p: int
    min_p: int
    penalty: int
    seeds: int
    last_token: int
    seen: int
    words: int


class Kernels:
    """All kernels but dequantisation and products, for one model.

    max_context      tokens a sequence may have: rows of the rotation table, and room for split attention
    max_sample_rows  most rows of one call of `sample`
    portable         only kernels that run on every GPU, on Hopper too

    Everything that the kernels need of device memory is allocated here. Raises RunnerError where the model
    has sizes that the kernels do not take: widths and FFN widths are multiples of 8, head sizes of 4 up to
    512 (above 128: of 16), at most 128 query heads share a KV head. Heads of 64 and 128 have fast attention.
    """

    def __init__(
        self, device: Device, spec: ModelSpec, *, max_context: int, max_sample_rows: int = 512,
        portable: bool = False,
    ) -> None:  # fmt: skip
        check_sizes(spec)
        self._device = device
        self._spec = spec
        self._attention = attention = spec.layers[0].attention  # of all layers
        self._group = attention.heads // attention.kv_heads
        self._max_context = max_context
        self._max_sample_rows = max_sample_rows
        self._fast = attention.head_dim in TENSOR_CORE_HEADS
        self._hopper = is_hopper(device) and not portable
        self._hopper_prefill: HopperPrefill | None = None
        self._scale = attention.head_dim**-0.5 * _LOG2_E
        self._load()
        self._rope_table = device.allocate(max_context * attention.head_dim * 4, "the rotation table")
        self._sample_blocks = _SAMPLE_BLOCKS * device.multiprocessors
        # A call has at most max(R, _sample_blocks + R) blocks.
        partial = _BEST_BYTES * (max_sample_rows + self._sample_blocks)
        self._partial_best = device.allocate(partial, "sampling")
        self._sample_counters = device.allocate(4 * max_sample_rows, "sampling")
        device.fill(self._sample_counters, 0, 4 * max_sample_rows)

    @staticmethod
    def files(spec: ModelSpec, *, hopper: bool) -> list[str]:
        """Those in `cuda/` that the kernels are in."""
        prefill = "hopper_attention" if hopper else "prefill_attention"
        fast = spec.layers[0].attention.head_dim in TENSOR_CORE_HEADS
        attention = ["decode_attention", "split_attention", prefill] if fast else ["attention_any"]
        return ["embedding", "rms_norm", "swiglu", "qkv_rope", *attention, "sample", "sample_filtered"]

    def _load(self) -> None:
        spec, attention = self._spec, self._attention
        prefill = "hopper_attention" if self._hopper else "prefill_attention"
        names = self.files(spec, hopper=self._hopper)
        cubins = compile_all([source_of(name, spec) for name in names], self._device.architecture)
        few, many = (
            {name: Module(self._device, cubin, name) for name, cubin in zip(names, cubins, strict=True)}
            for _ in range(2)
        )

        def function(module: str, name: str, arguments: str, shared: int = 0, cluster: int = 1) -> KernelPair:
            return KernelPair(
                *(
                    modules[module].function(
                        name,
                        arguments,
                        shared=shared,
                        dependent=module != "attention_any" and name != "rope_table",
                        all_shared=modules is few,
                        cluster=cluster,
                    )
                    for modules in (few, many)
                )
            )

        self._embed = function("embedding", "embed", "PPPiii")
        self._gather_tokens = function("embedding", "gather_tokens", "PPPPi")
        self._gather_rows = function("embedding", "gather_rows", "PPPii")
        self._norms = {n: function("rms_norm", f"rms_norm_{n}", "PPPif") for n in (1, 2, 4)}
        self._swiglu = function("swiglu", "swiglu", "PPii")
        self._qkv_rope = function("qkv_rope", "qkv_rope_write", "PPPPfPPPiPPiii")
        self._fill_rope_table = function("qkv_rope", "rope_table", "PdPi")
        slots = "PPPPPPPPi"
        self._sample = function("sample", "sample", "PiPPP" + slots + "PPP")
        self._sample_filtered = function("sample_filtered", "sample_filtered", "PiPPP" + slots + "Pi")
        if self._fast:
            self._decode = DecodeAttention(
                self._device, spec, function, max_context=self._max_context, clusters=self._hopper
            )
            self._prefill_threads = 256 if attention.head_dim == 128 else 128
            self._prefill_shared = 4 * 64 * attention.head_dim * 2
            if self._hopper:
                shared = HopperPrefill.shared(spec)
                self._hopper_prefill = HopperPrefill(
                    self._device, spec, function(prefill, prefill, HopperPrefill.ARGUMENTS, shared).many
                )
            else:
                self._prefill = function(prefill, prefill, "PPPPiPPPPiif", self._prefill_shared)
        else:
            self._prefill_threads, self._prefill_shared = 128, 0
            self._decode_any = function("attention_any", "decode_attention_any", "PPPPiPPPPiif")
            self._prefill = function("attention_any", "prefill_attention_any", "PPPPiPPPPiif")

    @property
    def rope_table(self) -> int:
        """Address of cosines and sines, float (max_context, D / 2, 2)."""
        return self._rope_table

    def set_rope(self, frequencies: npt.NDArray[np.float64], magnitude: float) -> None:
        """Fill the rotation table: radians per position (D / 2,), and what multiplies cosine and sine."""
        half = self._attention.head_dim // 2
        if frequencies.shape != (half,):
            raise RunnerError(f"{half} rotation frequencies were expected, not {frequencies.shape}")
        address = self._device.upload(frequencies.astype(np.float64), "rotation frequencies")
        grid = (_blocks(self._max_context * half), 1, 1)
        self._fill_rope_table.many(grid, _BLOCK, address, magnitude, self._rope_table, self._max_context)
        self._device.synchronize()
        self._device.free(address)

    def prefill_tiles(
        self, sequence_starts: IntArray, context_lengths: IntArray | None = None, drawn: int = 0
    ) -> IntArray:
        """`prefill_tiles` for this model, on the host."""
        rows = TILE_ROWS if self._hopper_prefill is None else HopperPrefill.ROWS
        return prefill_tiles(sequence_starts, self._group, context_lengths, rows, drawn)

    def embed(self, tokens: int, table: int, out: int, count: int) -> None:
        """Rows of the embedding table (V, width) half for tokens (T,) -> out (T, width) float."""
        width = self._spec.width
        grid = (_blocks(count * width // 8), 1, 1)
        _launch(count, self._embed, grid, _BLOCK, tokens, table, out, count, width, self._spec.vocab)

    def gather_tokens(self, tokens: int, slot_of_token: int, last_token: int, out: int, count: int) -> None:
        """out[i] = tokens[i], or the token last drawn in slot slot_of_token[i] where that is negative."""
        grid = (_blocks(count), 1, 1)
        _launch(count, self._gather_tokens, grid, _BLOCK, tokens, slot_of_token, last_token, out, count)

    def gather_rows(self, x: int, rows: int, out: int, count: int, width: int, itemsize: int = 4) -> None:
        """out[r] = x[rows[r]] for rows of `width` items; zeros where rows[r] is negative."""
        if width * itemsize % 16:
            raise RunnerError(f"rows of {width} items of {itemsize} bytes are not a multiple of 16 bytes")
        chunks = width * itemsize // 16
        _launch(
            count, self._gather_rows, (_blocks(count * chunks), 1, 1), _BLOCK, x, rows, out, count, chunks
        )

    def rms_norm(self, x: int, weight: int, out: int, count: int, width: int, eps: float) -> None:
        """out (T, width) half = norm of x (T, width) float."""
        pieces, block = _norm_shape(width)
        _launch(count, self._norms[pieces], (count, 1, 1), block, x, weight, out, width, eps)

    def qkv_rope_write(
        self, qkv: int, bias: int, q_norm: int, k_norm: int, positions: int, cache_rows: int,
        k_cache: int, v_cache: int, count: int,
    ) -> None:  # fmt: skip
        """Bias, QK norm and rotation of qkv (T, (H + 2 G) D); queries in place, keys and values to the cache.

        bias, q_norm and k_norm are 0 where the model has none.
        """
        attention = self._attention
        vector = 8 if attention.head_dim % 16 == 0 else 2
        lanes = 1 << (attention.head_dim // (2 * vector) - 1).bit_length()
        grid = (_blocks(count * (attention.heads + 2 * attention.kv_heads) * lanes), 1, 1)
        eps = 0.0 if attention.qk_norm is None else attention.qk_norm.eps
        _launch(
            count, self._qkv_rope, grid, _BLOCK, qkv, bias, q_norm, k_norm, eps, positions,
            cache_rows, self._rope_table, self._max_context, k_cache, v_cache, count, attention.heads,
            attention.kv_heads,
        )  # fmt: skip

    def decode_pieces(self, lengths: IntArray, sequences: IntArray) -> IntArray:
        """What `decode_attention` is to be given as pieces, on the host; none where it had better be without.

        lengths    (S,) tokens of contexts
        sequences  (S,) which of the step's they are
        """
        return self._decode.pieces(lengths, sequences) if self._fast else NO_PIECES

    def piece_room(self, sequences: int, pieces: int) -> int:
        """The number that so many pieces are padded to: one of `piece_rooms`."""
        return self._decode.room(sequences, pieces) if pieces else 0

    def piece_rooms(self, sequences: int) -> list[int]:
        """All numbers that the pieces of so many contexts are padded to, few; 0: without pieces."""
        return self._decode.rooms(sequences) if self._fast else [0]

    def most_pieces(self, sequences: int) -> int:
        """The most pieces that there are of so many contexts, padded."""
        return self._decode.most_pieces(sequences) if self._fast else 0

    def decode_attention(
        self, qkv: int, k_cache: int, v_cache: int, block_tables: int, context_lengths: int, out: int,
        count: int, table_stride: int, sequence_starts: int = 0, sequences: int = 0, pieces: int = 0,
        piece_count: int = 0, apart: bool = False,
    ) -> None:  # fmt: skip
        """Attention of S sequences with one token each -> out (T, H D) half.

        sequence_starts  0: sequence s has row s of qkv and out; else its row is sequence_starts[s + 1] - 1
        sequences        without pieces: 0: sequences 0 .. S - 1; else (S,) which ones, negative: none
        pieces           (piece_count, 4) as from `decode_pieces`, or with more pieces of sequence -1

        apart            the step writes more of a context than its last token: fetch nothing ahead of that

        The result is the same to the bit, however contexts are shared out.
        """
        inputs = (qkv, k_cache, v_cache, block_tables, table_stride)
        if self._fast and piece_count:
            self._decode.in_pieces(
                inputs, sequence_starts, pieces, piece_count, out, count, self._scale, apart
            )
        elif self._fast and count:
            self._decode.split(
                inputs, context_lengths, sequence_starts, sequences, out, count, self._scale, apart
            )
        elif not self._fast:
            attention = self._attention
            _launch(
                count, self._decode_any, (attention.heads, count, 1), (32, 1, 1), *inputs, context_lengths,
                sequence_starts, sequences, out, attention.heads, attention.kv_heads, self._scale,
            )  # fmt: skip

    def prefill_attention(
        self, qkv: int, k_cache: int, v_cache: int, block_tables: int, sequence_starts: int,
        context_lengths: int, out: int, tiles: int, tile_count: int, table_stride: int, *, rows: int,
        pages: int,
    ) -> None:  # fmt: skip
        """Causal attention of the chunks in `tiles` (n, 2), from `prefill_tiles` -> out (T, H D) half.

        rows   of qkv that may be read, at least T and of few different numbers
        pages  of the caches
        """
        if self._hopper_prefill is not None:
            if tile_count:
                self._hopper_prefill.run(
                    qkv, k_cache, v_cache, block_tables, sequence_starts, context_lengths, out, tiles,
                    tile_count, table_stride, self._scale, rows, pages,
                )  # fmt: skip
            return
        attention = self._attention
        grid = (attention.kv_heads if self._fast else attention.heads, tile_count, 1)
        _launch(
            tile_count, self._prefill, grid, (self._prefill_threads, 1, 1), qkv, k_cache, v_cache,
            block_tables, table_stride, context_lengths, sequence_starts, tiles, out, attention.heads,
            attention.kv_heads, self._scale, shared=self._prefill_shared,
        )  # fmt: skip

    def swiglu(self, gate_up: int, out: int, count: int, ffn_width: int) -> None:
        """silu(gate) * up of gate_up (T, 2 F) half -> out (T, F) half."""
        if ffn_width % 8:
            raise RunnerError(f"an FFN width of {ffn_width} is not a multiple of 8")
        grid = (_blocks(count * ffn_width // 8), 1, 1)
        _launch(count, self._swiglu, grid, _BLOCK, gate_up, out, count, ffn_width)

    def sample(
        self, logits: int, count: int, sample_slots: int, sample_rows: int, positions: int, slots: Slots,
        out_tokens: int, *, filtered: bool = True,
    ) -> None:  # fmt: skip
        """Draw a token for each row of logits (R, V) float, as `worker.runners.sampling` defines it.

        logits        rows have room for a multiple of 8
        sample_slots  (R,) int32, negative: the row is skipped
        sample_rows   (R,) indices into `positions` of the rows' last tokens; the token drawn is the one after
        out_tokens    (R,) int32; the slots' last_token is set too, and with a penalty the bit in `seen`;
                      NOT_A_NUMBER where the logits are none, and 0 in last_token
        filtered      False promises that no row has top-k, top-p, min-p or a temperature under 0.01
        """
        if count > self._max_sample_rows:
            raise RunnerError(f"{count} rows to sample at once, but room for {self._max_sample_rows}")
        if not count:
            return
        vocab = self._spec.vocab
        state = (
            slots.temperature, slots.top_k, slots.top_p, slots.min_p, slots.penalty, slots.seeds,
            slots.last_token, slots.seen, slots.words,
        )  # fmt: skip
        inputs = (logits, vocab, sample_slots, sample_rows, positions, *state)
        # A block has 512 threads of 4 tokens: more blocks than that have nothing to do.
        blocks = min(-(-self._sample_blocks // count), -(-vocab // 2048))
        self._sample.of(count)(
            (blocks, count, 1), (512, 1, 1), *inputs, self._partial_best, self._sample_counters, out_tokens,
        )  # fmt: skip
        if filtered:
            grid = (min(count, self._device.multiprocessors), 1, 1)  # each at most 1,024 rows
            self._sample_filtered.of(count)(grid, (1024, 1, 1), *inputs, out_tokens, count)


def _blocks(threads: int) -> int:
    return -(-threads // _BLOCK[0])


def _norm_shape(width: int) -> tuple[int, tuple[int, int, int]]:
    """Pieces of 8 values a thread, and the block."""
    if width % 8 or width > 32768:
        raise RunnerError(f"rows of {width} values: multiples of 8 up to 32768 are supported")
    chunks = width // 8
    pieces = 1 if chunks <= 256 else 2 if chunks <= 512 else 4
    return pieces, (-(-chunks // (32 * pieces)) * 32, 1, 1)


def _launch(count: int, kernel: KernelPair, *arguments: Any, shared: int = 0) -> None:
    if count:
        kernel.of(count)(*arguments, shared=shared)
