"""Products by cuBLASLt: its algorithms for a shape, and how one of them is launched.

cuBLASLt thinks in columns: it sees y transposed = weight times x transposed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.worker.runners.gpu.device import CudaError, Device, KernelLaunchError

__all__ = ["WORKSPACE_BYTES", "Algorithm", "Library", "Product", "Way"]

WORKSPACE_BYTES = 32 << 20  # what cuBLAS recommends for Hopper
_CANDIDATES = 8
_COUNTER_BYTES = 1024  # of workspace, and no sums: for many rows, some hand out tiles by a counter of 4 bytes
_OCCUPYING_FILLS = 12  # of the workspace, 10 us each on an H200
_HALF, _FLOAT = 2, 0  # cudaDataType: CUDA_R_16F, CUDA_R_32F
_ALIGNMENT = 16  # bytes; rows of a chunk of logits start at multiples of 4 * vocab

Way = Callable[[int, int, int], None]
"""Queues a product of one shape, given the addresses of x, weight and y."""

Algorithm = npt.NDArray[Any]
"""One result of the library's heuristics, which begins with the algorithm."""


@dataclass(frozen=True, slots=True)
class Product:
    """y (rows, outputs) = x (rows, inputs) weight^T.

    floats  y is float, not half
    added   y += the product; float
    stride  from a row of x and of the weight to the next, in elements; 0: `inputs`
    """

    rows: int
    outputs: int
    inputs: int
    floats: bool = False
    added: bool = False
    stride: int = 0


def library_release() -> str:
    """cuBLASLt's version, as 130100."""
    from nvmath.bindings import cublasLt

    return str(cublasLt.get_version())


class Library:
    """A cuBLASLt handle for y (rows, outputs) = x (rows, inputs) weight^T on the device's stream.

    reproducible  only algorithms that sum in one piece, without workspace
    """

    def __init__(self, device: Device, *, reproducible: bool) -> None:
        from nvmath.bindings import cublas, cublasLt

        self._lt = cublasLt
        self._device = device
        self._stream = device.stream_handle
        self._layouts: dict[Product, tuple[int, int, int]] = {}
        self._workspace_bytes = 0 if reproducible else WORKSPACE_BYTES
        self._workspace = device.allocate(WORKSPACE_BYTES, "cuBLASLt's workspace")
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
            self._set(
                cublasLt.matmul_preference_set_attribute, self._preference, attribute.MAX_WORKSPACE_BYTES,
                np.array([self._workspace_bytes], dtype=np.uint64),
            )  # fmt: skip
            if reproducible:  # no splitting of the inputs, whose parts would have to be joined
                self._set(
                    cublasLt.matmul_preference_set_attribute, self._preference,
                    attribute.REDUCTION_SCHEME_MASK, np.zeros(1, dtype=np.uint32),
                )  # fmt: skip
            for name in "ABCD":
                self._set(
                    cublasLt.matmul_preference_set_attribute, self._preference,
                    attribute[f"MIN_ALIGNMENT_{name}_BYTES"], np.array([_ALIGNMENT], dtype=np.uint32),
                )  # fmt: skip
        except cublasLt.cuBLASLtError as error:
            raise CudaError(f"cuBLASLt could not be set up: {error}") from error

    def algorithms(self, product: Product) -> list[Algorithm]:
        """The library's candidates, its best guess first; raises CudaError where it has none."""
        weight, x, y = self._layout(product)
        results = np.zeros(_CANDIDATES, dtype=self._lt.matmul_heuristic_result_dtype)
        found = np.zeros(1, dtype=np.int32)
        try:
            self._lt.matmul_algo_get_heuristic(
                self._handle, self._operation, weight, x, y, y, self._preference, _CANDIDATES,
                results.ctypes.data, found.ctypes.data,
            )  # fmt: skip
        except self._lt.cuBLASLtError as error:
            raise CudaError(f"cuBLASLt has no algorithm for {product}: {error}") from error
        if not found[0]:
            raise CudaError(f"cuBLASLt has no algorithm for {product}")
        return [results[index : index + 1].copy() for index in range(int(found[0]))]

    def suits(self, algorithm: Algorithm, product: Product) -> bool:
        """Whether an algorithm that was found for another product can compute this one."""
        weight, x, y = self._layout(product)
        result = np.zeros(1, dtype=self._lt.matmul_heuristic_result_dtype)
        try:
            self._lt.matmul_algo_check(
                self._handle, self._operation, weight, x, y, y, algorithm.ctypes.data, result.ctypes.data
            )
        except self._lt.cuBLASLtError:
            return False
        return int(result["workspace_size"][0]) <= max(self._workspace_bytes, _COUNTER_BYTES)

    def way(self, algorithm: Algorithm, product: Product) -> Way:
        """How a product is computed with an algorithm. Raises KernelLaunchError when it is refused."""
        weight_layout, x_layout, y_layout = self._layout(product)
        lt, handle, operation, stream = self._lt, self._handle, self._operation, self._stream
        alpha, beta = self._one.ctypes.data, (self._one if product.added else self._zero).ctypes.data
        address, workspace = algorithm.ctypes.data, self._workspace

        def way(x: int, weight: int, y: int, _kept: Algorithm = algorithm) -> None:
            try:
                lt.matmul(
                    handle, operation, alpha, weight, weight_layout, x, x_layout, beta, y, y_layout, y,
                    y_layout, address, workspace, WORKSPACE_BYTES, stream,
                )  # fmt: skip
            except lt.cuBLASLtError as error:
                raise KernelLaunchError(f"cuBLASLt refused {product}: {error}") from error

        return way

    def occupy(self) -> None:
        """Give the device something to do while the host queues a graph and the events around it."""
        for _ in range(_OCCUPYING_FILLS):
            self._device.fill(self._workspace, 0, WORKSPACE_BYTES)

    def close(self) -> None:
        """Let go of cuBLASLt; the memory goes with the device."""
        if self._handle:
            self._lt.destroy(self._handle)
            self._handle = 0

    def _layout(self, product: Product) -> tuple[int, int, int]:
        """Of weight, x and y."""
        if product not in self._layouts:
            create = self._lt.matrix_layout_create
            kind = _FLOAT if product.floats or product.added else _HALF
            rows, outputs, inputs = product.rows, product.outputs, product.inputs
            stride = product.stride or inputs
            self._layouts[product] = (
                create(_HALF, inputs, outputs, stride),
                create(_HALF, inputs, rows, stride),
                create(kind, outputs, rows, outputs),
            )
        return self._layouts[product]

    @staticmethod
    def _set(setter: Any, descriptor: int, attribute: Any, value: npt.NDArray[Any]) -> None:
        setter(descriptor, int(attribute), value.ctypes.data, value.nbytes)
