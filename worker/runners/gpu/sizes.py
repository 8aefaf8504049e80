"""Which sizes of a model the CUDA kernels take."""

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.config import ModelConfig
from nightmill.worker.runners.gpu.prefill import TILE_ROWS

__all__ = ["check_sizes"]


def check_sizes(config: ModelConfig) -> None:
    """Raise RunnerError, which names the size, where kernels do not take a model."""
    group = config.heads // config.kv_heads
    head = config.head_dim
    problems = [
        (config.width % 8 or config.width > 32768, f"a width of {config.width} (multiples of 8 up to 32768)"),
        (config.ffn_width % 8, f"an FFN width of {config.ffn_width} (multiples of 8)"),
        (head % 4 or head > 512 or (head > 128 and head % 16), f"a head size of {head} (see Kernels)"),
        (config.heads * head % 8 or config.kv_heads * head % 8, f"heads of {head} elements in odd numbers"),
        (group > TILE_ROWS, f"{group} query heads to a KV head (at most {TILE_ROWS})"),
    ]
    for wrong, what in problems:
        if wrong:
            raise RunnerError(f"the CUDA kernels do not take {what}; `--reference` generates without a GPU")
