"""The name of the arithmetic that computed a text: what its bits depend on beside its row. No I/O here."""

import re
from dataclasses import dataclass, fields
from typing import Self
from urllib.parse import unquote

DIGITS = 16
"""Of a digest, in a name: nobody meets two files that agree in 64 bits."""

_UNFIT = re.compile(r"[%;\x00-\x1f\x7f]")  # would end a part, or the line


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Where all parts are the same, a row (prompt, parameters, seed) gives the same text, to the bit.

    runner   "cuda" or "numpy"
    device   the kind of GPU, as its driver calls it; for NumPy, the BLAS and the processor it is made for
    weights  the type that the runner computes in, and that of weights, if bits depend on it: "f16", "bf16",
             "f32", "fp8 in f16"
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
        """One line, as rows keep it: `runner=cuda; device=NVIDIA H200; weights=f16; ...`."""
        return "; ".join(f"{part.name}={_escaped(getattr(self, part.name))}" for part in fields(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """What `str` wrote; raises ValueError for anything else, as another version may have written it."""
        parts = [part.partition("=") for part in text.split("; ")]
        values = {name: unquote(value) for name, equals, value in parts if equals}
        if len(parts) != len(values) or values.keys() != {part.name for part in fields(cls)}:
            raise ValueError(f"is not the name of an arithmetic: {text!r}")
        return cls(**values)

    def difference(self, now: "Arithmetic") -> tuple[str, ...]:
        """The parts in which `now` differs, in words; none if the two are one arithmetic."""
        return tuple(
            f"{part.name}: {then}, now {other}"
            for part in fields(self)
            if (then := getattr(self, part.name)) != (other := getattr(now, part.name))
        )


def difference(then: str, now: str) -> tuple[str, ...]:
    """As `Arithmetic.difference`, of names as rows keep them; one that cannot be read is quoted whole."""
    if then == now:
        return ()
    try:
        return Arithmetic.parse(then).difference(Arithmetic.parse(now))
    except ValueError:
        return (f"arithmetic: {then!r}, now {now!r}",)


def _escaped(value: str) -> str:
    return _UNFIT.sub(lambda found: f"%{ord(found[0]):02X}", value)
