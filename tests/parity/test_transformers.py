"""The reference runner against PyTorch and transformers: same weights, every layer's output and the logits.

Needs torch and transformers, which are no dependency of this project; run with `make parity`, which prints a
table at the end.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Experts
from nightmill.worker.runners.reference import ReferenceRunner
from tests.parity.cases import (
    ARCHITECTURES,
    CASES,
    CLASSES,
    LLAMA3,
    LONGROPE,
    PERMUTED,
    PROPORTIONAL,
    SIZES,
    Array,
    Case,
)
from tests.parity.conftest import WORST
from tests.parity.hybrids import FAMILIES as HYBRIDS
from tests.parity.hybrids import converted
from tests.parity.mixtures import MIXTURES, converted_experts
from tests.support.engines import NoText
from tests.support.ggufs import write_file

pytestmark = pytest.mark.parity

LIMIT = 1e-4
PLUS_ONE = ("gemma2", "gemma3")
"""Families whose norms multiply with 1 more than their weights."""


def make_model(case: Case) -> Any:
    """A random FP32 model whose every parameter matters: biases and norms away from 0 and 1."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    options = SIZES | {"tie_word_embeddings": case.tied, "pad_token_id": None} | case.options
    options = {name: value for name, value in options.items() if value is not None or name not in SIZES}
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
    if case.family == "gemma4":
        config.allow_global_per_layer_attribute_access = (
            True  # `converted_keys` reads it; the case has others
        )
    around = (
        0.0 if case.family.startswith((*PLUS_ONE, "qwen35", "qwen3next")) else 1.0
    )  # these add 1 themselves
    # A tied head would echo its input if the embedding outweighed what the layers add.
    scale = math.sqrt(config.hidden_size) if case.family.startswith("gemma") else 1.0
    scale *= getattr(config, "embedding_multiplier", 1.0)
    gains = dict.fromkeys(("embed_tokens", "embeddings"), 2.0 / scale if case.tied else 8.0) | {
        "lm_head": 2.0
    }
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, gains.get(key.split(".")[-2], 1.3) * weight.shape[1] ** -0.5)
            elif weight.ndim == 3 and "conv" in key:
                weight.normal_(0, 0.5)
            elif weight.ndim == 3:  # of experts
                inputs = weight.shape[1 if case.family == "gpt-oss" else 2]
                weight.normal_(0, 1.3 * inputs**-0.5)
            elif key.endswith("linear_attn.norm.weight"):
                weight.normal_(1, 0.3)
            elif case.family == "gemma4" and key.endswith(("q_norm.weight", "k_norm.weight")):
                weight.normal_(0.5, 0.1)  # scores are not scaled
            elif key.endswith((".router.scale", ".per_expert_scale")):
                weight.normal_(1, 0.3)
            else:
                weight.normal_(*((around, 0.3) if key.endswith("norm.weight") else (0.0, 0.1)))
        for key, buffer in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.1)
            if key.endswith("layer_scalar"):
                buffer.normal_(0.8, 0.1)
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
        looked_up = key.replace("model.", "backbone.") if case.family.startswith("nemotron_h") else key
        name, array = names.get_name(looked_up, try_suffixes=(".weight", ".bias")), weight.numpy()
        if (experts := converted_experts(config, case, key, array)) is not None:
            tensors |= experts
            continue
        if case.family in HYBRIDS:
            tensors |= converted(config, case.family, key, array, name)
            continue
        assert name is not None, key
        if case.family in PERMUTED and ("attn_q." in name or "attn_k." in name):
            heads = config.num_attention_heads if "attn_q." in name else config.num_key_value_heads
            array = interleave(array, heads)
        if case.family in PLUS_ONE and name.endswith("norm.weight"):
            array = array + 1
        if key.endswith("layer_scalar"):
            name = f"{name}.weight"
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
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": case.theta,
    }
    if (eps := getattr(config, "norm_eps", getattr(config, "rms_norm_eps", None))) is not None:
        keys["attention.layer_norm_rms_epsilon"] = eps
    if "head_dim" in case.options:
        keys |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if case.scaling and case.scaling not in (LLAMA3, LONGROPE, PROPORTIONAL):
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


@pytest.fixture(params=[*CASES, *MIXTURES])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any, GgufFile]:
    """A name, a transformers model, and the same model as a file."""
    case = (CASES | MIXTURES)[request.param]
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


@pytest.mark.parametrize("budget", [256, 24], ids=["whole", "chunks of 24"])
def test_every_layer_and_the_logits_agree(
    case: tuple[str, Any, GgufFile], budget: int, record_property: Callable[[str, object], None]
) -> None:
    """A prompt of 150 tokens (in one chunk, or in chunks of 24) and 20 greedy tokens after it."""
    torch = pytest.importorskip("torch")
    name, model, file = case
    config = read_spec(file)
    if config.state_bytes:
        budget = max(budget, 70)  # which ends pieces at 64 and at 128
    recorder = Recorder()
    runner = ReferenceRunner(file, config, kv_pages=32, slots=2, trace=recorder)
    engine = Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(context_length=config.context_length, max_sequences=1, token_budget=budget),
    )
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
    modules = {
        "norm": next(getattr(inner, n) for n in ("norm", "norm_f", "embedding_norm") if hasattr(inner, n))
    }
    modules |= {f"layer.{index}": layer for index, layer in enumerate(inner.layers)}
    for stage, module in modules.items():
        module.register_forward_hook(capture(stage))
    chosen: dict[str, Array] = {}

    def capture_choice(stage: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            (ids,) = [one for one in output if not one.is_floating_point()]
            chosen[stage] = ids.numpy()

        return hook

    for place, module in model.named_modules():
        if type(module).__name__.lower().endswith("router"):
            module.register_forward_hook(capture_choice(f"experts.{place.split('.')[2]}"))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer[:-1]])).logits[0].numpy()
    captured["logits"] = logits[len(prompt) - 1 :]

    stages = ["embedding", *(f"layer.{index}" for index in range(len(config.layers))), "norm", "logits"]
    found = {stage: max(errors(recorder.joined(stage), captured[stage])) for stage in stages}
    worst = max(found, key=lambda stage: found[stage])
    way = "prompt whole" if budget > len(prompt) else f"in chunks of {budget}"
    record_property(WORST, (name, way, found[worst], worst))
    assert {stage: error for stage, error in found.items() if not error < LIMIT} == {}
    assert answer == captured["logits"].argmax(axis=1).tolist()
    assert len(chosen) == sum(isinstance(layer.feed_forward, Experts) for layer in config.layers)
    for stage, ids in chosen.items():
        assert (np.sort(recorder.joined(stage), axis=1) == np.sort(ids, axis=1)).all()
    assert len(set(answer)) > 5  # not a degenerate model
    other = captured["logits"] * 1.01
    assert errors(other, captured["logits"])[0] > LIMIT  # the measure sees a fault of 1%
