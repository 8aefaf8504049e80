"""Proves a file against a spec: each tensor that it names is there in its shape, and no other is."""

from nightmill.worker.model.families.keys import ROPE_DIVISORS
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec, Shape

__all__ = ["check_tensors"]


def check_tensors(file: GgufFile, spec: ModelSpec, skipped: tuple[str, ...] = ()) -> None:
    """Raise ModelFileError, which names the tensor, where one lacks, differs or is left over.

    skipped  what names of tensors begin with that may be left over. `cls.` is a head that ranks texts; that
             of a decoder leaves what the model generates as it is
    """
    weights = [weight for _, weight in spec.all_weights()]
    if spec.ranking is not None:
        weights += spec.ranking.weights(spec.width).values()
    expected = {name: shape for weight in weights for name, shape in weight.parts}
    for name, shape in expected.items():
        info = file.tensors.get(name)
        if info is None:
            file.fail(f"tensor {name}: is missing")
        if _without_ones(info.shape) != _without_ones(shape):
            file.fail(f"tensor {name}: has shape {info.shape}, expected {shape} from the metadata")
        file.require_readable(name)
    # Whatever else the file holds (experts, fused or extra biases, adapters) would change the results.
    # attn_rot_embd is the exception: old converters wrote the rotation's frequencies, which are derived.
    extra = [
        name
        for name in file.tensors
        if name not in expected
        and name not in ROPE_DIVISORS
        and not name.endswith(".attn_rot_embd")
        and not name.startswith((*skipped, "cls.") if spec.ranking is None else skipped)
    ]
    if extra:
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        file.fail(f"tensor {extra[0]}{more}: is not part of the supported {spec.family} model")


def _without_ones(shape: Shape) -> Shape:
    """The shape without leading dimensions of 1: converters write a vector as a matrix of one row, too."""
    first = next((index for index, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]
