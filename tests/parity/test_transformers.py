"""The reference runner against PyTorch and transformers: same weights, every layer's output and the logits.

Needs torch and transformers, which are no dependency of this project; run with `pytest -m parity -s`.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from nightmill.jobs.contract import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.reference import ReferenceRunner
from tests.ggufs import byte_vocabulary, write_file

pytestmark = pytest.mark.parity

LIMIT = 1e-4
Array = npt.NDArray[np.float32]
VOCAB = len(byte_vocabulary().tokens)
SIZES = {
    "hidden_size": 96, "intermediate_size": 208, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1 + n / 20 for n in range(8)],
    "long_factor": [1 + n / 2 for n in range(8)],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A family's model: what its configuration says beyond SIZES, and which keys the converter writes for it.

    The keys that most families have are not given here; `converted_keys` says them.
    """

    family: str
    options: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    theta: float = 10_000.0
    local_theta: float | None = None
    scaling: dict[str, Any] | None = None
    tied: bool = True
    factors: dict[str, Array] = field(default_factory=dict)  # further tensors


GEMMA2 = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 0.5, "sliding_window": 40}
CASES = {
    "qwen2": Case("qwen2", {}, theta=1e6),
    "qwen2-seven-to-one": Case("qwen2", {"num_attention_heads": 14, "hidden_size": 112}, theta=1e6),
    "llama": Case("llama", {}, tied=False),
    "llama3": Case("llama", {}, theta=500_000.0, scaling=LLAMA3),
    "qwen2-yarn": Case("qwen2", {}, tied=False, scaling=YARN),
    "llama-linear": Case("llama", {}, scaling=LINEAR),
    "qwen3": Case("qwen3", {"head_dim": 32}, tied=False, theta=1e6),
    "gemma2": Case(
        "gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32} | GEMMA2,
        {
            "attn_logit_softcapping": 5.0, "final_logit_softcapping": 0.5, "attention.sliding_window": 40,
        },
    ),
    "gemma2-27b": Case(
        "gemma2", {"head_dim": 32, "num_hidden_layers": 46, "query_pre_attn_scalar": 16} | GEMMA2,
        {
            "attn_logit_softcapping": 5.0, "final_logit_softcapping": 0.5, "attention.sliding_window": 40,
        },
    ),
    "gemma3": Case(
        "gemma3",
        {
            "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 40, "num_hidden_layers": 7,
        },
        {"attention.sliding_window": 40}, theta=1e6, local_theta=10_000.0, scaling=LINEAR,
    ),
    "phi3": Case("phi3", {"sliding_window": 40}, {"attention.sliding_window": 40}, tied=False),
    "phi3-long": Case(
        "phi3", {"original_max_position_embeddings": 64},
        {
            "attention.sliding_window": 0, "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(512 / 64) / math.log(64)),
        },
        tied=False, scaling=LONGROPE,
    ),
    "phi3-short": Case(
        "phi3", {"original_max_position_embeddings": 512},
        {
            "attention.sliding_window": 0, "rope.scaling.original_context_length": 512,
            "rope.scaling.attn_factor": 1.0,
        },
        tied=False, scaling=LONGROPE,
    ),
    "phi4-mini": Case(
        "phi3", {"partial_rotary_factor": 0.75, "hidden_size": 192, "num_attention_heads": 6},
        {"attention.sliding_window": 0, "rope.dimension_count": 24},
    ),
    "smollm3": Case("smollm3", {"num_hidden_layers": 5}, theta=5e6),
    "granite": Case(
        "granite",
        {
            "embedding_multiplier": 12.0, "residual_multiplier": 0.6, "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
        },
        {"embedding_scale": 12.0, "residual_scale": 0.6, "attention.scale": 0.1, "logit_scale": 4.0},
    ),
    "granite-biases": Case(
        "granite", {"attention_bias": True, "mlp_bias": True},
        {"embedding_scale": 1.0, "residual_scale": 1.0, "attention.scale": 1.0, "logit_scale": 1.0},
    ),
    "mistral3": Case(
        "mistral3", {"head_dim": 16},
        {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1}, theta=1e6,
        scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    ),
    "ernie4_5": Case("ernie4_5", {"head_dim": 32, "use_bias": False}, theta=500_000.0),
    "exaone4": Case(
        "exaone4",
        {
            "sliding_window": None, "head_dim": 16, "num_hidden_layers": 5,
            "layer_types": ["full_attention"] * 5,
        },
        theta=1e6, scaling=LLAMA3,
    ),
    "exaone4-windows": Case(
        "exaone4",
        {
            "sliding_window": 40, "num_hidden_layers": 5, "head_dim": 16,
            "layer_types": [
                "sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
                "full_attention",
            ],
        },
        {
            "attention.sliding_window": 40,
            "attention.sliding_window_pattern": [True, True, False, True, False],
        },
        tied=False, theta=1e6, scaling=LLAMA3,
    ),
    "glm4": Case(
        "glm4", {"head_dim": 32, "attention_bias": True, "partial_rotary_factor": 0.5},
        {"rope.dimension_count": 16}, tied=False,
    ),
    "starcoder2": Case(
        "starcoder2", {"sliding_window": None, "norm_epsilon": 1e-5},
        {"attention.layer_norm_epsilon": 1e-5}, theta=1e5, tied=False,
    ),
    "stablelm": Case(
        "stablelm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True, "layer_norm_eps": 1e-5},
        {"rope.dimension_count": 8, "use_parallel_residual": False, "attention.layer_norm_epsilon": 1e-5},
        tied=False,
    ),
    "stablelm-parallel": Case(
        "stablelm", {"partial_rotary_factor": 0.5, "use_parallel_residual": True, "layer_norm_eps": 1e-5},
        {"rope.dimension_count": 8, "use_parallel_residual": True, "attention.layer_norm_epsilon": 1e-5},
        tied=False,
    ),
    "command-r": Case(
        "command-r", {"logit_scale": 0.25, "layer_norm_eps": 1e-5},
        {"logit_scale": 0.25, "attention.layer_norm_epsilon": 1e-5, "rope.scaling.type": "none"},
    ),
    "cohere2": Case(
        "cohere2",
        {"logit_scale": 0.25, "layer_norm_eps": 1e-5, "sliding_window": 40, "num_hidden_layers": 5},
        {
            "logit_scale": 0.25, "attention.layer_norm_epsilon": 1e-5, "rope.scaling.type": "none",
            "attention.sliding_window": 40, "rope.dimension_count": 16,
        },
    ),
    "hunyuan-dense": Case("hunyuan-dense", {"head_dim": 32}),
    "seed_oss": Case("seed_oss", {"head_dim": 32, "attention_bias": True}, tied=False, theta=1e7),
    "olmo2": Case("olmo2", {}, tied=False, theta=500_000.0),
    "olmo3": Case(
        "olmo3", {"sliding_window": 40, "num_hidden_layers": 5},
        {
            "attention.sliding_window": 40, "attention.sliding_window_pattern": [True] * 3 + [False, True],
            "rope.scaling.yarn_attn_factor": 1.25,
        },
        tied=False, local_theta=10_000.0, scaling=YARN | {"attention_factor": 1.25},
    ),
}  # fmt: skip
CLASSES = {  # of transformers: configuration and model
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "mistral3": ("Ministral3Config", "Ministral3ForCausalLM"),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM"),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM"),
    "glm4": ("Glm4Config", "Glm4ForCausalLM"),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM"),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM"),
    "command-r": ("CohereConfig", "CohereForCausalLM"),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM"),
    "hunyuan-dense": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM"),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
}
ARCHITECTURES = {"olmo3": "olmo2"}  # of files, where their names differ
PERMUTED = {
    "llama",
    "smollm3",
    "granite",
    "mistral3",
}  # queries and keys, so that pairs to rotate are neighbours


