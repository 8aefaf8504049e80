"""The activations of a step: which buffers there are, how large, and which share memory."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from nightmill.worker.model.spec import NO_FEED_FORWARD, Experts, LayerSpec, ModelSpec
from nightmill.worker.runners.base import FOUND
from nightmill.worker.runners.gpu.attention.latent_rows import LatentRoom
from nightmill.worker.runners.gpu.device.arena import Arena, aligned
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import BYTE, ELEMENT, FLOAT, INT, Buffer
from nightmill.worker.runners.gpu.experts.room import ExpertRoom
from nightmill.worker.runners.gpu.kinds import kinds_of, mixer_sizes
from nightmill.worker.runners.gpu.precision import HALF, Precision
from nightmill.worker.runners.gpu.products.formats import ModelFormats
from nightmill.worker.runners.gpu.rows.norms import only_rms_norms
from nightmill.worker.runners.gpu.shapes import Kind, padded_rows
from nightmill.worker.runners.gpu.states.choice import StateMixers
from nightmill.worker.runners.gpu.weights.layout import padded_vocab

__all__ = ["LOGIT_ROWS", "Activations", "most_draws"]

LOGIT_ROWS = 512  # rows of logits computed and sampled at once

_GIVEN_ROWS = 32  # beside the draws of all slots: 20 MB of logits for a vocabulary of 152,000

_POOLED_ROWS = 1024  # the same where whole prompts are pooled, which takes no logits


def most_draws(slots: int, prompt_grid: int = 1, *, pools: bool = False) -> int:
    """Tokens that a step may draw, or tell the log-probability of, if so many sequences run at once.

    prompt_grid  pieces of prompts, each token of which may be asked about, are at least so long; of encoders
                 all tokens of a step, since texts are not divided
    pools        embeddings of the model are made of all tokens of their texts
    """
    return slots + max(_POOLED_ROWS if pools else _GIVEN_ROWS, prompt_grid)


class _Array(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    scaled: bool = False

    @property
    def bytes(self) -> int:
        """Bytes, with a scale for each row behind those of one byte a number (`Buffer.scales`)."""
        scales = self.shape[0] * FLOAT.itemsize if self.scaled else 0
        return math.prod(self.shape) * self.dtype.itemsize + scales

    def at(self, address: int) -> Buffer:
        scales = address + math.prod(self.shape) if self.scaled else 0
        return Buffer(address, self.shape, self.dtype, scales)


_SHARED = {
    "entering": "normed",  # the head's rows are normed when the layers are done
    "mixed_drawing": "qkv",  # gathered when attention is done with queries
    "no_rows": "tokens",  # for products that are timed before there are tokens
    "made": "mixed",  # read before attention gives anything
}
"""Buffers in the memory of another, whose contents are of no use any more when theirs are written."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Buffers for a step's tokens, and for the rows of it that draw, rounded up to `padded_rows`."""

    tokens: Buffer  # int32: ids, those drawn last filled in
    no_rows: Buffer  # int32: -1s, which stand for positions and cache rows while products are timed
    x: Buffer  # the residual stream, float
    normed: Buffer  # what enters the head, elements
    entering: Buffer  # what enters a layer, normed: elements, or what its products read if its norms round
    qkv: Buffer  # elements, also of what another mixer makes of its input
    made: Buffer  # of queries, keys and values what a product gives, if that is not all, elements
    mixed: Buffer  # what a mixer gives, elements
    gate_up: Buffer  # elements; without a gate as wide as `activated`
    activated: Buffer  # elements
    x_drawing: Buffer  # of the residual stream, the rows that draw
    mixed_drawing: Buffer  # of what a mixer gives, the rows that draw
    logits: Buffer  # float, LOGIT_ROWS of them
    drawn: Buffer  # int32: tokens drawn
    found: Buffer  # FOUND, as bytes: their log-probabilities
    # No rows where no layer needs them:
    statistics: Buffer  # of whole rows of queries and keys, float (rows, 2, 2)
    added: Buffer  # what a product gives where more than its sum with x is to be made of that, float
    quantised: Buffer  # what enters a product with rounded weights, if it was elements
    gates: Buffer  # of attention, elements
    controls: Buffer  # of mixers with states, float
    inputs: Buffer  # of layers for the token itself, those of all layers in a row, elements
    input_gate: Buffer  # and what a layer multiplies with its own, elements
    work: Buffer  # what kernels of such mixers hand on among them, bytes
    expert_work: Buffer  # what those of experts do (`experts/room.py`), bytes

    @classmethod
    def allocate(
        cls, device: Device, spec: ModelSpec, precision: Precision = HALF, *, max_tokens: int, max_draws: int
    ) -> "Activations":
        """Take the memory for steps of up to `max_tokens` tokens, of which `max_draws` may draw."""
        arrays = _arrays(spec, precision, max_tokens, max_draws)
        arena = Arena(device, _bytes(arrays), "the workspace")
        own = {name: arena.take(array.bytes) for name, array in arrays.items() if name not in _SHARED}
        return cls(**{name: array.at(own[_SHARED.get(name, name)]) for name, array in arrays.items()})

    def of(self, layer: LayerSpec) -> "Activations":
        """Return the same memory with rows as wide as that layer's."""
        changed: dict[str, Buffer] = {}
        for name, width in _widths(layer).items():
            buffer: Buffer = getattr(self, name)
            changed[name] = replace(buffer, shape=(buffer.shape[0], width))
        return replace(self, **changed)

    @staticmethod
    def workspace(spec: ModelSpec, precision: Precision = HALF, *, max_tokens: int, max_draws: int) -> int:
        """Bytes that they take."""
        return _bytes(_arrays(spec, precision, max_tokens, max_draws))


