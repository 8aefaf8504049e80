"""A device whose memory is the host's, with kernels that a C++ compiler made: launchers run on it.

`cuda_on_host/` stands for CUDA's headers and for those of ours that are PTX. Slow, and without a GPU's
timing: blocks come one after the other, their threads take turns.
"""

import ctypes
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.worker.runners.gpu.device.compiler import kernel_directory
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.features import Capability, Features, features_of
from nightmill.worker.runners.gpu.device.operands import PANEL_ROWS, Format
from nightmill.worker.runners.gpu.device.sources import Source, for_element
from nightmill.worker.runners.kv_format import KvFormat
from tests.support.needs import Need, missing

HERE = Path(__file__).parent / "cuda_on_host"
KEPT = Path(__file__).parents[3] / "build" / "host_kernels"
"""Compiled kernels, for all test processes and for later runs, named by a digest of all they are made of."""
_DYNAMIC = re.compile(r"extern __shared__[^;]*?(\w+)\[\];")
_WITH_DYNAMIC = re.compile(r'#include "(products/[^"]+)"')
_LAUNCH = """
#include "warps_on_host.h"
#include "{path}"
#include <utility>

template <typename... Arguments, size_t... I>
void launch_with(void (*kernel)(Arguments...), void* const* values, int threads, std::index_sequence<I...>) {{
    auto run = [=] {{ kernel(*static_cast<std::remove_const_t<Arguments>*>(values[I])...); }};
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {{
                memset(host::dynamic_shared, 0xff, sizeof host::dynamic_shared);  // NaN
                host::run_block(threads, run);
            }}
}}

template <typename... Arguments>
void launch_all(void (*kernel)(Arguments...), void* const* values, int threads) {{
    launch_with(kernel, values, threads, std::index_sequence_for<Arguments...>());
}}

#define LAUNCHER(kernel) \\
    extern "C" void launch_##kernel(unsigned x, unsigned y, unsigned z, int threads, void* const* all) {{ \\
        gridDim = {{x, y, z}}, blockDim = {{unsigned(threads), 1, 1}}; \\
        launch_all(kernel, all, threads); \\
    }}
{launchers}
"""