def make_model(case: Case) -> Any:
    """A random FP32 model whose every parameter matters: biases and norms away from 0 and 1."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    options = SIZES | {"tie_word_embeddings": case.tied, "pad_token_id": None} | case.options
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[case.family])
    rope: dict[str, Any] = {"rope_type": "default"} | (case.scaling or {}) | {"rope_theta": case.theta}
    if "partial_rotary_factor" in options:
        rope["partial_rotary_factor"] = options["partial_rotary_factor"]
    if case.local_theta is not None:
        local = {"rope_type": "default", "rope_theta": case.local_theta}
        rope = {"full_attention": rope, "sliding_attention": local}
    options["rope_parameters"] = rope
    config = config_class(**options)
    config._attn_implementation = "eager"
    model = model_class(config).to(torch.float32).eval()
    around = 0.0 if case.family.startswith("gemma") else 1.0  # these add 1 themselves
    # A tied head would echo its input if the embedding outweighed what the layers add.
    scale = math.sqrt(config.hidden_size) if case.family.startswith("gemma") else 1.0
    scale *= getattr(config, "embedding_multiplier", 1.0)
    gains = {"embed_tokens": 2.0 / scale if case.tied else 8.0, "lm_head": 2.0}
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, gains.get(key.split(".")[-2], 1.3) * weight.shape[1] ** -0.5)
            else:
                weight.normal_(*((around, 0.3) if key.endswith("norm.weight") else (0.0, 0.1)))
    return model


def interleave(weight: Array, heads: int) -> Array:
    """llama.cpp's `LlamaModel.permute`: the rotated halves of each head become pairs of neighbours."""
    rows = weight.shape[0]
    return (
        weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def llama3_divisors(theta: float, dimensions: int) -> Array:
    """rope_freqs.weight as llama.cpp's converter writes it for rope_type llama3."""
    divisors = []
    for frequency in theta ** (-np.arange(0, dimensions, 2) / dimensions):
        wavelength = 2 * np.pi / frequency
        low = LLAMA3["original_max_position_embeddings"] / LLAMA3["low_freq_factor"]
        high = LLAMA3["original_max_position_embeddings"] / LLAMA3["high_freq_factor"]
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(LLAMA3["factor"])
        else:
            smooth = LLAMA3["original_max_position_embeddings"] / wavelength - LLAMA3["low_freq_factor"]
            smooth /= LLAMA3["high_freq_factor"] - LLAMA3["low_freq_factor"]
            divisors.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)


