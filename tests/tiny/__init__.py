"""Tiny models with the answers of two engines: see README.md beside this."""

import json
import lzma
from pathlib import Path
from typing import Any

__all__ = ["EXPERTS", "FILES", "GEMMAS", "expected", "unpacked"]

FOLDER = Path(__file__).parent
FILES = ("qwen35-bf16", "qwen35-q8_0", "lfm2-bf16")
EXPERTS = ("qwen3moe-q8_0", "qwen35moe-q8_0", "gptoss-q8_0")
GEMMAS = ("gemma4-bf16",)


def unpacked(name: str, folder: Path) -> Path:
    """The model's file, in `folder`."""
    path = folder / f"{name}.gguf"
    path.write_bytes(lzma.decompress((FOLDER / f"{name}.gguf.xz").read_bytes()))
    return path


def expected(name: str) -> dict[str, Any]:
    """What README.md says of the family's answers."""
    answers: dict[str, Any] = json.loads((FOLDER / f"{name.partition('-')[0]}.json").read_text())
    return answers
