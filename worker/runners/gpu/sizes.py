"""Which sizes of a model the CUDA kernels take."""

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.prefill import TILE_ROWS

__all__ = ["check_sizes"]


def check_sizes(spec: ModelSpec) -> None:
    """Raise RunnerError, which names the size, if kernels do not take a model."""
    layer = spec.layers[0]
    attention, ffn = layer.attention, layer.feed_forward.width
    group = attention.heads // attention.kv_heads
    head = attention.head_dim
    problems = [
        (any(other != layer for other in spec.layers), "layers that differ"),
        (spec.width % 8 or spec.width > 32768, f"a width of {spec.width} (multiples of 8 up to 32768)"),
        (ffn % 8, f"an FFN width of {ffn} (multiples of 8)"),
        (head % 4 or head > 512 or (head > 128 and head % 16), f"a head size of {head} (see Kernels)"),
        (attention.queries % 8 or attention.keys % 8, f"heads of {head} elements in odd numbers"),
        (group > TILE_ROWS, f"{group} query heads to a KV head (at most {TILE_ROWS})"),
    ]
    for wrong, what in problems:
        if wrong:
            raise RunnerError(f"the CUDA kernels do not take {what}; `--reference` generates without a GPU")
