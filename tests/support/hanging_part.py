"""A part of a benchmark in which texts among others hang, or end the process: `hang` or `die` is first."""

import os
import signal
import sys
import time
from typing import Any

from nightmill.worker.commands.benchmarking import process, texts


def main() -> None:
    """Compute a part, as far as it comes."""
    greedy = texts._greedy

    def with_a_fault(*arguments: Any, beside: int, **options: Any) -> Any:
        if beside:
            options["said"]()
            if sys.argv[1] == "die":
                os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(600)
        return greedy(*arguments, beside=beside, tokens=1, **options)

    texts._greedy = with_a_fault  # type: ignore[assignment]
    process.main()


if __name__ == "__main__":
    main()
