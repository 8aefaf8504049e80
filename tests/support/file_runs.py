"""`nightmill run` as a process of its own: rows in, results out."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nightmill.jobs.base.settings import Settings
from tests.support.servers import worker_env

__all__ = ["answered"]


def answered(rows: Iterable[Mapping[str, Any]], settings: Settings, folder: Path) -> list[dict[str, Any]]:
    """The results of these rows, of which three are computed at once; files of both are in `folder`."""
    source, results = folder / "prompts.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run(
        [sys.executable, "-m", "nightmill", "run", str(source), "-o", str(results)],
        env=worker_env(settings, max_sequences=3),
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in results.read_text().splitlines()]
