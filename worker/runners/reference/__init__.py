"""The runner in NumPy: what a GPU runner has to reproduce, and the runner where there is no GPU."""

from nightmill.worker.runners.reference.kv_cache import choose_kv_blocks
from nightmill.worker.runners.reference.runner import ReferenceRunner

__all__ = ["ReferenceRunner", "choose_kv_blocks"]
