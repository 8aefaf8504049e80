"""From the keys of a GGUF file to a `ModelSpec`: one module a family, listed here."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from nightmill.worker.model.families.checks import check_tensors
from nightmill.worker.model.families.cohere import cohere2, command_r
from nightmill.worker.model.families.deepseek2 import deepseek2
from nightmill.worker.model.families.encoders import bert, modern_bert, nomic_bert
from nightmill.worker.model.families.ernie4_5 import ernie4_5, ernie4_5_moe
from nightmill.worker.model.families.exaone4 import exaone4
from nightmill.worker.model.families.gemma import gemma2, gemma3
from nightmill.worker.model.families.gemma4 import gemma4
from nightmill.worker.model.families.glm4 import glm4, glm4moe
from nightmill.worker.model.families.gpt_oss import gpt_oss
from nightmill.worker.model.families.granite import granite, granitehybrid, granitemoe
from nightmill.worker.model.families.hunyuan import hunyuan_dense
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.families.lfm2 import lfm2, lfm2moe
from nightmill.worker.model.families.llama import llama
from nightmill.worker.model.families.mistral3 import mistral3
from nightmill.worker.model.families.nemotron_h import nemotron_h, nemotron_h_moe
from nightmill.worker.model.families.olmo2 import olmo2
from nightmill.worker.model.families.olmoe import olmoe
from nightmill.worker.model.families.phi3 import phi3
from nightmill.worker.model.families.qwen2 import qwen2
from nightmill.worker.model.families.qwen3 import qwen3, qwen3moe
from nightmill.worker.model.families.qwen35 import qwen3next, qwen35, qwen35moe
from nightmill.worker.model.families.ranking import rank_head
from nightmill.worker.model.families.seed_oss import seed_oss
from nightmill.worker.model.families.smollm3 import smollm3
from nightmill.worker.model.families.stablelm import stablelm
from nightmill.worker.model.families.starcoder2 import starcoder2
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.pooling import pooling_of
from nightmill.worker.model.spec import ModelSpec

__all__ = ["FAMILIES", "read_spec"]

FAMILIES: Final[dict[str, Callable[[Keys], ModelSpec]]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "phi3": phi3,
    "smollm3": smollm3,
    "granite": granite,
    "mistral3": mistral3,
    "olmo2": olmo2,
    "ernie4_5": ernie4_5,
    "exaone4": exaone4,
    "glm4": glm4,
    "starcoder2": starcoder2,
    "stablelm": stablelm,
    "command-r": command_r,
    "cohere2": cohere2,
    "hunyuan-dense": hunyuan_dense,
    "seed_oss": seed_oss,
    "qwen35": qwen35,
    "lfm2": lfm2,
    "granitehybrid": granitehybrid,
    "nemotron_h": nemotron_h,
    "qwen3moe": qwen3moe,
    "qwen35moe": qwen35moe,
    "gpt-oss": gpt_oss,
    "granitemoe": granitemoe,
    "lfm2moe": lfm2moe,
    "olmoe": olmoe,
    "nemotron_h_moe": nemotron_h_moe,
    "glm4moe": glm4moe,
    "ernie4_5-moe": ernie4_5_moe,
    "qwen3next": qwen3next,
    "deepseek2": deepseek2,
    "bert": bert,
    "nomic-bert": nomic_bert,
    "modern-bert": modern_bert,
}
"""By `general.architecture`."""


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the model spec of a file, proved against the file: metadata and every tensor's shape agree.

    Nothing is assumed about a family's sizes. What the metadata lacks is read off tensors' shapes; what is
    missing or contradictory raises ModelFileError, which names the key or tensor.
    """
    name = file.string("general.architecture")
    family = FAMILIES.get(name)
    if family is None:
        file.fail(f"general.architecture: {name!r} is not supported; supported are {', '.join(FAMILIES)}")
    if not file.tensors:
        file.fail("holds no tensors, only a vocabulary; give a file with the model's weights")
    keys = Keys(file, name)
    spec = family(keys)
    spec = replace(spec, ranking=rank_head(file, spec))
    keys.refuse_other_arithmetic()
    check_tensors(file, spec, keys.skipped)
    types = {name: tensor.kind.name for name, tensor in file.tensors.items()}
    return replace(spec, tensor_types=types, pooling=pooling_of(file, name, encodes=spec.encoder is not None))
