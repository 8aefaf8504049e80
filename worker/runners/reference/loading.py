"""The reference runner's weights: float32, each matrix as its products want it."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import LatentAttention, LayerSpec, Role, Weight
from nightmill.worker.runners.reference.rounding import as_fp8

__all__ = ["load", "load_layer"]

FloatArray = npt.NDArray[np.float32]
_AS_THEY_ARE = {Role.ROUTER, Role.INPUT_GATE, Role.INPUT_UP, Role.K_UP, Role.V_UP, Role.KV_UP}
"""Matrices of layers that are not rounded to FP8, and what is multiplied with them neither.

Experts are chosen by float32, a gate of a layer's own input reads the residual stream without a norm, and
matrices of each head are small.
"""


def load_layer(
    file: GgufFile, layer: LayerSpec, weights: Mapping[Role, Weight], *, fp8: bool = False
) -> dict[Role, FloatArray]:
    """Read a layer's weights as `load` does; matrices that make keys and values of a latent are two.

    In FP8, the last rows of MIXER_INPUT that control a state are a matrix of their own, which is not rounded.
    """
    loaded = load(file, weights, fp8=fp8)
    if fp8 and (controls := layer.controls):
        stacked = np.concatenate([file.array(name) for name in weights[Role.MIXER_INPUT].names])
        loaded[Role.MIXER_INPUT] = np.ascontiguousarray(loaded[Role.MIXER_INPUT][:, :-controls])
        loaded[Role.MIXER_CONTROLS] = np.ascontiguousarray(stacked[-controls:].T)
    mixer = layer.mixer
    if isinstance(mixer, LatentAttention) and mixer.fused:
        both = loaded.pop(Role.KV_UP).reshape(mixer.heads, -1, mixer.latent)
        loaded[Role.K_UP] = np.ascontiguousarray(both[:, : mixer.key_dim])
        loaded[Role.V_UP] = np.ascontiguousarray(both[:, mixer.key_dim :].swapaxes(1, 2))
    return loaded


def load(file: GgufFile, weights: Mapping[Role, Weight], *, fp8: bool = False) -> dict[Role, FloatArray]:
    """Read weights; matrices become (inputs, outputs): tokens are rows, and multiply from the left.

    fp8  round matrices to FP8
    """

    def read(role: Role, weight: Weight) -> FloatArray:
        stacked = np.concatenate([file.array(name) for name in weight.names])
        if not (weight.is_matrix or weight.is_matrices):
            return stacked
        if fp8 and role not in _AS_THEY_ARE:
            stacked = as_fp8(stacked).astype(np.float32, copy=False)
        return np.ascontiguousarray(stacked.swapaxes(-1, -2))

    return {role: read(role, weight) for role, weight in weights.items()}
