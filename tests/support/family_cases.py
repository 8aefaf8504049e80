"""Each family from the keys that llama.cpp's converter writes for it, in small: is its spec the right one?"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.rope import Rope, RopeScaling, RopeStyle
from nightmill.worker.model.spec import (
    Activation,
    Attention,
    FeedForward,
    LayerSpec,
    ModelSpec,
    Norm,
    Temperature,
)
from tests.support.expert_cases import EXPERT_FILES
from tests.support.gemma4_cases import GEMMA4_FILES
from tests.support.ggufs import byte_vocabulary, spec_tensors, write_file
from tests.support.hybrid_cases import HYBRID_FILES

EPS = 2**-20
NORM = Norm(EPS)
HALVES = Rope(style=RopeStyle.HALVES, dim=16, base=10_000.0, scaling=RopeScaling(original_context=512))
PAIRS = replace(HALVES, style=RopeStyle.PAIRS)
STILL = Rope(style=RopeStyle.PAIRS, dim=0, base=10_000.0)
KEYS: dict[str, Any] = {
    "context_length": 512, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4,
    "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": EPS,
}  # fmt: skip
SIZED = {"attention.key_length": 16, "attention.value_length": 16}
BASED = {"rope.freq_base": 10_000.0, "rope.dimension_count": 16}


def layer(rope: Rope, *, feed_forward: dict[str, Any] | None = None, **more: Any) -> LayerSpec:
    """Attention of 4 heads of 16 and SwiGLU of 96, with other fields: the layer's, or the attention's."""
    own = {name: more.pop(name) for name in list(more) if name in LayerSpec.__dataclass_fields__}
    norms: dict[str, Any] = {"attention_norm": NORM, "feed_forward_norm": NORM}
    return LayerSpec(
        mixer=Attention(heads=4, kv_heads=2, head_dim=16, rope=rope, **more),
        feed_forward=FeedForward(width=96, **(feed_forward or {})),
        **(norms | own),
    )


def model(family: str, *layers: LayerSpec, **more: Any) -> ModelSpec:
    """A model of width 64 with a tied head, with other fields."""
    fields: dict[str, Any] = {
        "family": family, "name": "model", "width": 64, "vocab": len(byte_vocabulary().tokens),
        "context_length": 512, "layers": layers, "output_norm": NORM, "tied_head": True,
    }  # fmt: skip
    return ModelSpec(**(fields | more))


def attending(layer: LayerSpec, **changes: Any) -> LayerSpec:
    return replace(layer, mixer=replace(layer.attention, **changes))


AFTER = {"attention_post_norm": NORM, "feed_forward_post_norm": NORM}
AFTER_ALONE = AFTER | {"attention_norm": None, "feed_forward_norm": None}
GELU = {"activation": Activation.GELU}
GEMMA2 = layer(HALVES, softcap=50.0, feed_forward=GELU, **AFTER)
GEMMA2_LOCAL = attending(GEMMA2, window=4096)
GEMMA3 = layer(replace(HALVES, base=1e6), qk_norm=NORM, feed_forward=GELU, **AFTER)
GEMMA3_LOCAL = attending(GEMMA3, window=100, rope=Rope(style=RopeStyle.HALVES, dim=16, base=10_000.0))
YARN = RopeScaling("yarn", 4.0, original_context=128)
OLMO = layer(HALVES, qk_norm=NORM, qk_norm_whole=True, **AFTER_ALONE)
OLMO3 = attending(OLMO, rope=replace(HALVES, scaling=replace(YARN, own_magnitude=1.125)))
OLMO3_LOCAL = attending(OLMO, window=100, rope=Rope(style=RopeStyle.HALVES, dim=16, base=10_000.0))

EXAONE = layer(HALVES, qk_norm=NORM, **AFTER_ALONE)
CENTRED = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": EPS}
LAYER_NORM, WITH_BIAS = Norm(EPS, centred=True), Norm(EPS, centred=True, bias=True)
CENTRED_NORMS = {"attention_norm": WITH_BIAS, "feed_forward_norm": WITH_BIAS}
COHERE = layer(PAIRS, attention_norm=LAYER_NORM, feed_forward_norm=None, parallel=True)

SCALED: dict[str, Any] = {"embedding_scale": 8.0, "overflows_half": True}
FILES: dict[str, tuple[dict[str, Any], ModelSpec]] = {
    "gemma2": (
        SIZED
        | {
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
            "attention.sliding_window": 4096,
        },
        model("gemma2", GEMMA2_LOCAL, GEMMA2, logit_softcap=30.0, **SCALED),
    ),
    "gemma2, first files": (
        SIZED, model("gemma2", GEMMA2_LOCAL, GEMMA2, logit_softcap=30.0, **SCALED),
    ),
    "gemma3": (
        SIZED | {"rope.freq_base": 1e6, "attention.sliding_window": 100},
        model("gemma3", *[GEMMA3_LOCAL] * 5, GEMMA3, GEMMA3_LOCAL, **SCALED),
    ),
    "gemma3, later files": (
        SIZED
        | {
            "rope.freq_base": 1e6, "rope.freq_base_swa": 5000.0, "attention.sliding_window": 100,
            "attention.sliding_window_pattern": 2, "final_logit_softcapping": 30.0,
            "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
        },
        model(
            "gemma3",
            attending(GEMMA3_LOCAL, rope=replace(GEMMA3_LOCAL.attention.rope, base=5000.0)),
            attending(
                GEMMA3,
                rope=replace(
                    GEMMA3.attention.rope, scaling=RopeScaling("linear", 8.0, original_context=512)
                ),
            ),
            logit_softcap=30.0, **SCALED,
        ),
    ),
    "gemma3, without a window": (
        SIZED | {"rope.freq_base": 1e6}, model("gemma3", GEMMA3, GEMMA3, **SCALED),
    ),
    "phi3": (
        BASED | {"rope.scaling.original_context_length": 512, "attention.sliding_window": 100},
        model(
            "phi3", layer(HALVES, window=100, fused=True, feed_forward={"fused": True}), tied_head=False
        ),
    ),
    "phi3, with a window past its context": (
        {"attention.sliding_window": 1000},
        model("phi3", layer(HALVES, fused=True, feed_forward={"fused": True})),
    ),
    "phi3, without a window": (
        {"attention.sliding_window": 0},
        model("phi3", layer(HALVES, fused=True, feed_forward={"fused": True})),
    ),
    "phi3, partly rotated": (
        {"attention.sliding_window": 0, "rope.dimension_count": 12},
        model("phi3", layer(replace(HALVES, dim=12), fused=True, feed_forward={"fused": True})),
    ),
    "smollm3": (
        BASED | {"vocab_size": len(byte_vocabulary().tokens)},
        model("smollm3", *[layer(PAIRS)] * 3, layer(STILL), layer(PAIRS)),
    ),
    "granite": (
        BASED
        | {
            "attention.scale": 0.0625, "embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 8.0,
        },
        model(
            "granite", layer(PAIRS, scale=0.0625, residual_scale=0.25), embedding_scale=12.0,
            logit_scale=0.125,
        ),
    ),
    "granite without rotation": (
        BASED | {"rope.scaling.finetuned": False, "logit_scale": 1.0},
        model("granite", layer(STILL, bias=True, output_bias=True, feed_forward={"bias": True})),
    ),
    "olmo2": ({"rope.freq_base": 10_000.0}, model("olmo2", OLMO, OLMO, tied_head=False)),
    "olmo3": (
        {
            "attention.sliding_window": 100, "attention.sliding_window_pattern": [True, False, True],
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128, "rope.scaling.yarn_attn_factor": 1.125,
            "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
        },
        model("olmo2", OLMO3_LOCAL, OLMO3, OLMO3_LOCAL, tied_head=False),
    ),
    "ernie4_5": (SIZED | {"rope.freq_base": 10_000.0}, model("ernie4_5", layer(PAIRS))),
    "exaone4": ({"vocab_size": len(byte_vocabulary().tokens)}, model("exaone4", EXAONE, EXAONE)),
    "exaone4 with windows": (
        {"attention.sliding_window": 100, "attention.sliding_window_pattern": [True, False]},
        model(
            "exaone4", attending(EXAONE, window=100),
            attending(EXAONE, rope=replace(STILL, style=RopeStyle.HALVES)), tied_head=False,
        ),
    ),
    "glm4": (
        {"rope.dimension_count": 8},
        model(
            "glm4", layer(replace(PAIRS, dim=8), bias=True, feed_forward={"fused": True}, **AFTER),
            tied_head=False, overflows_half=True,
        ),
    ),
    "starcoder2": (
        CENTRED,
        model(
            "starcoder2",
            layer(
                HALVES, bias=True, output_bias=True, feed_forward=GELU | {"gated": False, "bias": True},
                **CENTRED_NORMS,
            ),
            output_norm=WITH_BIAS,
        ),
    ),
    "stablelm": (
        CENTRED | {"rope.dimension_count": 4, "use_parallel_residual": False},
        model(
            "stablelm", layer(replace(HALVES, dim=4), bias=True, **CENTRED_NORMS), output_norm=WITH_BIAS,
            tied_head=False,
        ),
    ),
    "stablelm, in parallel": (
        CENTRED | {"rope.dimension_count": 4, "use_parallel_residual": True},
        model(
            "stablelm",
            layer(
                replace(HALVES, dim=4), attention_norm=WITH_BIAS, feed_forward_norm=None, parallel=True,
            ),
            output_norm=WITH_BIAS,
        ),
    ),
    "command-r": (
        CENTRED | {"logit_scale": 0.0625, "rope.scaling.type": "none"},
        model("command-r", COHERE, logit_scale=0.0625, output_norm=LAYER_NORM),
    ),
    "cohere2": (
        CENTRED
        | {"logit_scale": 0.25, "rope.scaling.type": "none", "attention.sliding_window": 100} | BASED,
        model(
            "cohere2", *[attending(COHERE, window=100)] * 3, attending(COHERE, rope=STILL),
            logit_scale=0.25, output_norm=LAYER_NORM,
        ),
    ),
    "hunyuan-dense": (
        SIZED | {"rope.scaling.type": "none", "rope.scaling.factor": 1.0},
        model("hunyuan-dense", layer(HALVES, qk_norm=NORM, qk_norm_rotated=True)),
    ),
    "seed_oss": (
        SIZED,
        model(
            "seed_oss", layer(HALVES, bias=True, feed_forward_norm_name="post_attention_norm"),
            tied_head=False,
        ),
    ),
    "mistral3": (
        BASED | SIZED
        | {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128, "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.125,
        },
        model(
            "mistral3",
            layer(
                replace(PAIRS, scaling=replace(YARN, log_multiplier=1.0)),
                temperature=Temperature(0.125, 128),
            ),
        ),
    ),
}  # fmt: skip
GPU_FILES = FILES | {"gemma4": GEMMA4_FILES["gemma4"]}
"""Families that the CUDA runner computes: those without a state."""
FILES |= HYBRID_FILES | EXPERT_FILES | GEMMA4_FILES


def file_of(path: Path, keys: dict[str, Any], like: ModelSpec, **tensors: Any) -> GgufFile:
    """A file with these keys and the tensors of a spec; one that is None is left out."""
    keys = KEYS | {"block_count": len(like.layers)} | keys
    held = {name: one for name, one in (spec_tensors(like) | tensors).items() if one is not None}
    return GgufFile.open(write_file(path / "model.gguf", like.family, keys, held))


def spec_of(path: Path, keys: dict[str, Any], like: ModelSpec, **tensors: Any) -> ModelSpec:
    """What such a file says."""
    with file_of(path, keys, like, **tensors) as opened:
        return read_spec(opened)