def converted_tensors(model: Any, case: Case) -> dict[str, Array]:
    """The model's parameters under the names that the converter gives them, by its own table."""
    config, architecture = model.config, architecture_of(case)
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tensors = dict(case.factors)
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight" and case.tied:
            continue
        name, array = names.get_name(key, try_suffixes=(".weight", ".bias")), weight.numpy()
        assert name is not None, key
        if case.family in PERMUTED and ("attn_q." in name or "attn_k." in name):
            heads = config.num_attention_heads if "attn_q." in name else config.num_key_value_heads
            array = interleave(array, heads)
        if case.family.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        tensors[name] = array
    if case.scaling is LLAMA3:
        tensors["rope_freqs.weight"] = llama3_divisors(case.theta, 16)
    for length in ("short", "long") if case.scaling is LONGROPE else ():
        tensors[f"rope_factors_{length}.weight"] = np.array(LONGROPE[f"{length}_factor"], dtype=np.float32)
    return tensors


def converted_keys(config: Any, case: Case) -> dict[str, Any]:
    """What the converter writes for nearly all families, and what the case adds."""
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": case.theta,
    }
    if hasattr(config, "rms_norm_eps"):
        keys["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    if "head_dim" in case.options:
        keys |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if case.scaling and case.scaling not in (LLAMA3, LONGROPE):
        keys |= {
            "rope.scaling.type": case.scaling["rope_type"],
            "rope.scaling.factor": case.scaling["factor"],
        }
        if original := case.scaling.get("original_max_position_embeddings"):
            keys["rope.scaling.original_context_length"] = original
    return keys | case.keys


def architecture_of(case: Case) -> str:
    """`general.architecture` of its files."""
    return ARCHITECTURES.get(case.family, case.family)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any, GgufFile]:
    """A name, a transformers model, and the same model as a file."""
    case = CASES[request.param]
    model = make_model(case)
    keys, tensors = converted_keys(model.config, case), converted_tensors(model, case)
    path = write_file(tmp_path / "model.gguf", architecture_of(case), keys, tensors)
    return request.param, model, GgufFile.open(path)