class HostDevice:
    """In place of `Device`."""

    hopper = False  # there are no clusters
    compute_capability: Capability = (8, 0)
    multiprocessors = 40
    name = "host"

    def __init__(self, element: Element = Element.F16, kv: KvFormat = KvFormat.ELEMENT) -> None:
        self.element = element
        self.kv = kv
        self._held: dict[int, npt.NDArray[np.uint8]] = {}

    @property
    def features(self) -> Features:
        """Those of its compute capability."""
        return features_of(self.compute_capability)

    def allocate(self, size: int, purpose: str = "") -> int:
        room = np.empty(size + 16, dtype=np.uint8)
        address: int = -(-room.ctypes.data // 16) * 16
        self._held[address] = room
        return address

    def fill(self, address: int, value: int, size: int) -> None:
        ctypes.memset(address, value, size)

    def upload(self, array: npt.NDArray[Any], purpose: str = "") -> int:
        kept = np.ascontiguousarray(array)
        address = self.allocate(kept.nbytes)
        ctypes.memmove(address, kept.ctypes.data, kept.nbytes)
        return address

    def download(self, address: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(ctypes.string_at(address, size), dtype=dtype).reshape(shape).copy()

    def pinned(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.zeros(shape, dtype)

    def copy_in(self, address: int, array: npt.NDArray[Any]) -> None:
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def copy_rows_in(self, address: int, pitch: int, array: npt.NDArray[Any], width: int) -> None:
        for place, row in enumerate(array):
            ctypes.memmove(address + place * pitch, row.ctypes.data, width)

    def copy_out(self, array: npt.NDArray[Any], address: int) -> None:
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def free(self, address: int) -> None:
        del self._held[address]

    def synchronize(self) -> None:
        """All is done when it is launched."""


class HostModule:
    """In place of `Module` and `KernelPairs`: a file, compiled when a kernel of it is first launched.

    together: for all of its kernels that may be launched, of which those of attention take long each
    """

    folder: Path
    stands: str
    together: bool
    launched: set[str]

    def __init__(self, device: HostDevice, source: Source) -> None:
        self.source = for_element(source, device.element, device.kv)
        self.names: list[str] = []

    @classmethod
    def of(cls, device: HostDevice, source: Source) -> "HostModule":
        return cls(device, source)

    def function(self, name: str, arguments: str, **options: Any) -> "HostFunction":
        self.names.append(name)
        return HostFunction(self, name, re.findall(r"\d*[a-zA-Z]", arguments))


class HostFunction:
    """In place of `Function` and of a pair of them."""

    def __init__(self, module: HostModule, name: str, letters: list[str]) -> None:
        self._module, self._name, self._letters = module, name, letters
        self.many = self.few = self

    def of(self, rows: int) -> "HostFunction":
        return self

    def load(self) -> bool:
        return True

    def blocks_at_once(self, threads: int, shared: int) -> int:
        return 1

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, int, int],
        *arguments: int | float | bytes,
        **options: Any,
    ) -> None:
        module = self._module
        names = tuple(sorted({*module.names})) if module.together else (self._name,)
        stands = module.stands
        if stands == "models":
            stands = "rows" if module.source[0].parent.name == "rows" else "warps"
        library = _compiled(*module.source, names, module.folder, stands)
        packed = [
            ctypes.create_string_buffer(struct.pack(f"@{letter}", value), 128)
            for letter, value in zip(self._letters, arguments, strict=True)
        ]
        values = (ctypes.c_void_p * len(packed))(*map(ctypes.addressof, packed))
        library[f"launch_{self._name}"](*grid, *(1,) * (3 - len(grid)), block[0], values)
        module.launched.add(self._name)


class Staged:
    """In place of `Staging`: a tensor in one part."""

    def __init__(self, device: HostDevice, size: int = 0) -> None:
        self._device = device

    def parts(self, raw: npt.NDArray[np.uint8], unit: int) -> Iterator[tuple[int, int, int]]:
        yield self._device.upload(raw), 0, len(raw)

    def close(self) -> None:
        """Nothing is held."""


class HostMaps:
    """In place of `TensorMaps`."""

    def __init__(self, device: HostDevice) -> None:
        pass

    def __call__(self, address: int, rows: int, columns: int, box: int) -> bytes:
        return self.of_three(address, (1, rows, columns), (1, box))

    def of_three(self, address: int, sizes: tuple[int, int, int], box: tuple[int, int]) -> bytes:
        """As `TensorMap` in cuda_on_host's hopper.cuh; of a matrix, with one plane."""
        planes, rows, columns = sizes
        return struct.pack(
            "@P10i", address, columns, rows, planes, 2, 2 * columns, 2 * columns * rows, 64, box[1], box[0], 2
        )

    def of_fp8(self, address: int, rows: int, columns: int, box: int) -> bytes:
        """Bytes, in boxes of 128 columns."""
        sizes = (columns, rows, 1, 1, columns, columns * rows, 128, box, 1, 1)
        return struct.pack("@P10i", address, *sizes)

    def of_packed(self, address: int, rows: int, columns: int, format_: Format, panels: int) -> bytes:
        """Words of 8 bytes, a row of them a panel; boxes of a packet by so many panels."""
        words, all_panels = format_.packet // 8, -(-rows // PANEL_ROWS)
        row = -(-columns // format_.step) * words
        return struct.pack(
            "@P10i", address, row, all_panels, 1, 8, 8 * row, 8 * row * all_panels, words, panels, 1, 8
        )


@cache
def _compiled(
    path: Path, options: tuple[str, ...], kernels: tuple[str, ...], folder: Path, stands: str
) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    # To optimise more would take longer than it saves: most of the time goes into compiling.
    flags = ["-std=c++17", "-Og", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
    flags.append("-fno-gnu-unique")  # statics of templates would be one for all libraries of a process
    flags.append("-U_FORTIFY_SOURCE")  # which forbids jumps from one stack to another
    flags.append("-D__CUDA_ARCH_FEAT_SM90_ALL")
    made_of = repr((_sources_digest(), compiler, path.name, flags, options, kernels, stands))
    library = KEPT / f"{path.stem}-{hashlib.sha256(made_of.encode()).hexdigest()[:32]}.so"
    if library.exists():
        return ctypes.CDLL(str(library))
    place = Path(tempfile.mkdtemp(prefix=kernels[0], dir=folder))
    source, made = place / path.name, place / "launch.so"
    text = _WITH_DYNAMIC.sub(_included, path.read_text(encoding="utf-8"))
    source.write_text(_DYNAMIC.sub(r"unsigned char* const \1 = host::dynamic_shared;", text))
    launch = place / "launch.cpp"
    launchers = "\n".join(f"LAUNCHER({kernel})" for kernel in kernels)
    launch.write_text(_LAUNCH.format(path=source, launchers=launchers))
    includes = [f"-I{one}" for one in (HERE / stands, HERE, kernel_directory())]
    options = tuple(option.replace("\\,", ",") for option in options)  # as nvcc takes commas (`instances`)
    subprocess.run([compiler, *flags, *options, *includes, launch, "-o", made], check=True)
    KEPT.mkdir(parents=True, exist_ok=True)
    coming = library.with_name(f"{library.name}.{os.getpid()}")
    shutil.copy(made, coming)
    coming.rename(library)  # whole, or not there
    return ctypes.CDLL(str(library))


def _included(line: re.Match[str]) -> str:
    """The text of a header that declares dynamic memory, in place of its inclusion; else that."""
    text = (kernel_directory() / line[1]).read_text(encoding="utf-8")
    if not _DYNAMIC.search(text):
        return line[0]
    return _WITH_DYNAMIC.sub(_included, text.replace("#pragma once", ""))


def holds_on_host(source: Source, claims: Sequence[str]) -> None:
    """Compile a file with claims about its constants; raises CalledProcessError where one is not so."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        missing(Need.COMPILER)
    path, options = source
    text = _DYNAMIC.sub(r"unsigned char* const \1 = host::dynamic_shared;", path.read_text(encoding="utf-8"))
    lines = [
        '#include "warps_on_host.h"',
        text,
        *(f'static_assert({claim}, "as the host has it");' for claim in claims),
    ]
    includes = [f"-I{one}" for one in (HERE / "warps", HERE, kernel_directory())]
    flags = ["-std=c++17", "-w", "-fsyntax-only", "-x", "c++", "-D__CUDA_ARCH_FEAT_SM90_ALL"]
    command = [str(compiler), *flags, *options, *includes, "-"]
    subprocess.run(command, input="\n".join(lines), text=True, check=True, capture_output=True)


@cache
def _sources_digest() -> str:
    """Of all that kernels on the host are made of."""
    seen = hashlib.sha256(_LAUNCH.encode())
    for folder in (kernel_directory(), HERE):
        for file in sorted(path for path in folder.rglob("*") if path.suffix in (".cu", ".cuh", ".h")):
            seen.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return seen.hexdigest()
