"""The type of a runner's weights, activations, keys and values: half, or bfloat16."""

from enum import Enum

from nightmill.worker.runners.gpu.device.operands import Format

__all__ = ["Element"]


class Element(Enum):
    """The 16-bit type that kernels are compiled for (`cuda/common/element.cuh`); the value names it.

    Half has 11 bits of precision and ends at 65,504; bfloat16 has 8 bits and the range of float. Both take 2
    bytes, so that launches and the memory plan are the same.
    """

    F16 = "f16"
    BF16 = "bf16"

    @property
    def options(self) -> tuple[str, ...]:
        """Options for nvcc, of files that include `element.cuh`."""
        return ("-DELEMENT_BF16",) if self is Element.BF16 else ()

    @property
    def format(self) -> Format:
        """Format of matrices that are not quantised."""
        return Format[self.name]

    @property
    def library_type(self) -> int:
        """Its `cudaDataType` for cuBLASLt: CUDA_R_16F, CUDA_R_16BF."""
        return 14 if self is Element.BF16 else 2

    @property
    def map_type(self) -> str:
        """Its name as a `CUtensorMapDataType`."""
        suffix = "BFLOAT16" if self is Element.BF16 else "FLOAT16"
        return f"CU_TENSOR_MAP_DATA_TYPE_{suffix}"

    @property
    def largest(self) -> float:
        """The largest number."""
        return float.fromhex("0x1.fep127") if self is Element.BF16 else 65_504.0
