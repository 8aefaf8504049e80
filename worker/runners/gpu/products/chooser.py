"""Products with weights, each by the kernel that is fastest for its sizes; see `gpu.shapes`."""

from collections.abc import Callable, Sequence

from nightmill.worker.model.spec import Activation
from nightmill.worker.runners.gpu.device.device import CudaError, Device
from nightmill.worker.runners.gpu.device.operands import Buffer, Format, Matrix
from nightmill.worker.runners.gpu.products.agreeing import Agreement
from nightmill.worker.runners.gpu.products.clock import Choices, KernelClock, Naming
from nightmill.worker.runners.gpu.products.elements.format import ElementProducts
from nightmill.worker.runners.gpu.products.elements.library import library_release
from nightmill.worker.runners.gpu.products.packed.format import PackedProducts
from nightmill.worker.runners.gpu.products.remembered import RememberedChoices, choices_file
from nightmill.worker.runners.gpu.shapes import (
    Candidate,
    Kernel,
    Kind,
    ProductLauncher,
    Shape,
    padded_rows,
)

__all__ = ["Product", "Products"]


class Product:
    """A product of one size and kind for any number of rows; layers of equal sizes share it.

    Can be captured in a graph.
    """

    __slots__ = ("_agreement", "_choices", "_kernels", "_shape")

    def __init__(
        self,
        clock: KernelClock,
        agreement: Agreement,
        candidates: Callable[[Shape], list[Candidate]],
        shape: Callable[[int], Shape],
    ) -> None:
        self._shape = shape
        self._agreement = agreement
        self._kernels: dict[int, Kernel] = {}
        """By padded rows."""
        self._choices: Choices[Candidate] = Choices(
            clock, lambda rows: candidates(shape(rows)), lambda one, rows: one.suits(shape(rows)),
            lambda one, rows: agreement.trusts(one, shape(rows)),
            Naming(shape(1).title, _name, lambda one: one.name),
        )  # fmt: skip

    def __call__(self, x: Buffer, weight: Matrix, y: Buffer, rows: int) -> None:
        """Queue it; all have room for `padded_rows(rows)`."""
        if rows:
            padded = padded_rows(rows)
            (self._kernels.get(padded) or self._choose(padded))(x, weight, y)

    def tune(
        self, x: Buffer, weights: Sequence[Matrix], y: Buffer, rows: int, beside: Callable[[], None]
    ) -> None:
        """Time the kernels for so many rows on these operands and remember the fastest.

        weights  several, so that they come from memory as in a step, not from the cache
        beside   queues a kernel as it stands before and after the product in a step (`KernelClock.ranked`)

        Those that give other bits than they should are left out (`Agreement`). Waits for the device. What is
        at `x` and `y` is overwritten. A size is tuned once.
        """
        padded = padded_rows(rows)
        shape = self._shape(padded)

        def runs(candidate: Candidate) -> Callable[[int], None]:
            kernel = candidate.kernel(shape)
            return lambda turn: kernel(x, weights[turn % len(weights)], y)

        def worthy(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
            return self._agreement.agreeing(candidates, shape, x, weights[0], y)

        if self._choices.tune(padded, runs, beside, worthy):
            self._choose(padded)

    @property
    def activation(self) -> Activation | None:
        """Activation of the gate, if the product has it inside."""
        return self._shape(1).kind.activation

    @property
    def tuned(self) -> dict[int, str]:
        """Names of the kernels that were fastest, by rows."""
        return {rows: kernel.name for rows, kernel in sorted(self._choices.tuned.items())}

    def _choose(self, rows: int) -> Kernel:
        kernel = self._kernels[rows] = self._choices.best(rows).kernel(self._shape(rows))
        return kernel


class Products:
    """All products of a model with weights of any format.

    elements  products with weights that are elements
    packed    those with weights in GGUF's formats
    rounded   those with weights in the format that layers are rounded to when they are loaded
    """

    def __init__(
        self, device: Device, elements: ElementProducts, packed: PackedProducts | None = None,
        rounded: ProductLauncher | None = None,
    ) -> None:  # fmt: skip
        self._elements = elements
        self._launchers = [one for one in (elements, packed, rounded) if one is not None]
        self.takes_packed = packed is not None and packed.multiplies
        """True if kernels multiply packed weights as they are."""
        beside = f"{device.element.name}, KV {device.kv.name}, cuBLASLt {library_release()}"
        remembered = RememberedChoices(choices_file(device, beside))
        self.clock = KernelClock(device, elements.scratch, ElementProducts.workspace(), remembered)
        self._agreement = Agreement(device, self._reference)
        self._packed = packed
        self._format = device.element.format
        self._known: dict[tuple[Kind, int, int, Format], Product] = {}

    def of(self, kind: Kind, outputs: int, inputs: int, weights: Format | None = None) -> Product:
        """The product of these sizes with weights of a format; None: elements."""
        weights = weights or self._format
        key = kind, outputs, inputs, weights
        if key not in self._known:
            self._known[key] = Product(
                self.clock,
                self._agreement,
                self._candidates,
                lambda rows: Shape(rows, outputs, inputs, kind, weights),
            )
        return self._known[key]

    def tuned(self) -> dict[str, dict[int, str]]:
        """The fastest kernel by the number of rows, by product (`swiglu 4864 x 896, f16`); for a person."""
        return {
            Shape(1, outputs, inputs, kind, weights).title: product.tuned
            for (kind, outputs, inputs, weights), product in self._known.items()
        }

    def left_out(self) -> dict[str, list[str]]:
        """Names of kernels that gave other bits than they should and were not chosen, by product."""
        return {product: sorted(names) for product, names in self._agreement.left_out.items()}

    def close(self) -> None:
        """Let go of cuBLASLt; the memory goes with the device."""
        self._elements.close()

    def _reference(self, shape: Shape) -> Candidate | None:
        """The kernel whose bits a product has; None if that is not known."""
        if self._packed is not None and shape.format is not self._format:
            return self._packed.reference(shape, self._elements.reference)
        return self._elements.reference(shape)

    def _candidates(self, shape: Shape) -> list[Candidate]:
        """Everything that can compute this shape, the best guess first; raises CudaError if nothing can."""
        found = [one for launcher in self._launchers for one in launcher.candidates(shape)]
        if not found:
            raise CudaError(f"no kernel computes the product {shape}: sizes are multiples of 8")
        return found


def _name(candidate: Candidate) -> str:
    """A name that no other candidate has."""
    return f"{candidate.name} {candidate.algorithm.hex()}".rstrip()
