"""Where a step's time goes: each operation alone against its floor, and their sum against the whole step.

    python -m benchmarks.budget MODEL.gguf [--context 512] [--batch 1 256 1024] [--prefill 16384]

An operation is measured in a CUDA graph that holds its launches of all layers and nothing else, so that the
weights and caches of 24 layers go by, and not one set that stays in L2; the step is the graph of all
launches. Both are medians of replays between two events. The floor is the larger of bytes over the rate of a
device copy and FLOPs over that of a large FP16 product, as measured on an H200 (--bytes-per-s, --flops);
bytes are the least that must move, with what one kernel hands to the next counted, although L2 may hold it.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.options import add_formats, precision_from
from benchmarks.common.steps import FILL, Steps
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Attention, Experts, FeedForward, LatentAttention, ModelSpec
from nightmill.worker.runners.base import StepBatch
from nightmill.worker.runners.gpu.device.graphs import Graph
from nightmill.worker.runners.gpu.device.operands import Matrix
from nightmill.worker.runners.gpu.feed_forward import Mixture
from nightmill.worker.runners.gpu.kinds import has_tail, last_keeping, mixer_sizes
from nightmill.worker.runners.gpu.kv_cache import PAGE, kinds_layout, layer_page_bytes
from nightmill.worker.runners.gpu.layers import Addition, Layer, LayerKernels
from nightmill.worker.runners.gpu.memory import RunnerSizes
from nightmill.worker.runners.gpu.mixers import AttentionMixer, LatentMixer, LayerMixer, StateMixer
from nightmill.worker.runners.gpu.model import Model, Shared
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.runner import CudaRunner, Launching, decode_shape
from nightmill.worker.runners.gpu.step_inputs import StepInputs, StepShape
from nightmill.worker.runners.gpu.weights.layout import LayerWeights
from tests.support.limits import BYTES_PER_S, FLOPS, flops_of_state, seen_tokens

Tail = tuple[StepInputs, StepShape] | None
PROMPT = 1024  # tokens of each sequence in the prefill step
REPLAYS = 9


@dataclass
class Line:
    """One operation in a step, or the step: launches, bytes and FLOPs of all layers, and seconds."""

    operation: str
    launches: int
    bytes: int
    flops: int
    floor_s: float
    seconds: float


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


@dataclass(frozen=True)
class Sizes:
    """A step of sequences, each of which draws after `length` tokens that come behind `first` others."""

    sequences: int
    first: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.sequences * self.length


class Costs:
    """Bytes and FLOPs of the operations of one step, all layers together; bytes are of the formats kept."""

    def __init__(self, spec: ModelSpec, precision: Precision, model: Model, step: "Sizes") -> None:
        """Layers behind the last one that keeps anything compute what is drawn alone."""
        self.of: dict[str, tuple[int, int]] = {}
        tokens, draws, first, length = step.tokens, step.sequences, step.first, step.length
        width, rows, normed, kv = spec.width, tokens, 0, precision.kv
        inputs = 0 if spec.layer_inputs is None else spec.layer_inputs.width * len(spec.layers)
        kept = last_keeping(spec)
        last = max(index for index, layer in enumerate(spec.layers) if layer.mixer is not None)
        for index, (layer, bound) in enumerate(zip(spec.layers, model.layers, strict=True)):
            mixer, sizes, own, ffn = layer.mixer, mixer_sizes(layer.mixer), bound.weights, layer.feed_forward
            if isinstance(mixer, Attention):
                self._add("qkv", own.qkv, own.qkv.rows, width, rows)
                self._add("gates", own.attn_gate, sizes.gates, width, rows)
                window = mixer.window or math.inf
                asking = length if rows == tokens else 1  # tokens of each sequence
                keys = draws * int(min(first + length, window + asking - 1))
                pairs = draws * int(seen_tokens(first + length - asking, asking, window))
                read = keys * layer_page_bytes(mixer, kv) // PAGE
                attention = read + 4 * rows * sizes.outputs, 4 * sizes.outputs * pairs
                self._sum("decode_attention", *attention)
                self._sum("prefill_attention", *attention)
                self._sum("open_gates", 6 * rows * sizes.gates, 0)
            elif isinstance(mixer, LatentAttention):
                keys = draws * (first + length)
                pairs = draws * int(seen_tokens(first, length, math.inf))
                self._latent(mixer, own, tokens, width, keys, pairs)
            elif mixer is not None:
                self._add("mixer input", own.mixer_input, sizes.inputs, width, rows)
                self._add("controls", own.mixer_controls, sizes.controls, width, rows, 4)
                states = 2 * draws * sum(array.bytes for array in layer.state)
                handed = tokens * (2 * (sizes.inputs + sizes.outputs) + 4 * sizes.controls)
                chunked = 0 if tokens == draws else tokens * flops_of_state(mixer)
                self._sum(mixer.title, states + handed, chunked)
            dense = isinstance(ffn, FeedForward) and ffn.width > 0
            normed += rows * (mixer is not None) + rows * dense
            if index == last or (has_tail(spec) and index == kept):
                rows = draws  # that the others need no more
            if mixer is not None:
                self._add("output", own.attn_output, width, sizes.outputs, rows, 8)
            if isinstance(ffn, Experts):
                self._add_experts(ffn, own, width, rows)
            elif dense:
                inner = 2 * ffn.width if ffn.gated else ffn.width
                self._add("gate_up and swiglu", own.gate_up, inner, width, rows, 1 if ffn.gated else 2)
                self._add("down", own.ffn_down, width, ffn.width, rows, 8)
            if layer.inputs is not None:
                self._add("input gate", own.input_gate, layer.inputs.width, width, rows)
                self._add("input up", own.input_up, width, layer.inputs.width, rows, 8)
        if spec.layer_inputs is not None:
            self._add("layer inputs", model.weights.layer_projection, inputs, width, tokens, 6)
        self._add("head", model._weights.head, spec.vocab, width, draws, 4)
        widest = mixer_sizes(spec.layers[last].mixer).outputs
        self.of |= {
            "rms_norm": (6 * width * (normed + draws), 0), "embed": (6 * tokens * width, 0),
            "sample": (4 * draws * spec.vocab, 0), "gather_rows": (4 * draws * (widest + 2 * width), 0),
        }  # fmt: skip

    def _latent(
        self, mixer: LatentAttention, own: LayerWeights, tokens: int, width: int, keys: int, pairs: int
    ) -> None:
        """Count what a layer of latent attention does, but for its output."""
        latent = own.latent
        assert latent is not None
        heads, made_of = mixer.heads, mixer.query_latent or width
        self._add("kv_down", latent.kv_down, mixer.kept, width, tokens)
        self._add("q_down", latent.q_down, mixer.query_latent or 0, width, tokens)
        self._add("q_up", latent.q_up, heads * mixer.head_dim, made_of, tokens)
        matrices = mixer.latent * (mixer.key_dim + mixer.value_dim) * heads
        handed = 2 * tokens * heads * (mixer.head_dim + mixer.kept + mixer.latent + mixer.value_dim)
        self._sum("products of heads", 2 * matrices + handed, 2 * tokens * matrices)
        both = mixer.kept + mixer.latent
        attention = 2 * keys * mixer.kept + 2 * tokens * heads * both, 2 * heads * both * pairs
        self._sum("decode_attention", *attention)
        self._sum("prefill_attention", *attention)
        self._sum("keep", 4 * tokens * (mixer.kept + (mixer.query_latent or 0)), 0)

    def _add_experts(self, experts: Experts, own: LayerWeights, width: int, rows: int) -> None:
        """Those of a layer, of which each is as likely as the others, and what is around them."""
        weights, read, inner = own.experts, experts.latent or width, experts.width
        assert weights is not None
        choices = rows * experts.used
        touched = 1 - (1 - experts.used / experts.count) ** rows
        both = 2 * inner if experts.gated else inner
        self._add("router", weights.router, weights.router.rows, width, rows, 4)
        moved = int(touched * weights.gate_up.bytes) + 2 * (rows * read + choices * inner)
        self._sum("experts gate_up", moved, 2 * choices * both * read)
        moved = int(touched * weights.down.bytes) + 2 * choices * inner + 4 * choices * read
        self._sum("experts down", moved, 2 * choices * inner * read)
        self._add("latent_down", weights.latent_down, weights.latent_down.rows, width, rows)
        self._add("latent_up", weights.latent_up, weights.latent_up.rows, read, rows, 4)
        if (shared := experts.shared) is not None:
            self._add("shared_gate_up", weights.shared_gate_up, weights.shared_gate_up.rows, width, rows)
            self._add("shared_down", weights.shared_down, width, shared.width, rows, 4)
        self._sum("combine", 4 * choices * read + 10 * rows * width, 0)

    def _add(self, name: str, weight: Matrix, outputs: int, inputs: int, rows: int, size: int = 2) -> None:
        """Count a product; size: bytes of an output, as they are written, or read and written."""
        moved = weight.bytes + 2 * rows * inputs + size * rows * outputs
        self._sum(name, moved * (outputs > 0), 2 * rows * outputs * inputs)

    def _sum(self, name: str, moved: int, flops: int) -> None:
        before = self.of.get(name, (0, 0))
        self.of[name] = before[0] + moved, before[1] + flops


def measure(runner: CudaRunner, batch: StepBatch, costs: Costs, rates: tuple[float, float]) -> Iterator[Line]:
    """Each operation of this step alone, then the whole step."""
    model = runner._model
    inputs, shape, tail = prepared(runner, batch)
    calls = recorded(model, inputs, shape, tail)
    runner.device.synchronize()
    routed = next((at for at, (name, _) in enumerate(calls) if name == "route"), -1)
    for name in dict.fromkeys(name for name, _ in calls):
        # Experts multiply what was routed last: else of the last layer, where few tokens go on.
        for _, call in calls[: routed + 1]:
            call()
        mine = [call for other, call in calls if other == name]
        moved, flops = costs.of.get(name, (0, 0))
        seconds, nodes = timed(runner, lambda mine=mine: [call() for call in mine] and None)
        yield Line(name, nodes, moved, flops, max(moved / rates[0], flops / rates[1]), seconds)
    seconds, nodes = timed(runner, lambda: queue(model, inputs, shape, tail))
    yield Line("step", nodes, 0, 0, 0.0, seconds)


def prepared(runner: CudaRunner, batch: StepBatch) -> tuple[StepInputs, StepShape, Tail]:
    """A step's arrays on the GPU, and those of its rows that draw, if layers take these alone.

    Products of drawn tokens are tuned for so many rows.
    """
    size = len(batch.slots)
    if len(batch.tokens) == batch.drawn:
        runner._model.tune(size, size)
        pieces = runner._decode_pieces(batch, size)
        shape = decode_shape(size, rooms := tuple(map(len, pieces)))
        inputs = runner._steps.write_padded(0, batch, size, pieces, rooms)
    else:
        tiles, pieces, ((first, _, groups), *further) = runner._plans.divide(0, batch)
        shape = StepShape(
            len(batch.tokens), size, 0, len(batch.draws), first, groups=groups, further=tuple(further)
        )
        inputs = runner._steps.write(0, batch, shape, tiles, pieces)
    return inputs, shape, runner._tail_of(0, batch, shape)


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


def timed(runner: CudaRunner, launch: Callable[[], None]) -> tuple[float, int]:
    """Seconds of a replay of what `launch` queues, and its launches."""
    device = runner.device
    graph = Graph(device, launch)
    begin, end = device.event(timing=True), device.event(timing=True)
    times = []
    for replay in range(REPLAYS + 2):
        begin.record(device.stream)
        graph.launch()
        end.record(device.stream)
        end.synchronize()
        if replay >= 2:
            times.append(end.time_since(begin) * 1e-3)
    nodes = graph.nodes
    graph.close()
    return float(np.median(times)), nodes


def show(title: str, lines: list[Line]) -> None:
    """Print a table in Markdown."""
    step, parts = lines[-1], lines[:-1]
    print(f"\n{title}\n\n| operation | launches | MB | GFLOP | floor, us | measured, us | floor / measured |")
    print("|---|---|---|---|---|---|---|")
    for line in sorted(parts, key=lambda line: -line.seconds):
        share = f"{line.floor_s / line.seconds:.0%}" if line.floor_s else "-"
        print(
            f"| {line.operation} | {line.launches} | {line.bytes / 1e6:,.1f} | {line.flops / 1e9:,.1f} "
            f"| {line.floor_s * 1e6:,.1f} | {line.seconds * 1e6:,.1f} | {share} |"
        )
    floor, total = sum(line.floor_s for line in parts), sum(line.seconds for line in parts)
    print(f"| sum | {sum(line.launches for line in parts)} | | | {floor * 1e6:,.1f} | {total * 1e6:,.1f} | |")
    print(f"| whole step | {step.launches} | | | | {step.seconds * 1e6:,.1f} | {floor / step.seconds:.0%} |")
    print(
        f"\nOutside the operations (launch boundaries, idle): {(step.seconds - total) * 1e6:,.1f} us",
        flush=True,
    )


def main() -> None:
    """Measure the decode steps and the prefill step that are asked for."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("model")
    add_formats(arguments)
    arguments.add_argument("--context", type=int, default=512)
    arguments.add_argument("--batch", type=int, nargs="*", default=[1, 256, 1024])
    arguments.add_argument("--prefill", type=int, default=16384)
    arguments.add_argument("--bytes-per-s", type=float, default=BYTES_PER_S)
    arguments.add_argument("--flops", type=float, default=FLOPS)
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    file = GgufFile.open(options.model)
    spec = read_spec(file)
    precision = precision_from(options, file, spec)
    longest = max(PROMPT, options.context + 1)
    sequences = max([*options.batch, options.prefill // PROMPT])  # --batch may name none
    layout = kinds_layout(spec, precision.kv)
    runner = CudaRunner(
        file,
        spec,
        RunnerSizes(
            slots=sequences,
            context=longest,
            max_tokens=max(options.prefill, FILL),
            kv_pages=sequences * (-(-longest // PAGE) if layout is None else layout.pages_for(longest)),
        ),
        launching=Launching(graphs=False),
        precision=precision,
        report=lambda line: print(line, file=sys.stderr),
    )
    rates = options.bytes_per_s, options.flops
    report: dict[str, Any] = {
        "gpu": runner.device.name, "model": spec.name, "weights": precision.weights.value,
        "kv": precision.kv.value, "context": options.context,
    }  # fmt: skip
    try:
        steps = Steps(runner, longest)
        if options.batch:
            steps.fill(options.context)
        for size in options.batch:
            batch = steps.batch(range(size), options.context, 1, admit=False)
            costs = Costs(spec, precision, runner._model, Sizes(size, options.context, 1))
            lines = list(measure(runner, batch, costs, rates))
            show(f"Decode, batch {size}, context {options.context}", lines)
            report[f"decode {size}"] = [asdict(line) for line in lines]
        if options.prefill:
            count = options.prefill // PROMPT
            batch = steps.batch(range(count), 0, PROMPT, admit=True)
            costs = Costs(spec, precision, runner._model, Sizes(count, 0, PROMPT))
            runner.launch(batch)
            runner.collect()
            lines = list(measure(runner, batch, costs, rates))
            show(f"Prefill, {count} prompts of {PROMPT}", lines)
            report["prefill"] = [asdict(line) for line in lines]
        if options.json:
            options.json.write_text(json.dumps(report, indent=1))
    finally:
        runner.close()


if __name__ == "__main__":
    main()
