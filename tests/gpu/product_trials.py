"""Tries the products of real models on the GPU; a process of its own, since a kernel may trap or never end.

    python -m tests.gpu.product_trials KIND FORMAT[+] [OPTION ...]

Each way that the chooser has for a product computes it at several numbers of rows. All results with most rows
are held against cuBLASLt over elements that `dequantize.cu` makes, and some of them against NumPy in float64;
all other results must have their bits. What may not be read is NaN, what may not be written is looked at
afterwards. Before anything that may hang, a line says what comes.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, islice

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.spec import Activation
from nightmill.worker.runners.gpu.device import compiler
from nightmill.worker.runners.gpu.device.compiler import compile_all
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, FP8, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, for_element, source_of
from nightmill.worker.runners.gpu.products.chooser import Products
from nightmill.worker.runners.gpu.products.elements import hopper_gemm, hopper_split
from nightmill.worker.runners.gpu.products.elements.library import LibraryProducts
from nightmill.worker.runners.gpu.products.fp8 import hopper_fp8
from nightmill.worker.runners.gpu.products.fp8.quantise import Quantise
from nightmill.worker.runners.gpu.products.packed.packed_few import PackedFew
from nightmill.worker.runners.gpu.products.packed.packed_gemm import PackedTiles
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.shapes import SUMMED, Kernel, Kind, Shape, padded_rows
from nightmill.worker.runners.reference.rounding import as_fp8
from tests.gpu.comparing_on_gpu import SOURCE, ResultsOnGpu
from tests.gpu.resident import ResidentWeights
from tests.support.cuda_runners import pretended_card
from tests.support.operands import products_with
from tests.support.real_products import RealProduct, real_products, rows_of

__all__ = ["DONE", "group_of", "groups", "main"]

DONE = "tried"
"""How the last line begins if nothing was wrong."""
HEAD_ROOM = 64 << 20
"""Bytes in which the head becomes elements, piece by piece: those that a model's largest matrix has."""
ABSOLUTE, RELATIVE = 2e-3, 2e-3
"""Of results: times their root mean square, and times a result itself. Half rounds by 5e-4."""
UNROUNDED = 500
"""Times that, where weights and activations become E4M3, against the library, which takes elements."""
OF_FP8 = 4
"""Times that, against NumPy, which rounds them, too: sums in tensor cores have fewer bits there."""
SMALLEST_HALF = (
    2.0**-24
)  # halves near zero are as far apart, and gate and up are rounded before their product
MOST_FAULTS = 3  # that are reported of a product
GUARD = 4096  # bytes before results that nobody may write
SAMPLES = 6
X_SCALE = 2.0**-13  # of activations, which are whole numbers of 8 bits times that

Say = Callable[[str], None]
Words = npt.NDArray[np.float64]


def group_of(product: RealProduct) -> tuple[str, str]:
    """Products that a process tries together: those of a kind and format, or of mixtures that begin alike."""
    first = product.parts[0].format
    return product.kind, first if len(product.parts) == 1 else f"{first}+"


def groups() -> list[tuple[str, str]]:
    """All of them."""
    return sorted({group_of(product) for product in real_products()})


def main(kind: str, formats: str, *options: str) -> int:
    """Try a group, with kernels compiled with these options, if any is given; 1 if anything was wrong."""
    if options:
        compiler.COMMON_OPTIONS = options
    began = time.monotonic()
    chosen = [one for one in real_products() if group_of(one) == (kind, formats)]
    by_formats: dict[tuple[str, ...], list[RealProduct]] = defaultdict(list)
    for product in chosen:
        by_formats[tuple(part.format for part in product.parts)].append(product)
    wrong = tried = 0
    with Device(pretended=pretended_card()) as device:
        say(f"compiling for {len(chosen)} products of {kind} {formats}")
        compile_all(sources_of(device, Kind(kind), list(by_formats)), device.architecture)
        trial = Trial(device, Kind(kind), chosen)
        for names, products in by_formats.items():
            trial.take([Format[name] for name in dict.fromkeys(names)], products)
            for product in products:
                for fault in islice(trial.faults(product), MOST_FAULTS):
                    say(f"WRONG: {fault}")
                    wrong += 1
        tried = trial.launched
    say(f"{DONE if not wrong else f'{wrong} wrong of'} {tried:,} launches of {len(chosen)} products in "
        f"{time.monotonic() - began:.0f} s")  # fmt: skip
    return min(wrong, 1)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def sources_of(device: Device, kind: Kind, formats: Sequence[Sequence[str]]) -> list[Source]:
    """What the launchers of a kind are compiled from."""
    packed = {Format[name] for names in formats for name in names if Format[name].packed}
    pairs = [(kind, kept) for kept in packed]
    names = ["dequantize", "repack", "unpack", "activate", "quantise"]
    sources = [SOURCE, *map(source_of, names), *PackedFew.files(pairs), *PackedTiles.files(pairs)]
    if not device.hopper:  # what its launchers load is compiled as it comes
        sources = [SOURCE, *map(source_of, names)]
    elif any(Format[name].plain for name in chain(*formats)):
        sources += [*hopper_gemm._sources([kind]).values(), *hopper_split._sources([kind]).values()]
    if device.hopper and any(Format[name] is Format.FP8 for name in chain(*formats)):
        sources += hopper_fp8._sources([kind]).values()
    return [for_element(source, device.element, device.kv) for source in sources]


