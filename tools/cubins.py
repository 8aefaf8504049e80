"""Reads what a cubin (ELF) says of its kernels; makes one for that alone."""

import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nightmill.worker.runners.gpu.device.compiler import kernel_directory

_REGISTERS, _FRAME, _PARAMETER = 0x2F, 0x11, 0x17  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE, EIATTR_KPARAM_INFO
_SYMBOL = 24  # bytes of a symbol


@dataclass
class Kernel:
    """What a kernel takes.

    registers   of a thread
    stack       bytes of a thread: spilled registers and arrays
    shared      bytes that it declares
    parameters  bytes of each, in order
    """

    registers: int = 0
    stack: int = 0
    shared: int = 0
    parameters: list[int] = field(default_factory=list)


def read_kernels(cubin: bytes) -> dict[str, Kernel]:
    """The kernels by name, from the sections .nv.info, .nv.info.NAME (parameters) and .nv.shared.NAME."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, named = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQI", cubin, table + index * size) for index in range(count)]

    def text(start: int, offset: int) -> str:
        return cubin[start + offset : cubin.index(b"\0", start + offset)].decode()

    at = {text(sections[named][4], section[0]): section for section in sections}
    found: dict[str, Kernel] = {}
    for name, (_, _, _, _, start, length, _) in at.items():
        if name.startswith(".nv.info."):
            taken = _attributes(cubin[start : start + length]).get(_PARAMETER, [])
            parameters = {ordinal: packed >> 18 for _, ordinal, _, packed in
                          (struct.unpack("<IHHI", value) for value in taken)}  # fmt: skip
            found[name.removeprefix(".nv.info.")] = Kernel(
                parameters=[parameters[ordinal] for ordinal in sorted(parameters)]
            )
    for name, kernel in found.items():
        if (shared := at.get(f".nv.shared.{name}")) is not None:
            kernel.shared = shared[5]
    symbols, (_, _, _, _, start, length, _) = at[".symtab"], at[".nv.info"]
    names = sections[symbols[6]][4]
    of_all = _attributes(cubin[start : start + length])
    for attribute, member in ((_REGISTERS, "registers"), (_FRAME, "stack")):
        for value in of_all.get(attribute, []):
            symbol, number = struct.unpack("<II", value)
            (offset,) = struct.unpack_from("<I", cubin, symbols[4] + symbol * _SYMBOL)
            if (found_kernel := found.get(text(names, offset))) is not None:
                setattr(found_kernel, member, number)
    return found


class CompilationError(Exception):
    """nvcc refused a file."""


def compile_quickly(nvcc: str, source: Path, options: Sequence[str], architecture: str) -> bytes:
    """A cubin whose kernels take what they should, but run slowly: made in a third of the time.

    options  beside those of all (`COMMON_OPTIONS`)

    Raises CompilationError with what nvcc says.
    """
    # Tiles of FP8 need so many registers that there are not enough where they are given out carelessly.
    careless = [] if "-DKERNELS=FP8" in " ".join(options) else ["-Xcicc", "-O1", "-Xptxas", "-O0"]
    virtual, _, real = architecture.partition("/")
    target = [f"-arch={virtual}", *([f"-code={real}"] if real else [])]
    command = [nvcc, "-cubin", *target, *careless, "-std=c++17", *options, "-diag-suppress=177"]
    command += [f"-I{source.parent}", f"-I{kernel_directory()}", "-o", "/dev/stdout", str(source)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        raise CompilationError(done.stderr.decode())
    return done.stdout


def _attributes(info: bytes) -> dict[int, list[bytes]]:
    """The values of each attribute that has one behind its header."""
    found: dict[int, list[bytes]] = {}
    place = 0
    while place < len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, place)
        place += 4
        if form == 4:  # others have their value in the header
            found.setdefault(attribute, []).append(info[place : place + length])
            place += length
    return found
