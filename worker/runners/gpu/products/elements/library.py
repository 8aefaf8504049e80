"""Products by cuBLASLt, by those of its algorithms that sum in one piece.

So a row's result does not depend on how many rows there are, if those are left out that add in another
order (`products.agreeing`): some slice K among a block's warps. On an H200 with CUDA 13.0 those that were
timed gave the bits of our kernels for 1 to 4,096 rows of ten shapes. On Hopper, products with many inputs
and few outputs that are added to something have two sums (`first_sum`): there the library is called twice.

cuBLASLt thinks in columns: it sees y transposed = weight times x transposed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.worker.runners.gpu.device.device import CudaError, Device, KernelLaunchError
from nightmill.worker.runners.gpu.device.operands import ELEMENT, Buffer, Matrix
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.shapes import SUMMED, Candidate, Kernel, Kind, Shape, first_sum

__all__ = ["LibraryProducts", "library_release"]

_WORKSPACE_BYTES = 32 << 20  # what cuBLAS recommends for Hopper
_CANDIDATES = 8
_COUNTER_BYTES = 1024  # of workspace, and no sums: for many rows, some hand out tiles by a counter of 4 bytes
_FLOAT = 0  # cudaDataType: CUDA_R_32F
_ALIGNMENT = 16  # bytes; rows of a chunk of logits start at multiples of 4 * vocab

_Algorithm = npt.NDArray[Any]
"""One result of the library's heuristics, which begins with the algorithm."""


@dataclass(frozen=True, slots=True)
class _Call:
    """y (rows, outputs) = x (rows, inputs) weight^T, as the library is asked for it.

    floats  y is float, not elements
    added   y += the product; float
    stride  from a row of x and of the weight to the next, in elements
    pitch   from a row of y to the next, in its numbers
    """

    rows: int
    outputs: int
    inputs: int
    floats: bool
    added: bool
    stride: int
    pitch: int


def library_release() -> str:
    """cuBLASLt's version, as 130100."""
    from nvmath.bindings import cublasLt

    return str(cublasLt.get_version())


class _Library:
    """A cuBLASLt handle for products of matrices of elements on the device's stream."""

    def __init__(self, device: Device, workspace: int) -> None:
        from nvmath.bindings import cublas, cublasLt

        self._lt = cublasLt
        self._stream = device.stream_handle
        self._element = device.element.library_type
        self._layouts: dict[_Call, tuple[int, int, int]] = {}
        self._workspace = workspace
        self._one, self._zero = np.ones(1, dtype=np.float32), np.zeros(1, dtype=np.float32)
        try:
            self._handle = cublasLt.create()
            self._operation = cublasLt.matmul_desc_create(int(cublas.ComputeType.COMPUTE_32F), _FLOAT)
            self._set(
                cublasLt.matmul_desc_set_attribute, self._operation, cublasLt.MatmulDescAttribute.TRANSA,
                np.array([int(cublas.Operation.T)], dtype=np.int32),
            )  # fmt: skip
            attribute = cublasLt.MatmulPreferenceAttribute
            self._preference = cublasLt.matmul_preference_create()
            preferences = [
                (attribute.MAX_WORKSPACE_BYTES, np.uint64, 0),
                # No splitting of the inputs, whose parts would have to be joined.
                (attribute.REDUCTION_SCHEME_MASK, np.uint32, 0),
                *((attribute[f"MIN_ALIGNMENT_{name}_BYTES"], np.uint32, _ALIGNMENT) for name in "ABCD"),
            ]
            for name, kind, value in preferences:
                self._set(
                    cublasLt.matmul_preference_set_attribute, self._preference, name,
                    np.array([value], dtype=kind),
                )  # fmt: skip
        except cublasLt.cuBLASLtError as error:
            raise CudaError(f"cuBLASLt could not be set up: {error}") from error

    def algorithms(self, call: _Call) -> list[_Algorithm]:
        """The library's candidates, its best guess first; raises CudaError where it has none."""
        weight, x, y = self._layout(call)
        results = np.zeros(_CANDIDATES, dtype=self._lt.matmul_heuristic_result_dtype)
        found = np.zeros(1, dtype=np.int32)
        try:
            self._lt.matmul_algo_get_heuristic(
                self._handle, self._operation, weight, x, y, y, self._preference, _CANDIDATES,
                results.ctypes.data, found.ctypes.data,
            )  # fmt: skip
        except self._lt.cuBLASLtError as error:
            raise CudaError(f"cuBLASLt has no algorithm for {call}: {error}") from error
        if not found[0]:
            raise CudaError(f"cuBLASLt has no algorithm for {call}")
        return [results[index : index + 1].copy() for index in range(int(found[0]))]

    def suits(self, algorithm: _Algorithm, call: _Call) -> bool:
        """Return whether an algorithm that was found for another product can compute this one."""
        weight, x, y = self._layout(call)
        result = np.zeros(1, dtype=self._lt.matmul_heuristic_result_dtype)
        try:
            self._lt.matmul_algo_check(
                self._handle, self._operation, weight, x, y, y, algorithm.ctypes.data, result.ctypes.data
            )
        except self._lt.cuBLASLtError:
            return False
        return int(result["workspace_size"][0]) <= _COUNTER_BYTES

    def bound(self, algorithm: _Algorithm, call: _Call) -> Callable[[int, int, int], None]:
        """Queues a call for the addresses of x, weight and y; raises KernelLaunchError when it is refused."""
        weight_layout, x_layout, y_layout = self._layout(call)
        lt, handle, operation, stream = self._lt, self._handle, self._operation, self._stream
        alpha, beta = self._one.ctypes.data, (self._one if call.added else self._zero).ctypes.data
        address, workspace = algorithm.ctypes.data, self._workspace

        def queue(x: int, weight: int, y: int, _kept: _Algorithm = algorithm) -> None:
            try:
                lt.matmul(
                    handle, operation, alpha, weight, weight_layout, x, x_layout, beta, y, y_layout, y,
                    y_layout, address, workspace, _WORKSPACE_BYTES, stream,
                )  # fmt: skip
            except lt.cuBLASLtError as error:
                raise KernelLaunchError(f"cuBLASLt refused {call}: {error}") from error

        return queue

    def close(self) -> None:
        if self._handle:
            self._lt.destroy(self._handle)
            self._handle = 0

    def _layout(self, call: _Call) -> tuple[int, int, int]:
        """Make the layouts of weight, x and y."""
        if call not in self._layouts:
            create = self._lt.matrix_layout_create
            kind = _FLOAT if call.floats or call.added else self._element
            self._layouts[call] = (
                create(self._element, call.inputs, call.outputs, call.stride),
                create(self._element, call.inputs, call.rows, call.stride),
                create(kind, call.outputs, call.rows, call.pitch),
            )
        return self._layouts[call]

    @staticmethod
    def _set(setter: Any, descriptor: int, attribute: Any, value: npt.NDArray[Any]) -> None:
        setter(descriptor, int(attribute), value.ctypes.data, value.nbytes)


