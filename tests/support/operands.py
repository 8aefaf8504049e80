"""Operands of launchers, made of arrays."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.worker.runners.gpu.device.compiler import compile_all
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, FP8, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import for_element
from nightmill.worker.runners.gpu.kv_cache import PAGE, LayerCache
from nightmill.worker.runners.gpu.products.chooser import Products
from nightmill.worker.runners.gpu.products.elements.format import ElementProducts
from nightmill.worker.runners.gpu.products.elements.library import LibraryProducts
from nightmill.worker.runners.gpu.products.fp8.format import Fp8Format
from nightmill.worker.runners.gpu.products.packed.format import PackedProducts
from nightmill.worker.runners.gpu.products.packed.packed_few import PackedFew
from nightmill.worker.runners.gpu.products.packed.packed_gemm import PackedProduct, PackedTiles
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.shapes import Kernel, Kind, Shape, padded_rows
from nightmill.worker.runners.gpu.step_inputs import StepInputs, StepShape
from nightmill.worker.runners.gpu.weights.layout import NO_NORM, LayerWeights
from nightmill.worker.runners.kv_format import KvFormat
from tests.support.elements import as_words, from_words
from tests.support.fp8_pages import as_parts, from_parts

Array = npt.NDArray[Any]
MOST_ROWS, MOST_FFN = 4096, 4864  # of products with SwiGLU
MOST_UNPACKED = 2 * MOST_FFN * 1024 * ELEMENT.itemsize  # bytes that a packed matrix has as elements


def buffer(device: Device, array: Array) -> Buffer:
    """The array on the device."""
    return Buffer(device.upload(array), array.shape, array.dtype)


def room(device: Device, shape: Sequence[int], dtype: npt.DTypeLike) -> Buffer:
    """Of which nobody knows what it holds."""
    kind = np.dtype(dtype)
    return Buffer(device.allocate(int(np.prod(shape)) * kind.itemsize), tuple(shape), kind)


def elements(device: Device, array: Array) -> Buffer:
    """The array on the device, in its elements."""
    return Buffer(device.upload(as_words(array, device.element)), array.shape, ELEMENT)


def poisoned(device: Device, shape: Sequence[int], dtype: npt.DTypeLike) -> Buffer:
    """Full of NaN."""
    if np.dtype(dtype) == ELEMENT:
        return elements(device, np.full(shape, np.nan))
    return buffer(device, np.full(shape, np.nan, dtype=dtype))


def matrix(device: Device, array: Array) -> Matrix:
    """Weights (outputs, inputs) in the device's elements."""
    return Matrix(elements(device, array).address, *array.shape, device.element.format)


def fp8_room(device: Device, rows: int, columns: int) -> Buffer:
    """Rows of FP8 and their scales, all NaN."""
    numbers = device.upload(np.full((rows, columns), 0x7F, dtype=np.uint8))
    scales = device.upload(np.full(rows, np.nan, dtype=np.float32))
    return Buffer(numbers, (rows, columns), FP8, scales)


def fetched_fp8(device: Device, held: Buffer | Matrix, shape: tuple[int, int]) -> tuple[Array, Array]:
    """The first rows of FP8, as the numbers that they are, and their scales (rows, 1)."""
    numbers = e4m3_numbers()[device.download(held.address, shape, np.uint8)]
    return numbers, device.download(held.scales, (shape[0], 1), FLOAT)


def e4m3_numbers() -> Array:
    """What each of the 256 bytes stands for (Open Compute Project, 2023), float32."""
    byte = np.arange(256)
    exponents, mantissas = byte >> 3 & 15, byte & 7
    numbers = np.where(exponents, np.ldexp(8 + mantissas, exponents - 10), np.ldexp(mantissas, -9))
    numbers = np.where(byte & 127 == 127, np.nan, numbers)
    return np.where(byte & 128, -numbers, numbers).astype(np.float32)


def fetched(device: Device, held: Buffer, rows: int | None = None) -> Array:
    """What a buffer holds, or its first rows; bfloat16 as float."""
    shape = held.shape if rows is None else (rows, *held.shape[1:])
    if held.dtype == ELEMENT:
        return from_words(device.download(held.address, shape, np.uint16), device.element)
    return device.download(held.address, shape, held.dtype)


