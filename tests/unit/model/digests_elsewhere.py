"""Digests of prompts, for a process in other surroundings: it imports little, so that it begins soon."""

import hashlib
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nightmill.worker.model.chat import ChatTemplate, renderer
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from tests.unit.model.conftest import DOWNLOADED
from tests.unit.model.plain_jinja import CHATS

_CLOCK = (
    "{{ strftime_now('%c %Z %A %B %x %X %p') }}{% for m in messages %}{{ m.content | upper }}{% endfor %}"
)
_FOLDED = (
    "{{ ['é', 'Z', 'a'] | sort | join }}{{ {'b': 1, 'a': 2} | dictsort }}{{ 'I'.lower() }}"
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | map(attribute='role') | unique | list }}"
)
_TIMES = [datetime(2026, 1 + number, 28, 23, 59, tzinfo=UTC) for number in range(len(CHATS))]


class Elsewhen(datetime):
    """A clock that stands in the year of the second argument."""

    @classmethod
    def now(cls, tz: Any = None) -> "Elsewhen":
        return cls(int(sys.argv[2]), 2, 3, 4, 5, tzinfo=tz)


def digests(model: Path, names: list[str]) -> list[str]:
    """Of the prompts that templates make of the usual chats, each with the time that its row keeps."""
    with GgufFile.open(model) as file:
        tokenizer = Tokenizer.from_gguf(file)
    sources = [_CLOCK, _FOLDED]
    sources += [(DOWNLOADED / "templates" / name).read_text(encoding="utf-8") for name in names]
    found = []
    for source in sources:
        template = ChatTemplate(source, tokenizer, "m.gguf")
        try:
            answers = template.encode_all(CHATS, times=_TIMES)
        finally:
            template.close()
        found += [
            hashlib.sha256(repr(ids).encode()).hexdigest() if isinstance(ids, list) else str(ids)
            for ids in answers
        ]
    return found


if __name__ == "__main__":
    renderer.datetime = Elsewhen  # type: ignore[attr-defined,misc]
    sys.stdout.write("\n".join(digests(Path(sys.argv[1]), sys.argv[3:])))