def _widths(layer: LayerSpec) -> dict[str, int]:
    """Return the widths of the buffers that are as wide as a layer needs."""
    network = layer.feed_forward
    dense = network.shared or NO_FEED_FORWARD if isinstance(network, Experts) else network
    ffn = dense.width
    inner = 2 * ffn if dense.gated else ffn
    sizes = mixer_sizes(layer.mixer)
    return {
        "qkv": sizes.inputs, "made": sizes.made, "mixed": sizes.outputs, "mixed_drawing": sizes.outputs,
        "gates": sizes.gates,
        "controls": sizes.controls, "gate_up": inner, "activated": ffn,
    }  # fmt: skip


def _arrays(spec: ModelSpec, precision: Precision, max_tokens: int, max_draws: int) -> dict[str, _Array]:
    tokens, draws = padded_rows(max_tokens), padded_rows(max_draws)
    rows = dict.fromkeys(("qkv", "made", "mixed", "gates", "gate_up", "activated"), tokens)
    rows["mixed_drawing"] = min(tokens, draws)
    widths = [_widths(layer) for layer in spec.layers]
    room = [one | {"mixed": max(one["mixed"], one["made"])} for one in widths]
    whole = any(attention.qk_norm_whole for attention in spec.attentions)
    controls = max(one["controls"] for one in widths)
    adds = Kind.ADDEND in kinds_of(spec)
    given = 0 if spec.layer_inputs is None else spec.layer_inputs.width
    rounded = ModelFormats(spec, precision).rounded
    read = ELEMENT if rounded is None else rounded.activations
    # What makes controls, and routers, are elements.
    rounds = rounded is not None and only_rms_norms(spec) and not controls and not spec.experts
    latents = (experts.latent or 0 for experts in spec.experts)
    widest = max(*latents, *(max(one["mixed"], one["activated"]) for one in widths), 0)
    widest = max(widest, *(one.query_latent or 0 for one in spec.latents), 0)
    return {
        "tokens": _Array((tokens,), INT),
        "no_rows": _Array((tokens,), INT),
        "x": _Array((tokens, spec.width), FLOAT),
        "normed": _Array((tokens, spec.width), ELEMENT),
        "entering": _Array((tokens, spec.width), read if rounds else ELEMENT, rounds),
        **{name: _Array((rows[name], max(one[name] for one in room)), ELEMENT) for name in rows},
        "x_drawing": _Array((draws, spec.width), FLOAT),
        "logits": _Array((padded_rows(min(draws, LOGIT_ROWS)), padded_vocab(spec)), FLOAT),
        "drawn": _Array((draws,), INT),
        "found": _Array((draws, FOUND.itemsize), BYTE),
        "statistics": _Array((tokens * whole, 2, 2), FLOAT),
        "added": _Array((tokens * adds, spec.width), FLOAT),
        "quantised": _Array(
            (tokens * (rounded is not None), max(widest, spec.width)), read, rounded is not None
        ),
        "controls": _Array((tokens, controls), FLOAT),
        "inputs": _Array((tokens, given * len(spec.layers)), ELEMENT),
        "input_gate": _Array((tokens, given), ELEMENT),
        "work": _Array((max(StateMixers.workspace(spec, tokens), LatentRoom.workspace(spec, tokens)),), BYTE),
        "expert_work": _Array((ExpertRoom.workspace(spec, tokens, fp8=rounded is not None),), BYTE),
    }


def _bytes(arrays: dict[str, _Array]) -> int:
    assert all(arrays[name].bytes <= arrays[other].bytes for name, other in _SHARED.items())
    return sum(aligned(array.bytes) for name, array in arrays.items() if name not in _SHARED)
