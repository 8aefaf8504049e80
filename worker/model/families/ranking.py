"""The head of a cross-encoder, as llama.cpp's converter writes it."""

from dataclasses import replace

from nightmill.worker.model.feed_forward import Activation
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.pooling import ranks_pairs
from nightmill.worker.model.ranking import RankHead
from nightmill.worker.model.spec import ModelSpec

__all__ = ["rank_head"]

_MODERN = "modern-bert"
_OUTPUT = "cls.output.weight"


def rank_head(file: GgufFile, spec: ModelSpec) -> RankHead | None:
    """Read the head of an encoder whose file says that it ranks pairs; None if it is another model.

    BERT's takes the first token's state through its pooler (a dense layer and tanh), as XLM-RoBERTa's; that
    of ModernBERT the mean of all, through a dense layer, GELU and a norm. Raises ModelFileError.
    """
    encoder = spec.encoder
    if encoder is None or not ranks_pairs(file, spec.family):
        return None
    if _OUTPUT not in file.tensors:
        file.fail(
            f"tensor {_OUTPUT}: is missing, but {spec.family}.pooling_type says that the model ranks pairs"
        )
    for part in ("bias", "norm.weight"):
        if f"cls.{part}" in file.tensors and "cls.weight" not in file.tensors:
            file.fail(f"tensor cls.weight: is missing, but there is cls.{part}")
    modern = spec.family == _MODERN
    shape, norm = file.tensors[_OUTPUT].shape, None
    if "cls.norm.weight" in file.tensors:
        norm = replace(encoder.norm, bias="cls.norm.bias" in file.tensors)
    return RankHead(
        mean=modern,
        dense="cls.weight" in file.tensors,
        dense_bias="cls.bias" in file.tensors,
        activation=Activation.GELU_ERF if modern else None,
        norm=norm,
        output_bias="cls.output.bias" in file.tensors,
        labels=shape[0] if len(shape) > 1 else 1,
        second_type=encoder.token_types > 1 and encoder.positions > 0,
    )
