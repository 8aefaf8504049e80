"""The products of a step of a few sequences, fused with what is around them: launches `cuda/few_rows.cu`.

They give the bits of the kernels that serve larger steps.
"""

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device import Device
from nightmill.worker.runners.gpu.functions import Function, Module
from nightmill.worker.runners.gpu.hopper import first_sum
from nightmill.worker.runners.gpu.kernels import Kernels
from nightmill.worker.runners.gpu.sources import TENSOR_CORE_HEADS, source_of
from nightmill.worker.runners.gpu.steps import StepInputs
from nightmill.worker.runners.gpu.weights import LayerWeights

__all__ = ["MAX_ROWS", "FewRows"]

MAX_ROWS = 4  # tokens of a step; the kernels take 8, but each block norms all (H200: 8 took 1.3 ms, not 1.1)
_ROWS = 8  # of a weight in a block
_DEPTH = 32  # inputs come in multiples of it
_MAX_SHARED = 226 << 10  # of a block on Hopper, with 1 KiB for what kernels declare themselves
_SWIGLU_BLOCKS = 2  # of `few_swiglu` on a multiprocessor
_MAX_GROUPS = 8  # of such a block, a warp each
_IN_L2 = 32 << 20  # bytes of weights that are fetched ahead; Hopper's L2 has 50 MB
_HELD = (0, 1, 2, 4)  # kernels, by the parts of rows that a warp keeps in registers while it norms them
_BLOCK, _LARGE_BLOCK = (128, 1, 1), (256, 1, 1)


class FewRows:
    """The operations of steps of up to MAX_ROWS tokens, one a sequence, on Hopper. Check `suits` first."""

    def __init__(self, device: Device, spec: ModelSpec, kernels: Kernels, *, max_context: int) -> None:
        self._spec, self._layer = spec, spec.layers[0]  # all are equal
        self._rope = (kernels.rope_table, max_context)
        self._groups = _groups(spec, device.multiprocessors)
        products = Module.of(device, source_of("few_rows", spec))
        most = max(_most_shared(spec), _swiglu_shared(spec, self._groups, MAX_ROWS))

        def function(name: str, arguments: str) -> Function:
            return products.function(name, arguments, shared=most, dependent=True, all_shared=True)

        self._residual = function("few_residual", "PPPiiii")
        self._qkv = {held: function(f"few_qkv_{held}", "PPfPPPPPiPPPiiii") for held in _HELD}
        self._swiglu = {held: function(f"few_swiglu_{held}", "PPfPPiiiiPi") for held in _HELD}

    @staticmethod
    def suits(spec: ModelSpec) -> bool:
        """Whether the kernels take a model: no QK norm, sizes in multiples of 32, rows that fit a block."""
        attention = spec.layers[0].attention
        sizes = (spec.width, attention.queries, spec.layers[0].feed_forward.width)
        return (
            attention.head_dim in TENSOR_CORE_HEADS
            and attention.qk_norm is None
            and not any(size % _DEPTH for size in sizes)
            and _most_shared(spec) <= _MAX_SHARED
        )

    def qkv(
        self, x: int, layer: LayerWeights, inputs: StepInputs, qkv: int, keys: int, values: int, tokens: int
    ) -> None:
        """Norm, product, bias, rotation: queries to qkv, keys and values to the pages."""
        spec = self._spec
        attention, eps = self._layer.attention, self._layer.attention_norm.eps
        blocks = attention.qkv // _ROWS
        self._qkv[_held(spec.width, tokens, _BLOCK[0])](
            (blocks, 1), _BLOCK, x, layer.attn_norm, eps, layer.qkv, layer.qkv_bias,
            inputs.positions, inputs.cache_rows, *self._rope, qkv, keys, values, tokens, spec.width,
            attention.heads, attention.kv_heads, shared=_shared(spec.width, _ROWS + tokens),
        )  # fmt: skip

    def residual(self, source: int, weight: int, x: int, tokens: int, inputs: int) -> None:
        """x (T, width) += source (T, inputs) weight^T."""
        width = self._spec.width
        self._residual(
            (-(-width // _ROWS), 1), _BLOCK, source, weight, x, tokens, width, inputs,
            first_sum(width, inputs), shared=_shared(inputs, _ROWS + tokens),
        )  # fmt: skip

    def swiglu(self, x: int, layer: LayerWeights, out: int, tokens: int) -> None:
        """Norm, gate and up, SwiGLU -> out (T, F) half; the weight of `down` comes to L2."""
        spec, groups = self._spec, self._groups
        ffn, eps = self._layer.feed_forward.width, self._layer.feed_forward_norm.eps
        block = _BLOCK if groups <= 4 else _LARGE_BLOCK
        self._swiglu[_held(spec.width, tokens, block[0])](
            (-(-ffn // (_ROWS * groups)), 1), block, x, layer.ffn_norm, eps,
            layer.gate_up, out, tokens, spec.width, ffn, groups, layer.ffn_down,
            min(2 * ffn * spec.width, _IN_L2),
            shared=_swiglu_shared(spec, groups, tokens),
        )  # fmt: skip


def _held(width: int, tokens: int, threads: int) -> int:
    """The kernel for such rows: a part is 32 times 8 elements, where a row has at most 256 times as many."""
    chunks = width // 8
    parts = -(-tokens * -(-chunks // 32) // (threads // 32))
    return next((held for held in _HELD if held >= parts), 0) if chunks <= 256 else 0


def _groups(spec: ModelSpec, multiprocessors: int) -> int:
    """Groups of 8 outputs in a block of `few_swiglu`: so many that all blocks run at once, or 1.

    1 where they do not fit. Steps of 2 and 4 sequences of a 0.5B took 669 and 750 us with one group in a
    block, 632 and 722 with the 3 that this gives, 660 and 720 with 5, a block a multiprocessor (H200).
    """
    ffn = spec.layers[0].feed_forward.width
    groups = -(-ffn // (_ROWS * _SWIGLU_BLOCKS * multiprocessors))
    fits = _SWIGLU_BLOCKS * _swiglu_shared(spec, groups, MAX_ROWS) <= _MAX_SHARED
    return groups if fits and groups <= _MAX_GROUPS else 1


def _swiglu_shared(spec: ModelSpec, groups: int, tokens: int) -> int:
    """Bytes of shared memory for that many groups and tokens."""
    return _shared(spec.width, 2 * _ROWS * groups + tokens)


def _shared(inputs: int, rows: int) -> int:
    """Bytes of shared memory for rows of a weight and of inputs, as `pitch_of` in few_rows.cu says."""
    return (inputs // 8 | 1) * 16 * rows


def _most_shared(spec: ModelSpec) -> int:
    """Of all kernels for a model, with one group in a block of `few_swiglu`."""
    layer = spec.layers[0]
    plain = (layer.attention.queries, layer.feed_forward.width)
    return max(
        _swiglu_shared(spec, 1, MAX_ROWS),
        *(_shared(size, _ROWS + MAX_ROWS) for size in plain),
    )
