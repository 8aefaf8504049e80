"""Prefill attention with heads of 512, and of latents, on Hopper."""

from nightmill.worker.model.spec import Attention, ModelSpec
from nightmill.worker.runners.base import IntArray
from nightmill.worker.runners.gpu.attention.scores import score_arguments, scoring
from nightmill.worker.runners.gpu.attention.tiles import prefill_tiles
from nightmill.worker.runners.gpu.attention.wide import VALUES, WideDecode, heads_of_a_tile
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Module
from nightmill.worker.runners.gpu.device.operands import ABSENT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.device.tensor_maps import TensorMaps
from nightmill.worker.runners.gpu.kv_cache import PAGE, LayerCache
from nightmill.worker.runners.gpu.shapes import padded_rows
from nightmill.worker.runners.gpu.step_inputs import PromptGroup, StepInputs, StepShape

__all__ = ["HopperWide"]

_ROWS, _KEYS = 64, 64
_KEPT = 576  # elements of latents that a block has room for
_BLOCK = (512, 1, 1)


class HopperWide:
    """Launches `hopper_wide.cu`; the methods are those of `HopperPrefill`.

    value_dim  as for `WideDecode`
    """

    def __init__(self, device: Device, attention: Attention, value_dim: int | None = None) -> None:
        self._heads, self._kv_heads, self._head = attention.heads, attention.kv_heads, attention.head_dim
        self._all_heads = self._heads + (2 * self._kv_heads if value_dim is None else 0)  # in queries
        self._group = heads_of_a_tile(attention, _ROWS)
        self._scale = score_arguments(attention)[0]
        self._maps = TensorMaps(device)
        self._shared = 2 * (_ROWS + 2 * _KEYS) * self._head + 2 * _ROWS * _KEYS + 1024
        module = Module.of(device, self.source(attention, value_dim))
        arguments = "128s128s128sPiPPPPiiif"
        self._kernel = module.function("hopper_wide", arguments, shared=self._shared, dependent=True)

    @staticmethod
    def suits(attention: Attention, value_dim: int | None = None, *, hopper: bool) -> bool:
        """Return whether the kernel takes a layer's attention."""
        sizes = VALUES if value_dim is None else _KEPT, VALUES
        fits = (attention.head_dim, attention.head_dim if value_dim is None else value_dim) == sizes
        return hopper and fits and (value_dim is not None or WideDecode.suits(attention))

    @staticmethod
    def source(attention: Attention, value_dim: int | None = None) -> Source:
        """The kernel file."""
        return scoring("hopper_wide", attention, value_dim)

    @classmethod
    def sources(cls, spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model, but those of latents."""
        return [cls.source(one) for one in spec.attentions if cls.suits(one, hopper=hopper)]

    def reserve(self, *, slots: int, max_context: int, max_tokens: int, depth: int) -> None:
        """Nothing: it reads pages as they are."""

    def stage(
        self, turn: int, page_tables: IntArray, sequence_starts: IntArray, context_lengths: IntArray,
        drawn: int,
    ) -> tuple[IntArray, tuple[PromptGroup, ...]]:  # fmt: skip
        return prefill_tiles(sequence_starts, self._group, context_lengths, _ROWS, drawn), ()

    def __call__(
        self, queries: Buffer, cache: LayerCache, inputs: StepInputs, shape: StepShape, out: Buffer,
        sinks: Buffer = ABSENT,
    ) -> None:  # fmt: skip
        """Queue attention of the chunks in the step's tiles, as `WidePrefill` does.

        Rows of queries are read up to `padded_rows(T)`.
        """
        assert sinks is ABSENT
        heads, head, group = self._heads, self._head, self._group
        of_queries = self._maps.of_three(
            queries.address, (padded_rows(shape.tokens), self._all_heads, head), (_ROWS // group, group)
        )
        rows = cache.pages * self._kv_heads * PAGE
        keys, values = (self._maps(one.address, rows, head, PAGE) for one in (cache.keys, cache.values))
        self._kernel(
            (heads // group, shape.tiles, 1), _BLOCK, of_queries, keys, values, inputs.page_tables,
            inputs.table_width, inputs.context_lengths, inputs.sequence_starts, inputs.tiles, out.address,
            heads, self._kv_heads, group, self._scale, shared=self._shared,
        )  # fmt: skip
