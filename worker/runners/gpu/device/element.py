"""The type of a runner's weights, activations, keys and values: half, or bfloat16."""

from enum import Enum

from nightmill.worker.runners.gpu.device.operands import Format

__all__ = ["Element"]


class Element(Enum):
    """As `cuda/common/element.cuh` says, for which kernels are compiled; the value names it to people.

    Half has 11 bits of precision and ends at 65,504; bfloat16 has 8 bits and the range of float. Both take 2
    bytes, so that launches and the memory plan are the same.
    """

    F16 = "f16"
    BF16 = "bf16"

    @property
    def options(self) -> tuple[str, ...]:
        """For nvcc, of files that include `element.cuh`."""
        return ("-DELEMENT_BF16",) if self is Element.BF16 else ()

    @property
    def format(self) -> Format:
        """Of matrices that are not quantised."""
        return Format[self.name]

    @property
    def library_type(self) -> int:
        """As cuBLASLt calls it: CUDA_R_16F, CUDA_R_16BF of `cudaDataType`."""
        return 14 if self is Element.BF16 else 2

    @property
    def map_type(self) -> str:
        """As tensor maps call it: a name of `CUtensorMapDataType`."""
        suffix = "BFLOAT16" if self is Element.BF16 else "FLOAT16"
        return f"CU_TENSOR_MAP_DATA_TYPE_{suffix}"

    @property
    def largest(self) -> float:
        """The largest number."""
        return float.fromhex("0x1.fep127") if self is Element.BF16 else 65_504.0