class Recorder:
    """Collects what the runner reports, step by step."""

    def __init__(self) -> None:
        self.stages: dict[str, list[Array]] = {}

    def __call__(self, stage: str, values: Array) -> None:
        self.stages.setdefault(stage, []).append(values.copy())

    def joined(self, stage: str) -> Array:
        return np.concatenate(self.stages[stage])


def errors(ours: Array, theirs: Array) -> tuple[float, float]:
    """The largest relative error of a row's norm, and of an element against the largest element."""
    assert ours.shape == theirs.shape
    difference = (ours - theirs).astype(np.float64)
    by_row = np.linalg.norm(difference, axis=1) / np.linalg.norm(theirs.astype(np.float64), axis=1)
    return float(by_row.max()), float(np.abs(difference).max() / np.abs(theirs).max())


@pytest.mark.parametrize("budget", [256, 24])
def test_every_layer_and_the_logits_agree(case: tuple[str, Any, GgufFile], budget: int) -> None:
    """A prompt of 150 tokens (in one chunk, or in chunks of 24) and 20 greedy tokens after it."""
    torch = pytest.importorskip("torch")
    name, model, file = case
    config = read_spec(file)
    recorder = Recorder()
    runner = ReferenceRunner(file, config, kv_blocks=32, slots=2, trace=recorder)
    engine = Engine(
        runner, text_stream=NoText, eos_ids=frozenset(), context_length=config.context_length,
        max_sequences=1, token_budget=budget,
    )  # fmt: skip
    prompt = np.random.default_rng(1).integers(0, config.vocab, 150).tolist()
    engine.submit(Request("j", 1, tuple(prompt), GenerationParams(max_tokens=20, temperature=0.0), seed=0))
    done = []
    while engine.has_work:
        done += engine.step()
    answer = list(done[0].token_ids)

    captured: dict[str, Array] = {}

    def capture(stage: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            captured[stage] = value.detach().numpy().reshape(-1, value.shape[-1])

        return hook

    inner = model.model

    def capture_input(_module: Any, inputs: Any, named: Any) -> None:
        value = inputs[0] if inputs else named["hidden_states"]
        captured["embedding"] = value.detach().numpy().reshape(-1, value.shape[-1])

    inner.layers[0].register_forward_pre_hook(capture_input, with_kwargs=True)
    stages = {"norm": inner.norm}
    stages |= {f"layer.{index}": layer for index, layer in enumerate(inner.layers)}
    for stage, module in stages.items():
        module.register_forward_hook(capture(stage))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer[:-1]])).logits[0].numpy()
    captured["logits"] = logits[len(prompt) - 1 :]

    for stage in ["embedding", *(f"layer.{index}" for index in range(len(config.layers))), "norm", "logits"]:
        by_row, by_element = errors(recorder.joined(stage), captured[stage])
        print(f"{name:20} chunk {budget:3} {stage:10} row {by_row:.1e} element {by_element:.1e}")  # noqa: T201
        assert by_row < LIMIT
        assert by_element < LIMIT
    assert answer == captured["logits"].argmax(axis=1).tolist()
    assert len(set(answer)) > 5  # not a degenerate model
    other = captured["logits"] * 1.01
    assert errors(other, captured["logits"])[0] > LIMIT  # the measure sees a fault of 1%


class NoText:
    """A stream for tests that look at tokens only."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""
