"""Products with weights: cuBLASLt, and a kernel of our own for a few rows.

y (rows, outputs) = x (rows, inputs) times weight (outputs, inputs) transposed; x and the weight are half, y
half or float, sums float, all row-major. cuBLASLt thinks in columns: it sees y transposed = weight times x
transposed.

The number of rows is rounded up to one of few sizes, so that algorithms are chosen a bounded number of times:
x and y must have room for `padded_rows(rows)` rows. What the rows in between hold does not matter, and what
is written to them means nothing.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.runners.gpu.compiler import compile_kernels, kernel_directory
from worker.runners.gpu.device import CudaError, Device, Function, KernelLaunchError, Module

__all__ = ["Gemm", "padded_rows"]

log = logging.getLogger(__name__)

WORKSPACE_BYTES = 32 << 20  # what cuBLAS recommends for Hopper
MAX_GEMV_ROWS = 8
_CANDIDATES = 8  # algorithms that are timed
_TIMED_RUNS = 6
_HALF, _FLOAT = 2, 0  # cudaDataType: CUDA_R_16F, CUDA_R_32F
_ALIGNMENT = 16  # bytes; rows of a chunk of logits start at multiples of 4 * vocab
# Rows of the weight a warp _ warps a row; the last needs too many registers beyond 4 rows of x.
_GEMV_VARIANTS = ("1_4", "1_1", "2_1", "4_1")
_FEW_ROWS = 4


def padded_rows(rows: int) -> int:
    """The number of rows that is computed for `rows`: steps of 8, then 32, then 128."""
    step = 1 if rows <= 16 else 8 if rows <= 256 else 32 if rows <= 1024 else 128
    return -(-rows // step) * step


@dataclass(frozen=True, slots=True)
class _Shape:
    rows: int
    outputs: int
    inputs: int
    floats: bool


@dataclass(slots=True)
class _Plan:
    """How one shape is computed: layouts for cuBLASLt and its algorithms, or a kernel of ours."""

    weight: int
    x: int
    y: int
    algorithms: npt.NDArray[Any]  # results of the heuristics, best guess first
    algorithm: int  # address of the chosen one
    gemv: tuple[Function, tuple[int, int]] | None = None  # with its grid
    tuned: bool = False


class Gemm:
    """Multiplies on the device's stream; can be captured in a graph.

    own_kernels   use our kernel for up to 8 rows where `tune` found it faster, or where nothing was tuned
    reproducible  a row's result must not depend on how many rows there are: only algorithms that sum in one
                  piece, without workspace; those gave the same bits for 1 to 4,096 rows of ten shapes (H200,
                  CUDA 13.0). Our kernels sum in another order and are not used
    """

    def __init__(self, device: Device, *, own_kernels: bool = True, reproducible: bool = False) -> None:
        from nvmath.bindings import cublas, cublasLt

        self._device = device
        self._lt = cublasLt
        self._own = own_kernels and not reproducible
        self._reproducible = reproducible
        self._plans: dict[_Shape, _Plan] = {}
        self._workspace = device.allocate(WORKSPACE_BYTES, "cuBLASLt's workspace")
        self._alpha, self._beta = np.ones(1, dtype=np.float32), np.zeros(1, dtype=np.float32)
        self._stream = device.stream_handle
        self._module: Module | None = None
        if self._own:
            source = kernel_directory() / "gemv.cu"
            self._module = device.load(compile_kernels(source, (), device.architecture), source.name)
        self._functions: dict[str, Function] = {}
        self._started, self._ended = device.event(timing=True), device.event(timing=True)
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
                np.array([0 if reproducible else WORKSPACE_BYTES], dtype=np.uint64),
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

    def __call__(
        self, x: int, weight: int, y: int, rows: int, outputs: int, inputs: int, *, floats: bool = False
    ) -> None:
        """Queue y = x weight^T; the three are device addresses, aligned to 16 bytes."""
        if not rows:
            return
        shape = _Shape(padded_rows(rows), outputs, inputs, floats)
        plan = self._plans.get(shape) or self._plan(shape)
        self._run(shape, plan, x, weight, y)

    def tune(self, x: int, weights: Sequence[int], y: int, shape: tuple[int, int, int, bool]) -> None:
        """Time the candidates for (rows, outputs, inputs, floats) on these operands and keep the fastest.

        weights: several of that size, so that they come from memory as in a step, not from the cache.
        Waits for the device. What is at `y` is overwritten.
        """
        key = _Shape(padded_rows(shape[0]), *shape[1:])
        plan = self._plans.get(key) or self._plan(key)
        if plan.tuned:
            return
        plan.tuned = True
        size, first = plan.algorithms.itemsize, plan.algorithms.ctypes.data
        choices: list[tuple[int, tuple[Function, tuple[int, int]] | None]]
        choices = [(first + index * size, None) for index in range(len(plan.algorithms))]
        choices += [(first, gemv) for gemv in self._gemvs(key)]
        times = []
        for plan.algorithm, plan.gemv in choices:
            self._run(key, plan, x, weights[0], y)
            self._started.record(self._device.stream)
            for turn in range(_TIMED_RUNS):
                self._run(key, plan, x, weights[turn % len(weights)], y)
            self._ended.record(self._device.stream)
            self._device.wait(self._ended, "a product being timed")
            times.append(self._started.time_till(self._ended))
        plan.algorithm, plan.gemv = choices[int(np.argmin(times))]

    def close(self) -> None:
        """Let go of cuBLASLt; the memory goes with the device."""
        if self._handle:
            self._lt.destroy(self._handle)
            self._handle = 0

    def _run(self, shape: _Shape, plan: _Plan, x: int, weight: int, y: int) -> None:
        if plan.gemv is not None:
            function, grid = plan.gemv
            function(grid, (256, 1, 1), x, weight, y, shape.outputs, shape.inputs)
            return
        try:
            self._lt.matmul(
                self._handle, self._operation, self._alpha.ctypes.data, weight, plan.weight, x, plan.x,
                self._beta.ctypes.data, y, plan.y, y, plan.y, plan.algorithm, self._workspace,
                WORKSPACE_BYTES, self._stream,
            )  # fmt: skip
        except self._lt.cuBLASLtError as error:
            raise KernelLaunchError(f"cuBLASLt refused the product {shape}: {error}") from error

    def _plan(self, shape: _Shape) -> _Plan:
        lt = self._lt
        rows, outputs, inputs = shape.rows, shape.outputs, shape.inputs
        weight = lt.matrix_layout_create(_HALF, inputs, outputs, inputs)
        x = lt.matrix_layout_create(_HALF, inputs, rows, inputs)
        y = lt.matrix_layout_create(_FLOAT if shape.floats else _HALF, outputs, rows, outputs)
        results = np.zeros(_CANDIDATES, dtype=lt.matmul_heuristic_result_dtype)
        found = np.zeros(1, dtype=np.int32)
        try:
            lt.matmul_algo_get_heuristic(
                self._handle, self._operation, weight, x, y, y, self._preference, _CANDIDATES,
                results.ctypes.data, found.ctypes.data,
            )  # fmt: skip
        except lt.cuBLASLtError as error:
            raise CudaError(f"cuBLASLt has no algorithm for the product {shape}: {error}") from error
        if not found[0]:
            raise CudaError(f"cuBLASLt has no algorithm for the product {shape}")
        results = results[: found[0]]
        plan = _Plan(weight, x, y, results, results.ctypes.data)
        if gemvs := self._gemvs(shape):
            plan.gemv = gemvs[0] if outputs < 8192 else gemvs[-1]
        self._plans[shape] = plan
        return plan

    def _gemvs(self, shape: _Shape) -> list[tuple[Function, tuple[int, int]]]:
        """Our kernels that can compute this shape."""
        if self._module is None or shape.rows > MAX_GEMV_ROWS or shape.inputs % 8:
            return []
        found = []
        for variant in _GEMV_VARIANTS[: None if shape.rows <= _FEW_ROWS else -1]:
            per_warp, warps = map(int, variant.split("_"))
            per_block = per_warp * 8 // warps
            function = self._function(
                self._module, f"gemv_{shape.rows}_{variant}_{'f32' if shape.floats else 'f16'}"
            )
            found.append((function, (-(-shape.outputs // per_block), 1)))
        return found

    def _function(self, module: Module, name: str) -> Function:
        if name not in self._functions:
            self._functions[name] = module.function(name, "PPPii")
        return self._functions[name]

    @staticmethod
    def _set(setter: Any, descriptor: int, attribute: Any, value: npt.NDArray[Any]) -> None:
        setter(descriptor, int(attribute), value.ctypes.data, value.nbytes)
