"""What a GPU's memory and arithmetic allow: tokens per second that no decoding and no workload exceeds.

Products take as long as reading all weights, as they are kept, or as their FLOPs, whichever is longer;
attention of drawn tokens takes as long as reading the keys and values of their contexts, in each layer that
attends, as far as its window reaches, that of prompts as its FLOPs. Layers behind the last one that keeps
anything compute of a prompt only what is drawn. Of experts a step reads those that its tokens go to, if
every expert is as likely as the others. A state is read and written for each drawn token; of prompts, its
FLOPs count as they are with 64 tokens at once. All of these one after the other: who overlaps them may exceed
it. Power is not counted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from nightmill.worker.model.spec import (
    Attention,
    Experts,
    GatedDeltaNet,
    LatentAttention,
    LayerSpec,
    Mamba2,
    Mixer,
    ModelSpec,
    Role,
    Weight,
)
from nightmill.worker.runners.base import STATE_CHUNK
from nightmill.worker.runners.gpu.kinds import last_keeping
from nightmill.worker.runners.gpu.kv_cache import PAGE, layer_page_bytes
from nightmill.worker.runners.gpu.precision import HALF, Precision, WeightsFormat
from nightmill.worker.runners.gpu.weights.layout import OF_EXPERTS, all_weights, layer_weights, runs_of

__all__ = ["BYTES_PER_S", "FLOPS", "Limit", "flops_of_state", "seen_tokens"]

BYTES_PER_S, FLOPS = 4.27e12, 760e12  # of a device copy and of a large FP16 product, as measured on an H200


@dataclass(frozen=True)
class Limit:
    """Of a model with these numbers; `flops`: of 16-bit products, layers in FP8 have twice as many."""

    spec: ModelSpec
    precision: Precision = HALF
    bytes_per_s: float = BYTES_PER_S
    flops: float = FLOPS

    def decoding(self, sequences: int, context: float) -> float:
        """Tokens per second of so many sequences that all decode, over contexts of so many tokens each."""
        states = sequences * self._moving_states
        reading = sequences * self._reading(lambda window: min(context, window))
        return sequences / (self._products(1, sequences) + reading + states)

    def workload(self, prompts: Sequence[int], answers: Sequence[int], slots: int) -> float:
        """Seconds for all sequences, with these tokens of prompt and of answer, `slots` at once.

        The first token of an answer is drawn with the last one of its prompt.
        """
        tokens, last, computing = sum(prompts), last_keeping(self.spec), 0.0
        for index, layer in enumerate(self.spec.layers):
            whole, mixer = index <= last, layer.mixer
            computing += (tokens if whole else len(prompts)) * self._of_layer[index]
            computing += tokens * flops_of_state(mixer) / self.flops
            if isinstance(mixer, Attention):
                window = mixer.window or math.inf
                pairs = sum(seen_tokens(0, one, window) if whole else min(one, window) for one in prompts)
                computing += 4 * mixer.queries * pairs / self.flops
        computing += tokens * self._of_inputs + 2 * self._head * len(prompts) / self.flops
        drawn = [answer - 1 for answer in answers]
        steps = max(max(drawn), math.ceil(sum(drawn) / slots))
        reading = self._reading(
            lambda window: sum(
                seen_tokens(prompt, more, window) for prompt, more in zip(prompts, drawn, strict=True)
            )
        )
        moving = sum(drawn) * self._moving_states
        return computing + self._products(steps, sum(drawn)) + reading + moving

    def _products(self, steps: int, tokens: int) -> float:
        """Seconds of these steps with so many tokens in all, each of which is drawn."""
        read = self._kept + sum(
            size * (1 - (1 - share) ** (tokens / max(steps, 1))) for size, share in self._of_experts
        )
        products = sum(self._of_layer) + self._of_inputs + 2 * self._head / self.flops
        return max(steps * read / self.bytes_per_s, tokens * products)

    def _reading(self, seen: Callable[[float], float]) -> float:
        """Seconds for the keys and values of drawn tokens; `seen`: how many they see through a window."""
        read = 0.0
        for mixer in (layer.mixer for layer in self.spec.layers):
            if isinstance(mixer, Attention | LatentAttention):
                window = mixer.window if isinstance(mixer, Attention) else None
                read += layer_page_bytes(mixer, self.precision.kv) / PAGE * seen(window or math.inf)
        return read / self.bytes_per_s

    @property
    def _moving_states(self) -> float:
        """Seconds for the states of a sequence, there and back."""
        return 2 * self.spec.state_bytes / self.bytes_per_s

    @cached_property
    def _kept(self) -> int:
        """Bytes of all matrices that a step reads: of a table of embeddings it needs a row for each token."""
        left_out = (*OF_EXPERTS, *([] if self.spec.tied_head else [Role.EMBEDDING]))
        return sum(
            run.bytes
            for role, weight in all_weights(self.spec)
            if weight.is_matrix and role not in left_out
            for run in runs_of(self.spec, role, weight, self.precision)
        )

    @cached_property
    def _of_experts(self) -> list[tuple[int, float]]:
        """For each layer with experts: bytes of all of them, and the share that a token goes through."""
        found = []
        for index, layer in enumerate(self.spec.layers):
            if isinstance(experts := layer.feed_forward, Experts):
                own = layer_weights(self.spec, index)
                runs = (
                    run for role in OF_EXPERTS for run in runs_of(self.spec, role, own[role], self.precision)
                )
                found.append((sum(run.bytes for run in runs), experts.used / experts.count))
        return found

    @cached_property
    def _head(self) -> int:
        return self.spec.vocab * self.spec.width

    @cached_property
    def _of_layer(self) -> list[float]:
        """Seconds that a token's products take in each layer, with those experts alone that it goes to."""
        rate = 2 * self.flops if self.precision.weights is WeightsFormat.FP8 else self.flops
        return [
            2 * sum(_active(layer, role, one) for role, one in self.spec.layer_weights(index).items()) / rate
            for index, layer in enumerate(self.spec.layers)
        ]

    @cached_property
    def _of_inputs(self) -> float:
        """Seconds that a token's product for layers' inputs of their own takes."""
        made = self.spec.weights().get(Role.LAYER_PROJECTION)
        return 0.0 if made is None else 2 * math.prod(made.shape) / self.flops


def _active(layer: LayerSpec, role: Role, weight: Weight) -> int:
    """Numbers of a matrix that a token is multiplied with."""
    if not (weight.is_matrix or weight.is_matrices):
        return 0
    size, network = math.prod(weight.shape), layer.feed_forward
    if isinstance(network, Experts) and role.startswith("experts_"):
        return size // network.count * network.used
    return size


def seen_tokens(first: int, count: int, window: float) -> float:
    """Return how many tokens so many behind the first ones see: each itself, and those before it."""
    growing = min(count, max(0, int(min(window, first + count)) - first))
    grown = 0 if growing == count else (count - growing) * window
    return growing * first + growing * (growing + 1) // 2 + grown


def flops_of_state(mixer: Mixer | None) -> int:
    """FLOPs of a prompt's token in a state: through its matrix, and among the tokens of a chunk."""
    match mixer:
        case GatedDeltaNet():
            heads, rows, columns, products = mixer.value_heads, mixer.key_dim, mixer.value_dim, 3
        case Mamba2():
            heads, rows, columns, products = mixer.heads, mixer.state_size, mixer.head_dim, 2
        case _:
            return 0
    return heads * (2 * products * rows * columns + 2 * STATE_CHUNK * (rows + columns))
