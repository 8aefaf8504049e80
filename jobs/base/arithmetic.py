"""The name of the arithmetic that computed a text: everything but the row itself that its bits depend on. No
I/O here."""

import hashlib
import re
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Self
from urllib.parse import unquote

DIGITS = 16
"""Hexadecimal digits of a digest in a name; 64 bits, so that collisions do not occur in practice."""

_SHORT = 8  # digits of digests in a fingerprint

_UNFIT = re.compile(r"[%;\x00-\x1f\x7f]")  # separators and control characters


@dataclass(frozen=True)
class Arithmetic:
    """The name of an arithmetic: where all parts are equal, a row (prompt, parameters, seed) gives the same
    text, to the bit.

    runner   "cuda" or "numpy"
    device   the kind of GPU, as its driver calls it; for NumPy, the BLAS and the processor it is made for
    weights  the type that the runner computes in, and that of weights, if bits depend on it: "f16", "bf16",
             "f32", "file in f16", "fp8 in f16"
    kv       the type in which it keeps keys and values: "f16", "bf16", "f32", "fp8"
    kernels  the revision of the code that computes, and of the compiler and libraries it is made with
    model    digest of the model file: its header and samples of each tensor (`GgufFile.digest`)
    """

    runner: str
    device: str
    weights: str
    kv: str
    kernels: str
    model: str

    def __str__(self) -> str:
        """Return the name on one line, as stored in SQL: `runner=cuda; device=NVIDIA H200; weights=f16;
        ...`."""
        return self._name

    @cached_property
    def _name(self) -> str:
        """The same, kept: a worker asks for it twice for each row."""
        return "; ".join(f"{part.name}={_escaped(getattr(self, part.name))}" for part in fields(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the output of `str`; raises ValueError for anything else, such as the format of another
        version."""
        parts = [part.partition("=") for part in text.split("; ")]
        values = {name: unquote(value) for name, equals, value in parts if equals}
        if len(parts) != len(values) or values.keys() != {part.name for part in fields(cls)}:
            raise ValueError(f"is not the name of an arithmetic: {text!r}")
        return cls(**values)

    def difference(self, now: "Arithmetic") -> tuple[str, ...]:
        """Describe the parts in which `now` differs; empty if the two are equal."""
        return tuple(
            f"{part.name}: {then}, now {other}"
            for part in fields(self)
            if (then := getattr(self, part.name)) != (other := getattr(now, part.name))
        )


def difference(then: str, now: str) -> tuple[str, ...]:
    """Compare two stored names like `Arithmetic.difference`; a name that cannot be parsed is quoted whole."""
    if then == now:
        return ()
    try:
        return Arithmetic.parse(then).difference(Arithmetic.parse(now))
    except ValueError:
        return (f"arithmetic: {then!r}, now {now!r}",)


def model_of(name: str | None) -> str | None:
    """The digest of the model file in a name as rows keep it; None if it cannot be read."""
    try:
        return Arithmetic.parse(name or "").model
    except ValueError:  # none, or another version's
        return None


def system_fingerprint(arithmetic: str | None) -> str | None:
    """Shorten a stored name to `cuda-f16-k3f2a9c01-m8e1d22b4`; None if it cannot be parsed.

    The parts are runner, weights, a digest of device, KV format and kernels, and the first digits of the
    model file's digest. Where two fingerprints are equal, the same request with the same seed gives the same
    text.
    """
    try:
        parts = Arithmetic.parse(arithmetic or "")
    except ValueError:  # missing, or written by another version
        return None
    computed = hashlib.sha256("\x00".join((parts.device, parts.kv, parts.kernels)).encode()).hexdigest()
    weights = re.sub(r"[^A-Za-z0-9]+", "_", parts.weights)
    return f"{parts.runner}-{weights}-k{computed[:_SHORT]}-m{parts.model[:_SHORT]}"


def _escaped(value: str) -> str:
    return _UNFIT.sub(lambda found: f"%{ord(found[0]):02X}", value)
