"""The products of a step of a few sequences, fused with what is around them: launches `few_rows.cu`.

They give the bits of the kernels that serve larger steps.
"""

from collections.abc import Iterable
from dataclasses import replace

from nightmill.worker.model.spec import Attention, FeedForward, LatentAttention, LayerSpec, ModelSpec, Norm
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Function, Module
from nightmill.worker.runners.gpu.device.operands import FLOAT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, rotated, source_of
from nightmill.worker.runners.gpu.kinds import mixer_sizes
from nightmill.worker.runners.gpu.kv_cache import LayerCache
from nightmill.worker.runners.gpu.rows.rotation import KvWrite
from nightmill.worker.runners.gpu.shapes import first_sum
from nightmill.worker.runners.gpu.step_inputs import StepInputs
from nightmill.worker.runners.gpu.weights.layout import LayerWeights, NormWeight
from nightmill.worker.runners.kv_format import KvFormat

__all__ = ["MAX_ROWS", "FewRows"]

MAX_ROWS = 4  # tokens of a step; the kernels take 8, but each block norms all (H200: 8 took 1.3 ms, not 1.1)
_ROWS = 8  # of a weight in a block
_HEADS = (64, 128)  # sizes of theirs
_DEPTH = 32  # inputs come in multiples of it
_MOST_SHARED = {True: 226 << 10, False: 98 << 10}
"""Bytes of a block on Hopper, and on each other GPU, with 1 KiB for what kernels declare themselves."""
_SWIGLU_BLOCKS = 2  # of `few_swiglu` on a multiprocessor
_MAX_GROUPS = 8  # of such a block, a warp each
_IN_L2 = 32 << 20  # bytes of weights that are fetched ahead on Hopper, whose L2 has 50 MB
_HELD = (0, 1, 2, 4)  # kernels, by the parts of rows that a warp keeps in registers while it norms them
_BLOCK, _LARGE_BLOCK = (128, 1, 1), (256, 1, 1)