def cache_of(device: Device, keys: Array, values: Array) -> LayerCache:
    """Pages (pages, kv_heads, PAGE, head_dim) of keys and of values, as the device keeps them."""
    if device.kv is KvFormat.FP8:
        return LayerCache(*(buffer(device, as_parts(one, device.element)) for one in (keys, values)))
    return LayerCache(elements(device, keys), elements(device, values))


def pages_in(device: Device, cache: LayerCache, head_dim: int) -> list[Array]:
    """What a cache holds of keys, and of values: numbers (pages, kv_heads, PAGE, head_dim)."""
    held = [fetched(device, one) for one in (cache.keys, cache.values)]
    if device.kv is KvFormat.FP8:
        return [from_parts(one, head_dim, device.element) for one in held]
    return [one.reshape(*one.shape[:2], PAGE, head_dim) for one in held]


def inputs_of(device: Device, *, table_width: int = 0, **arrays: Array) -> StepInputs:
    """Step inputs of which only the arrays named are there."""
    fields: dict[str, int] = dict.fromkeys(StepInputs.__dataclass_fields__, 0)
    named = {name: device.upload(array) for name, array in arrays.items()}
    return StepInputs(**fields | {"table_width": table_width} | named)


def shape_of(**sizes: Any) -> StepShape:
    """A step of these sizes, all others 0."""
    return StepShape(**dict.fromkeys(("tokens", "sequences", "drawn", "draws", "tiles"), 0) | sizes)


def products_with(
    device: Device, gate_up: Buffer, kinds: Collection[Kind] = tuple(Kind), *, unpacked: int = 0,
    quantised: Buffer | None = None, packed: Collection[PackedProduct] = (),
) -> Products:  # fmt: skip
    """Products of these kinds, also with packed weights; with FP8 ones, if `quantised` has room for them."""
    activate = Activate(device)
    elements = ElementProducts(device, activate, gate_up, () if quantised is not None else kinds)
    rounded = None if quantised is None else Fp8Format().launcher(device, kinds, quantised)
    in_file = PackedProducts(device, packed, unpacked, elements, activate, gate_up)
    return Products(device, elements, in_file, rounded)


@contextmanager
def all_products(device: Device, *packed: Format) -> Iterator[Products]:
    """Products of up to MOST_ROWS rows, with SwiGLU of up to MOST_FFN, also of packed weights."""
    gate_up = room(device, (MOST_ROWS, 2 * MOST_FFN), ELEMENT)
    pairs = list(product(Kind, packed))
    if device.hopper:  # all at once, as a runner does
        files = PackedTiles.files(pairs) + PackedFew.files(pairs)
        sources = (for_element(source, device.element, device.kv) for source in files)
        compile_all(sources, device.architecture)
    products = products_with(device, gate_up, unpacked=MOST_UNPACKED, packed=pairs)
    yield products
    products.close()


class ByLibrary:
    """Products by the library's first guess."""

    def __init__(self, device: Device) -> None:
        self._products = LibraryProducts(
            device, Activate(device), room(device, (MOST_ROWS, 2 * MOST_FFN), ELEMENT)
        )

    def kernel(self, shape: Shape) -> Kernel:
        return self._products.candidates(shape)[0].kernel(shape)

    def __call__(self, x: Buffer, weight: Matrix, y: Buffer, rows: int, kind: Kind = Kind.PLAIN) -> None:
        """Queue it; operands have room for `padded_rows(rows)`."""
        shape = Shape(padded_rows(rows), weight.rows, weight.columns, kind, weight.format)
        self.kernel(shape)(x, weight, y)

    def close(self) -> None:
        self._products.close()


def layer_of_heads(bias: Buffer, gains: list[Buffer]) -> LayerWeights:
    """A layer that has what rotation reads: the bias of its heads, and the gains of queries and of keys."""
    unused = Matrix(0, 0, 0)
    return LayerWeights(
        attn_norm=NO_NORM, qkv=unused, qkv_bias=bias, q_norm=gains[0], k_norm=gains[1], attn_output=unused,
        ffn_norm=NO_NORM, gate_up=unused, ffn_down=unused,
    )  # fmt: skip
