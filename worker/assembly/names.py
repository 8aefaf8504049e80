"""Names of models in jobs, from those of their files."""

import re
from pathlib import Path

from nightmill.worker.model.gguf.parts import whole_name


def name_of(path: Path) -> str:
    """The name of a model file in jobs: its own less ending and part, in characters that names may have."""
    name = re.sub(r"[^A-Za-z0-9._:+@-]", "-", whole_name(path.name.removesuffix(".gguf")))
    return name.lstrip("._:+@-")[:200] or "model"
