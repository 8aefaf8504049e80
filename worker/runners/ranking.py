"""The head of a cross-encoder, which both runners leave to the host: a few rows a step, each by itself."""

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.ranking import RankHead
from nightmill.worker.model.spec import Norm, Role
from nightmill.worker.runners.base import SumArray
from nightmill.worker.runners.reference import ops

__all__ = ["Ranker"]

FloatArray = npt.NDArray[np.float32]


class Ranker:
    """Makes the relevance of a pair, as a logit, of its pooled states. Weights in float32.

    A row is computed by itself, with sums in an order that no other row and no library's threads change: so
    its bits are the same in any batch.
    """

    def __init__(self, file: GgufFile, head: RankHead, width: int) -> None:
        """Read the weights; raises ModelFileError, which names a tensor that holds what is not a number."""
        self._head = head
        self._weights = {
            role: np.ascontiguousarray(file.array(weight.names[0]), dtype=np.float32).reshape(weight.shape)
            for role, weight in head.weights(width).items()
        }
        for role, weight in head.weights(width).items():
            if not np.isfinite(self._weights[role]).all():
                file.fail(f"tensor {weight.names[0]}: holds what is not a number: download the file again")

    def __call__(self, total: SumArray, tokens: int) -> bytes:
        """Return the logit as float32 bytes, of the sum of a pair's states (width,), of so many tokens."""
        head, weights = self._head, self._weights
        x = (total / tokens if head.mean else total).astype(np.float32)
        if head.dense:
            x = _product(weights[Role.RANK_DENSE], x)
            if head.dense_bias:
                x = x + weights[Role.RANK_DENSE_BIAS]
            x = np.tanh(x) if head.activation is None else ops.gelu_erf(x[None])[0]
            if head.norm is not None:
                x = self._normed(head.norm, x)
        x = _product(weights[Role.RANK_OUTPUT], x)
        if head.output_bias:
            x = x + weights[Role.RANK_OUTPUT_BIAS]
        return x.astype("<f4").tobytes()

    def _normed(self, norm: Norm, x: FloatArray) -> FloatArray:
        normed: FloatArray = ops.layer_norm(x[None], self._weights[Role.RANK_NORM], norm.eps)[0]
        return normed + self._weights[Role.RANK_NORM_BIAS] if norm.bias else normed


def _product(matrix: FloatArray, x: FloatArray) -> FloatArray:
    """Multiply (rows, columns) with (columns,), without BLAS: its threads would share out the sums."""
    product: FloatArray = np.einsum("ij,j->i", matrix, x)
    return product
