"""The operations that a step of the CUDA runner queues, by name and in order: its launchers are recorded."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from nightmill.worker.runners.gpu.feed_forward import Mixture
from nightmill.worker.runners.gpu.layers import Addition, Layer, LayerKernels
from nightmill.worker.runners.gpu.mixers import AttentionMixer, LatentMixer, LayerMixer, StateMixer
from nightmill.worker.runners.gpu.model import Model, Shared
from nightmill.worker.runners.gpu.step_inputs import StepInputs, StepShape

__all__ = ["Tail", "queue", "recorded"]

Tail = tuple[StepInputs, StepShape] | None


class Recorder:
    """Stands in for a launcher: notes its calls in order, and makes them.

    name  of the operation that a call is, by the method and its arguments
    """

    def __init__(
        self, target: Any, calls: list[tuple[str, Callable[[], None]]], name: Callable[..., str]
    ) -> None:
        self._target = target
        self._calls = calls
        self._name = name

    def __getattr__(self, method: str) -> Any:
        found = getattr(self._target, method)
        return partial(self._noted, method, found) if callable(found) else found

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self._noted("", self._target, *arguments, **options)

    def _noted(self, method: str, found: Callable[..., None], *arguments: Any, **options: Any) -> None:
        self._calls.append((self._name(method, *arguments), lambda: found(*arguments, **options)))
        found(*arguments, **options)


def recorded(
    model: Model, inputs: StepInputs, shape: StepShape, tail: Tail
) -> list[tuple[str, Callable[[], None]]]:
    """The operations of a step, by their names, in order."""
    calls: list[tuple[str, Callable[[], None]]] = []

    def noted(target: Any, name: str = "") -> Any:
        return target and Recorder(target, calls, lambda method, *_: name or method)

    def in_few_rows(layer: Layer) -> Any:
        if layer.kernels.few is None:
            return None
        products = {layer.weights.attn_output: "output", layer.weights.ffn_down: "down"}
        names = {"qkv": "qkv", "input": "mixer input", "swiglu": "gate_up and swiglu"}

        def name(method: str, *arguments: Any) -> str:
            return names.get(method) or products[arguments[1]]

        return Recorder(layer.kernels.few, calls, name)

    def mixer_of(layer: Layer) -> LayerMixer | None:
        mixer = layer.kernels.mixer
        if isinstance(mixer, AttentionMixer):
            return replace(
                mixer, qkv=noted(mixer.qkv, "qkv"), decode=noted(mixer.decode, "decode_attention"),
                prefill=noted(mixer.prefill, "prefill_attention"), gates=noted(mixer.gates, "gates"),
                activate=noted(mixer.activate),
            )  # fmt: skip
        if isinstance(mixer, LatentMixer):
            return replace(
                mixer, q_down=noted(mixer.q_down, "q_down"), q_up=noted(mixer.q_up, "q_up"),
                kv_down=noted(mixer.kv_down, "kv_down"), rows=noted(mixer.rows),
                heads=noted(mixer.heads, "products of heads"), decode=noted(mixer.decode, "decode_attention"),
                prefill=noted(mixer.prefill, "prefill_attention"),
            )  # fmt: skip
        if isinstance(mixer, StateMixer):
            return replace(
                mixer, input=noted(mixer.input, "mixer input"), controls=noted(mixer.controls, "controls"),
                launcher=noted(mixer.launcher, mixer.title),
            )  # fmt: skip
        return None

    def mixture_of(layer: Layer) -> Mixture | None:
        if layer.kernels.mixture is None:
            return None
        mixture: Any = copy(layer.kernels.mixture)
        shared = mixture._launchers = copy(mixture._launchers)
        shared.grouped = Recorder(shared.grouped, calls, lambda method, *_: f"experts {method}")
        shared.combine, shared.quantise = noted(shared.combine, "combine"), noted(shared.quantise, "quantise")
        mixture._router, mixture._routing = noted(mixture._router, "router"), noted(mixture._routing, "route")
        for name in ("latent_down", "latent_up", "shared_gate_up", "shared_down"):
            setattr(mixture, f"_{name}", noted(getattr(mixture, f"_{name}"), name))
        return mixture

    def added(addition: Addition | None, name: str) -> Addition | None:
        if addition is None:
            return None
        norms = noted(addition.norms, "rms_norm")
        return replace(addition, product=noted(addition.product, name), norms=norms)

    kept = model.shared, model.layers, model.head, model.projection
    model.shared = Shared(
        embedding=noted(model.shared.embedding), norms=noted(model.shared.norms, "rms_norm"),
        logit_scale=noted(model.shared.logit_scale, "scale_logits"), sampler=noted(model.shared.sampler),
        inputs=noted(model.shared.inputs, "layer inputs"),
    )  # fmt: skip
    model.head, model.projection = noted(model.head, "head"), noted(model.projection, "layer inputs")
    model.layers = tuple(
        replace(
            layer,
            kernels=LayerKernels(
                mixer=mixer_of(layer),
                output=noted(layer.kernels.output, "output"),
                gate_up=noted(layer.kernels.gate_up, "gate_up and swiglu"),
                down=noted(layer.kernels.down, "down"), mixture=mixture_of(layer), few=in_few_rows(layer),
                input_gate=noted(layer.kernels.input_gate, "input gate"),
                input_up=noted(layer.kernels.input_up, "input up"),
            ),
            attended=added(layer.attended, "output"), fed=added(layer.fed, "down"),
            given=added(layer.given, "input up"),
        )
        for layer in model.layers
    )  # fmt: skip
    try:
        queue(model, inputs, shape, tail)
    finally:
        model.shared, model.layers, model.head, model.projection = kept
    return calls


def queue(model: Model, inputs: StepInputs, shape: StepShape, tail: Tail) -> None:
    """A whole step."""
    model.forward(inputs, shape, tail)
    model.draw(inputs, shape)