class FewRows:
    """The operations of steps of up to MAX_ROWS tokens, one a sequence, in layers of one kind.

    angles  the rotation table of layers whose attention is only rotated, which `qkv` does; None: `input`
            makes what another mixer reads
    """

    def __init__(self, device: Device, layer: LayerSpec, width: int, angles: Buffer | None) -> None:
        self._width, self._ffn = width, layer.feed_forward.width
        self._angles = angles
        self._two_sums = device.hopper
        rotates = angles is not None
        self._write = KvWrite(device, layer.attention) if rotates and device.kv is KvFormat.FP8 else None
        self._heads = (layer.attention.heads, layer.attention.kv_heads) if rotates else (0, 0)
        most = _MOST_SHARED[device.hopper]
        self.adds_down = _shared(self._ffn, _ROWS + MAX_ROWS) <= most
        """True if `residual` takes the product of the feed-forward network, too: its inputs fit a block."""
        self._groups = _groups(width, self._ffn, device.multiprocessors, most)
        module = Module.of(device, _source(layer if rotates else None))
        sizes = [_most_shared(layer, width), _swiglu_shared(width, self._groups, MAX_ROWS)]
        most = max(*sizes, _shared(self._ffn, _ROWS + MAX_ROWS) if self.adds_down else 0)

        def function(name: str, arguments: str) -> Function:
            return module.function(name, arguments, shared=most, dependent=True, all_shared=True)

        self._residual = function("few_residual", "PPPiiii")
        self._input = {held: function(f"few_input_{held}", "PPfPPiPPiiii") for held in _HELD}
        self._qkv = {held: function(f"few_qkv_{held}", "PPfPPPPPiPPPiiii") for held in _HELD}
        self._swiglu = {held: function(f"few_swiglu_{held}", "PPfPPiiiiPi") for held in _HELD}

    @staticmethod
    def suits(layer: LayerSpec, width: int, formats: Iterable[Format], *, hopper: bool) -> bool:
        """Return whether the kernels take a layer with all that is done to its heads.

        With weights that are elements, heads of 64 or 128, RMS norms before attention and SwiGLU and nowhere
        else, sizes in multiples of 32, and rows that fit a block: on Hopper those of nearly all models, on
        other GPUs up to a width of 2,400 or so.
        """
        heads = isinstance(layer.mixer, Attention) and layer.mixer.head_dim in _HEADS
        return heads and _is_plain(layer) and FewRows.suits_products(layer, width, formats, hopper=hopper)

    @staticmethod
    def suits_products(layer: LayerSpec, width: int, formats: Iterable[Format], *, hopper: bool) -> bool:
        """Return whether the kernels take the products of a layer, with norms, whatever mixes its tokens."""
        outputs, ffn = mixer_sizes(layer.mixer).outputs, layer.feed_forward.width
        return (
            all(format_.plain for format_ in formats)
            and _has_plain_products(layer)
            and not any(size % _DEPTH for size in (width, outputs, ffn))
            and (not hopper or first_sum(_ROWS, width) == width or not mixer_sizes(layer.mixer).controls)
            and _most_shared(layer, width) <= _MOST_SHARED[hopper]
            # Without `down` the kernels were not measured on Hopper.
            and (not hopper or _shared(ffn, _ROWS + MAX_ROWS) <= _MOST_SHARED[hopper])
        )

    @property
    def rotates(self) -> bool:
        """True if `qkv` does all that comes before attention."""
        return self._angles is not None

    @classmethod
    def sources(cls, spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model, if they take all of its layers."""
        formats, width = [Format.F16], spec.width
        if not all(cls.suits_products(layer, width, formats, hopper=hopper) for layer in spec.layers):
            return []
        whole = (cls.suits(layer, width, formats, hopper=hopper) for layer in spec.layers)
        each = zip(spec.layers, whole, strict=True)
        return list(dict.fromkeys(_source(layer if rotates else None) for layer, rotates in each))

    def qkv(
        self, x: Buffer, layer: LayerWeights, inputs: StepInputs, qkv: Buffer, cache: LayerCache, tokens: int
    ) -> None:
        """Norm, product, bias, rotation: queries to qkv, keys and values to the pages."""
        width, angles, norm = self._width, self._angles, layer.attn_norm
        assert angles is not None
        self._qkv[_held(width, tokens, _BLOCK[0])](
            (layer.qkv.rows // _ROWS, 1), _BLOCK, x.address, norm.weight.address, norm.eps,
            layer.qkv.address, layer.qkv_bias.address, inputs.positions, inputs.cache_rows, angles.address,
            angles.shape[0], qkv.address, cache.keys.address, cache.values.address, tokens, width,
            *self._heads, shared=_shared(width, _ROWS + tokens),
        )  # fmt: skip
        if self._write is not None:
            self._write(qkv, inputs.cache_rows, cache, tokens)

    def input(
        self,
        x: Buffer,
        norm: NormWeight,
        weight: Matrix,
        out: Buffer,
        other: Matrix,
        beside: Buffer,
        tokens: int,
    ) -> None:
        """Norm and product of x (T, width): -> out (T, rows of weight); of another matrix -> beside.

        other  may be NO_MATRIX; beside: elements or float
        """
        width = self._width
        self._input[_held(width, tokens, _BLOCK[0])](
            ((weight.rows + other.rows) // _ROWS, 1), _BLOCK, x.address, norm.weight.address, norm.eps,
            weight.address, out.address, weight.rows, other.address, beside.address, other.rows,
            beside.dtype == FLOAT, tokens, width, shared=_shared(width, _ROWS + tokens),
        )  # fmt: skip

    def residual(self, source: Buffer, weight: Matrix, x: Buffer, tokens: int) -> None:
        """x (T, width) += source (T, inputs) weight^T."""
        width, inputs = weight.rows, weight.columns
        self._residual(
            (-(-width // _ROWS), 1), _BLOCK, source.address, weight.address, x.address, tokens, width, inputs,
            first_sum(width, inputs) if self._two_sums else inputs, shared=_shared(inputs, _ROWS + tokens),
        )  # fmt: skip

    def swiglu(self, x: Buffer, layer: LayerWeights, out: Buffer, tokens: int) -> None:
        """Norm, gate and up, SwiGLU -> out (T, F); the weight of `down` comes to L2."""
        width, ffn, groups, norm, down = self._width, self._ffn, self._groups, layer.ffn_norm, layer.ffn_down
        block = _BLOCK if groups <= 4 else _LARGE_BLOCK
        self._swiglu[_held(width, tokens, block[0])](
            (-(-ffn // (_ROWS * groups)), 1), block, x.address, norm.weight.address, norm.eps,
            layer.gate_up.address, out.address, tokens, width, ffn, groups, down.address,
            min(down.bytes, _IN_L2), shared=_swiglu_shared(width, groups, tokens),
        )  # fmt: skip


def _is_plain(layer: LayerSpec) -> bool:
    """Return whether the kernels compute all of a layer: they know nothing of what is not copied here."""
    attention = layer.attention
    known = replace(attention, output_bias=False, qk_norm=None, temperature=None, gated=False)
    return attention == known and _has_plain_products(layer)


def _has_plain_products(layer: LayerSpec) -> bool:
    """The same of its norms and products."""
    before, after, mixer = layer.attention_norm, layer.feed_forward_norm, layer.mixer
    known = LayerSpec(
        attention_norm=None if before is None else Norm(before.eps),
        mixer=replace(mixer, output_bias=False) if isinstance(mixer, Attention) else mixer,
        feed_forward_norm=None if after is None else Norm(after.eps),
        feed_forward_norm_name=layer.feed_forward_norm_name,
        feed_forward=FeedForward(width=layer.feed_forward.width, fused=layer.feed_forward.fused),
    )
    both = mixer is not None and layer.feed_forward.width > 0
    known_mixer = both and not isinstance(mixer, LatentAttention)
    return known_mixer and before is not None and after is not None and layer == known


def _source(layer: LayerSpec | None) -> Source:
    """The file for a layer; None: for any whose heads it knows nothing of."""
    return source_of("few_rows", *(() if layer is None else rotated(layer.attention)))


def _held(width: int, tokens: int, threads: int) -> int:
    """The kernel for such rows: a part is 32 times 8 elements, where a row has at most 256 times as many."""
    chunks = width // 8
    parts = -(-tokens * -(-chunks // 32) // (threads // 32))
    return next((held for held in _HELD if held >= parts), 0) if chunks <= 256 else 0


def _groups(width: int, ffn: int, multiprocessors: int, most: int) -> int:
    """Groups of 8 outputs in a block of `few_swiglu`: so many that all blocks run at once, or 1.

    1 where they do not fit. Steps of 2 and 4 sequences of a 0.5B took 669 and 750 us with one group in a
    block, 632 and 722 with the 3 that this gives, 660 and 720 with 5, a block a multiprocessor (H200).
    """
    groups = -(-ffn // (_ROWS * _SWIGLU_BLOCKS * multiprocessors))
    fits = _SWIGLU_BLOCKS * _swiglu_shared(width, groups, MAX_ROWS) <= most
    return groups if fits and groups <= _MAX_GROUPS else 1


def _swiglu_shared(width: int, groups: int, tokens: int) -> int:
    """Bytes of shared memory for that many groups and tokens."""
    return _shared(width, 2 * _ROWS * groups + tokens)


def _shared(inputs: int, rows: int) -> int:
    """Bytes of shared memory for rows of a weight and of inputs, as `pitch_of` in few_rows.cu says."""
    return (inputs // 8 | 1) * 16 * rows


def _most_shared(layer: LayerSpec, width: int) -> int:
    """Bytes of shared memory of the largest kernel for a layer, with one group in a block of `few_swiglu`.

    Without the product of the feed-forward network, which `Product`s compute, too.
    """
    plain = (mixer_sizes(layer.mixer).outputs, width)
    return max(
        _swiglu_shared(width, 1, MAX_ROWS),
        *(_shared(size, _ROWS + MAX_ROWS) for size in plain),
    )
