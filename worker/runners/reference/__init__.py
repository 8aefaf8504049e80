"""The runner in NumPy: what a GPU runner has to reproduce, and the runner where there is no GPU."""

from nightmill.worker.runners.reference.kv_cache import choose_kv_pages
from nightmill.worker.runners.reference.runner import ReferenceRunner, Rounding
from nightmill.worker.runners.reference.states import choose_slots

__all__ = ["ReferenceRunner", "Rounding", "choose_kv_pages", "choose_slots"]