class LibraryProducts:
    """Launches cuBLASLt for weights that are elements; where there is a gate, the activation follows.

    activate, gate_up  which computes that, and room for gate and up, elements (rows, 2 F)
    """

    def __init__(self, device: Device, activate: Activate, gate_up: Buffer) -> None:
        self._activate = activate
        self._gate_up = gate_up
        self.scratch = device.allocate(self.workspace(), "cuBLASLt's workspace")
        """Address of so much memory, which may be overwritten between products."""
        self._library = _Library(device, self.scratch)
        self._two_sums = device.hopper
        self._format = device.element.format

    @staticmethod
    def workspace() -> int:
        """Bytes of device memory that it takes."""
        return _WORKSPACE_BYTES

    def candidates(self, shape: Shape) -> list[Candidate]:
        """The library's algorithms that compute all of a product, its best guess first."""
        if shape.format is not self._format:
            return []
        first, *others = self._calls(shape)
        found = self._library.algorithms(first)
        suited = (one for one in found if all(self._library.suits(one, call) for call in others))
        return [
            Candidate(
                "cuBLASLt", partial(self._kernel, one), partial(self._suits, one), one["algo"].tobytes()
            )
            for one in suited
        ]

    def close(self) -> None:
        """Let go of cuBLASLt; the memory goes with the device."""
        self._library.close()

    def _calls(self, shape: Shape) -> tuple[_Call, ...]:
        """Return the calls of the library for a product, one after the other."""
        kind = shape.kind
        outputs = shape.outputs if kind.activation is None else 2 * shape.outputs
        floats, added = kind in (Kind.FLOAT, Kind.ADDEND), kind is Kind.RESIDUAL
        pitch = shape.pitch or outputs
        whole = _Call(shape.rows, outputs, shape.inputs, floats, added, stride=shape.inputs, pitch=pitch)
        first = first_sum(shape.outputs, shape.inputs)
        if kind not in SUMMED or not self._two_sums or first == shape.inputs:
            return (whole,)
        return replace(whole, inputs=first), replace(whole, inputs=shape.inputs - first, added=True)

    def _suits(self, algorithm: _Algorithm, shape: Shape) -> bool:
        return all(self._library.suits(algorithm, call) for call in self._calls(shape))

    def _kernel(self, algorithm: _Algorithm, shape: Shape) -> Kernel:
        calls = self._calls(shape)
        first, *others = [self._library.bound(algorithm, call) for call in calls]
        if others:
            (second,), skipped = others, calls[0].inputs * ELEMENT.itemsize

            def two_sums(x: Buffer, weight: Matrix, y: Buffer) -> None:
                first(x.address, weight.address, y.address)
                second(x.address + skipped, weight.address + skipped, y.address)

            return two_sums
        if (activation := shape.kind.activation) is not None:
            activate, gate_up, rows = self._activate, self._gate_up, shape.rows

            def two_kernels(x: Buffer, weight: Matrix, y: Buffer) -> None:
                first(x.address, weight.address, gate_up.address)
                activate(gate_up, y, rows, activation)

            return two_kernels
        return lambda x, weight, y: first(x.address, weight.address, y.address)