class Trial:
    """Tries products of one kind.

    launched  ways that were tried so far, at all numbers of rows
    """

    def __init__(self, device: Device, kind: Kind, products: Sequence[RealProduct]) -> None:
        self._device, self._kind = device, kind
        self._compared = ResultsOnGpu(device)
        self.launched = 0
        self._weights: dict[Format, ResidentWeights] = {}
        self._products: Products | None = None
        self._floats = kind in (Kind.FLOAT, *SUMMED)
        self._dtype = FLOAT if self._floats else ELEMENT
        self._most_rows = max(rows_of(products[0]))
        numbers = np.random.default_rng(1).integers(
            -127, 128, self._most_rows * max(one.inputs for one in products), dtype=np.int8
        )
        self._x = numbers.astype(np.float16) * np.float16(X_SCALE)
        self._held = device.upload(self._x, "activations")
        inner = 2 * max(one.outputs for one in products) if kind.activation else 8
        room = device.allocate(self._most_rows * inner * ELEMENT.itemsize, "gate and up")
        self._gate_up = Buffer(room, (self._most_rows, inner), ELEMENT)
        self._library = LibraryProducts(device, Activate(device), self._gate_up)
        most = max(one.outputs for one in products) if kind is Kind.RESIDUAL else 0
        self._before = np.random.default_rng(2).standard_normal(self._most_rows * most, dtype=np.float32)
        self._before_at = device.upload(self._before, "a residual stream")

    def take(self, formats: Sequence[Format], products: Sequence[RealProduct]) -> None:
        """Have the launchers of a model whose matrices have these formats."""
        if self._products is not None:
            self._products.close()
        packed = [(self._kind, kept) for kept in formats if kept.packed]
        sizes = [sum(part.rows for part in one.parts) * one.inputs * ELEMENT.itemsize for one in products]
        room = HEAD_ROOM if self._kind is Kind.FLOAT else max(sizes)
        self._products = products_with(
            self._device, self._gate_up, [self._kind], unpacked=room if packed else 0,
            quantised=self._fp8_room(products) if Format.FP8 in formats else None, packed=packed,
        )  # fmt: skip
        for kept in formats:
            if kept not in self._weights:
                of_file = self._device.element.format if kept is Format.FP8 else kept
                self._weights[kept] = ResidentWeights(self._device, of_file)

    def faults(self, product: RealProduct) -> Iterator[str]:
        """What is wrong with a product, in words."""
        assert self._products is not None
        taken: list[int] = []

        def room(size: int) -> int:
            taken.append(self._device.allocate(size))
            return taken[-1]

        try:
            say(f"making the weights of {product}")
            plain = self._plain(product, room)
            weight = self._weight(product, plain, taken)
            results = self._most_rows * product.outputs * self._dtype.itemsize
            oracle, reference = room(results), room(results)
            x, y = room((self._most_rows + 8) * product.inputs * ELEMENT.itemsize), room(2 * GUARD + results)
            say(f"{product}: the library over elements")
            self._begin(oracle, results)
            element = self._device.element.format
            shape = Shape(self._most_rows, product.outputs, product.inputs, self._kind, element)
            held = Buffer(self._held, (self._most_rows, product.inputs), ELEMENT)
            self._library.candidates(shape)[0].kernel(shape)(held, plain, self._results(oracle, product))
            known = False
            for rows in sorted(rows_of(product), reverse=True):
                shape = Shape(padded_rows(rows), product.outputs, product.inputs, self._kind, product.format)
                candidates = self._products._candidates(shape)
                if not candidates:
                    yield f"{product}: nothing computes {rows} rows"
                for candidate in candidates:
                    say(name := f"{product}, {rows} rows, {candidate.name}")
                    self._run(candidate.kernel(shape), product, rows, weight, x, y)
                    self.launched += 1
                    yield from (f"{name}: {fault}" for fault in self._strays(y, rows, product))
                    if not known:
                        self._compared.copy(reference, y + GUARD, results)
                        faults = [*self._against_oracle(reference, oracle, product)]
                        faults += self._against_numpy(reference, product)
                        yield from (f"{name}: {fault}" for fault in faults)
                        known = True
                    yield from (f"{name}: {fault}" for fault in self._other_bits(y, reference, rows, product))
        finally:
            for address in taken:
                self._device.free(address)

    def _plain(self, product: RealProduct, room: Callable[[int], int]) -> Matrix:
        rows, element = sum(part.rows for part in product.parts), self._device.element.format
        matrix = Matrix(room(element.bytes(rows, product.inputs)), rows, product.inputs, element)
        address = matrix.address
        for part in product.parts:
            self._weights[Format[part.format]].dequantise(part.rows, product.inputs, address)
            address += element.bytes(part.rows, product.inputs)
        return matrix

    def _weight(self, product: RealProduct, plain: Matrix, taken: list[int]) -> Matrix:
        """The matrix in the format that the product takes; plain: as elements."""
        if product.format.plain:
            return plain
        if product.format is Format.FP8:
            return self._rounded(plain, taken)
        parts = []
        for part in product.parts:
            parts.append(self._weights[Format[part.format]].packed(part.rows, product.inputs))
            taken.append(parts[-1].address)
        if len(parts) == 1:
            return parts[0]
        rows = sum(part.rows for part in parts)
        return Matrix(parts[0].address, rows, product.inputs, Format.MIXED, parts=tuple(parts))

    def _rounded(self, plain: Matrix, taken: list[int]) -> Matrix:
        taken.append(numbers := self._device.allocate(plain.rows * plain.columns + GUARD))
        taken.append(scales := self._device.allocate(plain.rows * FLOAT.itemsize))
        self._device.fill(numbers, 0xFF, plain.rows * plain.columns + GUARD)
        Quantise(self._device)(plain.address, numbers, scales, plain.rows, plain.columns)
        return Matrix(numbers, plain.rows, plain.columns, Format.FP8, scales)

    def _fp8_room(self, products: Sequence[RealProduct]) -> Buffer:
        """For activations that become FP8."""
        inputs = max(one.inputs for one in products)
        numbers = self._device.allocate(self._most_rows * inputs)
        scales = self._device.allocate(self._most_rows * FLOAT.itemsize)
        return Buffer(numbers, (self._most_rows, inputs), FP8, scales)

    def _results(self, address: int, product: RealProduct) -> Buffer:
        return Buffer(address, (self._most_rows, product.outputs), self._dtype)

    def _begin(self, address: int, size: int) -> None:
        """What is there before a product: what it is added to, or NaN."""
        if self._kind is Kind.RESIDUAL:
            self._compared.copy(address, self._before_at, size)
        else:
            self._device.fill(address, 0xFF, size)

    def _run(
        self, way: Kernel, product: RealProduct, rows: int, weight: Matrix, x: int, y: int
    ) -> None:  # fmt: skip
        """Compute it, for x with NaN in the rows of padding, and before and behind results."""
        row = product.outputs * self._dtype.itemsize
        padded, of_x = padded_rows(rows), product.inputs * ELEMENT.itemsize
        self._device.fill(x, 0xFF, (padded + 8) * of_x)
        self._compared.copy(x, self._held, rows * of_x)
        self._device.fill(y, 0xFF, 2 * GUARD + self._most_rows * row)
        self._begin(y + GUARD, rows * row)
        way(Buffer(x, (padded, product.inputs), ELEMENT), weight, self._results(y + GUARD, product))
        self._device.synchronize()

    def _strays(self, y: int, rows: int, product: RealProduct) -> Iterator[str]:
        """What was written before and behind the results."""
        row = product.outputs * self._dtype.itemsize
        end = GUARD + padded_rows(rows) * row
        for where, address, size in (
            ("before its results", y, GUARD),
            ("behind its rows", y + end, GUARD + (self._most_rows * row - (end - GUARD))),
        ):
            count, place = self._compared.not_poison(address, size)
            if count:
                yield f"wrote {count:,} words {where}, the first {4 * place:,} bytes from there"

    def _other_bits(self, y: int, reference: int, rows: int, product: RealProduct) -> Iterator[str]:
        size = rows * product.outputs * self._dtype.itemsize
        count, place = self._compared.other_bits(y + GUARD, reference, size)
        if count:
            at = 4 * place // self._dtype.itemsize
            where = f"row {at // product.outputs:,}, output {at % product.outputs:,}"
            yield f"{count:,} of {size // 4:,} words have other bits, the first at {where}"

    def _against_oracle(self, reference: int, oracle: int, product: RealProduct) -> Iterator[str]:
        count = self._most_rows * product.outputs
        size = self._row(oracle, 0, product)
        times = UNROUNDED if product.format is Format.FP8 else 1
        absolute = times * ABSOLUTE * float(np.sqrt(np.mean(np.square(size))))
        if not np.isfinite(absolute):
            yield "the library's results are not finite"
        wrong, place = self._compared.far(reference, oracle, self._dtype, count, absolute, times * RELATIVE)
        if wrong:
            where = f"row {place // product.outputs:,}, output {place % product.outputs:,}"
            yield f"{wrong:,} of {count:,} results are not the library's, the first at {where}"

    def _against_numpy(self, reference: int, product: RealProduct) -> Iterator[str]:
        """Some outputs of the first, a middle and the last row."""
        rng = np.random.default_rng(product.inputs)
        outputs = np.unique([0, product.outputs - 1, *rng.integers(0, product.outputs, SAMPLES)])
        for row in (0, self._most_rows // 2 + 1, self._most_rows - 1):
            found = self._row(reference, row, product)
            first = row * product.inputs
            x = self._x[first : first + product.inputs].astype(np.float64)
            if product.format is Format.FP8:
                x = as_fp8(x.astype(np.float32)).astype(np.float64)
            expected = self._expected(product, outputs, x)
            if self._kind is Kind.RESIDUAL:
                expected += self._before[row * product.outputs + outputs]
            times = OF_FP8 if product.format is Format.FP8 else 1
            scale = ABSOLUTE * np.sqrt(np.mean(np.square(found))) + 2 * RELATIVE * np.abs(expected)
            allowed = times * scale + (0 if self._floats else SMALLEST_HALF)
            wrong = ~(np.abs(found[outputs] - expected) <= allowed)
            if wrong.any():
                at = outputs[wrong][0]
                yield f"row {row}, output {at:,} is {found[at]}, and {expected[wrong][0]} by NumPy"

    def _row(self, address: int, row: int, product: RealProduct) -> Words:
        size = product.outputs * self._dtype.itemsize
        kind = np.float32 if self._floats else np.float16
        return self._device.download(address + row * size, product.outputs, kind).astype(np.float64)

    def _expected(self, product: RealProduct, outputs: npt.NDArray[np.int64], x: Words) -> Words:
        if self._kind.activation is None:
            return self._sums(product, outputs, x)
        gate, up = (
            sums.astype(np.float16).astype(np.float64)
            for sums in (
                self._sums(product, outputs, x),
                self._sums(product, outputs + product.outputs, x),
            )
        )
        return activated(gate, self._kind.activation) * up

    def _sums(self, product: RealProduct, outputs: npt.NDArray[np.int64], x: Words) -> Words:
        """The products of rows of the weight with x."""
        ends = list(accumulate(part.rows for part in product.parts))
        sums = []
        for output in outputs:
            index = int(np.searchsorted(ends, output, side="right"))
            part = product.parts[index]
            place = int(output) - (ends[index] - part.rows)
            row = self._weights[Format[part.format]].row(place, product.inputs)
            if product.format is Format.FP8:
                row = as_fp8(row.astype(np.float32)).astype(np.float64)
            sums.append(row @ x)
        return np.array(sums)


def activated(gate: Words, activation: Activation) -> Words:
    """The activation of a gate."""
    if activation is Activation.SILU:
        return gate / (1 + np.exp(-gate))
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return gate / 2 * (1 + np.tanh(inner))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
