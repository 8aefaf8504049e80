"""What nvcc made of each kernel file, kept in `tools/compiled_kernels.txt`, so that nobody compiles it again.

A line is one compilation:

    FILE ARCHITECTURE DIGEST SEAL KERNEL:REGISTERS:STACK:SHARED:PARAMETERS...
    FILE ARCHITECTURE DIGEST SEAL KERNEL:-:-:SHARED:PARAMETERS... OPTIONS

After the kernels of the first form stand those of architectures whose instructions are made from the same
code, each behind its name, with REGISTERS and STACK alone.

The digest is of all that nvcc is given: the code of the file and of all that it includes (comments and
spacing apart), the options, nvcc's version and variables, the architecture and those made from the same
code. So a line for other code is found by nobody. The seal is a digest of the rest of its line: one that
was changed by hand, or mixed up by a merge, counts as missing. In which order lines stand, or how often,
makes no difference: a merge may keep those of both sides, and whoever writes the record drops what nothing
is compiled for any more.

Lines of the second form, with the options (JSON), are of kernels that tests alone compile, quickly and badly,
for what they take and not for how they run.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Self

from nightmill.worker.runners.gpu.device.compiler import included_files
from tools.cubins import Kernel

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tools" / "compiled_kernels.txt"
LOCAL = ROOT / "build" / "kernels" / "compiled.txt"
"""What was compiled here and is not in the record: the next who writes that takes it from here."""
ALSO = {"sm_80": ("sm_86", "sm_120")}
"""GPUs whose instructions are made from the same code; those of 8.9 are of 8.6 and products of FP8."""
VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
_FORMAT = b"1"  # change it to make every line stale
_DIGITS = 24
_TOKEN = re.compile(
    rb"""//[^\n]*|/\*.*?\*/|(?P<kept>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')|[ \t\r\f\v]+""", re.DOTALL
)
# Where comments and spacing may be more than that: such a file counts with every byte.
_UNSURE = re.compile(rb"""//[^\n]*\\\s*\n|\\[ \t\r]+\n|/\\\r?\n|R"|\d'\d|__LINE__""")


class Line(NamedTuple):
    """One compilation."""

    file: str
    architecture: str
    digest: str
    figures: str
    options: str = ""  # JSON, of what tests alone compile

    def __str__(self) -> str:
        body = f"{self.file} {self.architecture} {self.digest}"
        rest = f"{self.figures} {self.options}".rstrip()
        return f"{body} {_seal(f'{body} {rest}')} {rest}"

    @property
    def quick(self) -> bool:
        """True of what tests alone compile: nobody knows what it takes of a GPU."""
        return bool(self.options)

    @classmethod
    def read(cls, text: str) -> Self | None:
        """The line that this text is; None where its seal is broken."""
        words = text.rstrip("\n").split(" ", 4)
        if len(words) != 5 or _seal(" ".join((*words[:3], words[4]))) != words[3]:
            return None
        figures, bracket, options = words[4].partition(" [")
        return cls(*words[:3], figures, f"[{options}" if bracket else "")

    @classmethod
    def of(cls, file: str, digest: str, kernels: Sequence[tuple[str, dict[str, Kernel]]]) -> Self:
        """The line of the kernels of each architecture, that of the compilation first."""
        words = []
        for architecture, found in kernels:
            words += [architecture] if words else []
            for name, kernel in sorted(found.items()):
                parameters = ",".join(map(str, kernel.parameters))
                more = f":{kernel.shared}:{parameters}" if architecture == kernels[0][0] else ""
                words.append(f"{name}:{kernel.registers}:{kernel.stack}{more}")
        return cls(file, kernels[0][0], digest, " ".join(words))

    @classmethod
    def of_quick(
        cls, file: str, architecture: str, digest: str, kernels: dict[str, Kernel], options: Sequence[str]
    ) -> Self:
        """The line of kernels that tests have compiled."""
        words = (
            f"{name}:-:-:{kernel.shared}:{','.join(map(str, kernel.parameters))}"
            for name, kernel in sorted(kernels.items())
        )
        return cls(file, architecture, digest, " ".join(words), json.dumps(list(options)))

    def kernels(self) -> Iterator[tuple[str, str, Kernel]]:
        """Architecture and name of each kernel, and what it takes."""
        architecture = self.architecture
        for word in self.figures.split(" "):
            name, *numbers = word.split(":")
            if not numbers:
                architecture = name
                continue
            registers, stack, shared, parameters = (*numbers, "0", "")[:4]
            taken = [int(size) for size in parameters.split(",") if size]
            known = (0, 0) if self.quick else (int(registers), int(stack))
            yield architecture, name, Kernel(*known, int(shared), taken)


def _seal(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def digest_of(source: Path, options: Sequence[str], architecture: str, version: str) -> str:
    """A digest of all that nvcc is given; `version`: what it prints of itself. `options`: all of them."""
    seen = hashlib.sha256()
    given = [source.stem, architecture, *ALSO.get(architecture, ()), version]
    given += [os.environ.get(name, "") for name in VARIABLES]
    parts = [_FORMAT, *(text.encode() for text in given), str(len(options)).encode()]
    parts += [option.encode() for option in options]
    for part in (*parts, *map(code_of, included_files(source).values())):
        seen.update(len(part).to_bytes(8, "little") + part)
    return seen.hexdigest()[:_DIGITS]


@lru_cache(maxsize=512)
def code_of(text: bytes) -> bytes:
    """A file's text without comments, empty lines and needless spaces, where those are nothing else."""
    if _UNSURE.search(text) or any(b"\n" in (found["kept"] or b"") for found in _TOKEN.finditer(text)):
        return text
    lines: list[bytes] = []
    for line in _TOKEN.sub(lambda found: found["kept"] or b" ", text).split(b"\n"):
        code = line.strip()
        if code or (lines and lines[-1].endswith(b"\\")):  # an empty one ends a macro
            lines.append(code)
    return b"\n".join(lines)


def read_lines(*paths: Path) -> dict[str, Line]:
    """The lines of these files, by digest; one that tells more comes before one of tests."""
    found: dict[str, Line] = {}
    for path in paths:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in filter(None, map(Line.read, text.splitlines())):
            if line.digest not in found or found[line.digest].quick:
                found[line.digest] = line
    return found


def write_lines(path: Path, lines: Iterable[Line]) -> bool:
    """Write the record; returns False where it was the same before."""
    text = "".join(f"{line}\n" for line in sorted(lines))
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


def keep(line: Line, path: Path) -> None:
    """Add a line to those that were compiled here; many processes may."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(f"{line}\n")
