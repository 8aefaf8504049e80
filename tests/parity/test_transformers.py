"""The reference runner against PyTorch and transformers: same weights, every layer's output and the logits.

Needs torch and transformers, which are no dependency of this project; run with `pytest -m parity -s`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.jobs.contract import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.reference import ReferenceRunner
from tests.ggufs import byte_vocabulary, write_model

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
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2-seven-to-one": (
        "qwen2",
        {"num_attention_heads": 14, "hidden_size": 112, "rope_theta": 1e6, "tie_word_embeddings": True},
    ),
    "llama": ("llama", {"tie_word_embeddings": False, "rope_theta": 10_000.0}),
    "llama3": ("llama", {"tie_word_embeddings": True, "rope_theta": 500_000.0, "rope_scaling": LLAMA3}),
    "qwen2-yarn": ("qwen2", {"tie_word_embeddings": False, "rope_theta": 10_000.0, "rope_scaling": YARN}),
    "llama-linear": ("llama", {"tie_word_embeddings": True, "rope_theta": 10_000.0, "rope_scaling": LINEAR}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False, "rope_theta": 1e6, "head_dim": 32}),
}
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def make_model(architecture: str, options: dict[str, Any]) -> Any:
    """A random FP32 model whose every parameter matters: biases and norms away from 0 and 1."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    name = {"qwen2": "Qwen2", "llama": "Llama", "qwen3": "Qwen3"}[architecture]
    options = SIZES | options
    theta, scaling = options.pop("rope_theta"), options.pop("rope_scaling", None)
    # transformers 5 keeps all of RoPE in rope_parameters; 4 has two fields.
    if int(transformers.__version__.split(".")[0]) >= 5:
        options["rope_parameters"] = {"rope_type": "default"} | (scaling or {}) | {"rope_theta": theta}
    else:
        options |= {"rope_theta": theta, "rope_scaling": scaling}
    config = getattr(transformers, f"{name}Config")(**options)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.float32).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(
                    0, (2.0 if "embed" in key or "lm_head" in key else 1.3) * weight.shape[1] ** -0.5
                )
            else:
                weight.normal_(1.0 if "norm" in key else 0.0, 0.3)
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


def gguf_tensors(model: Any, architecture: str) -> Iterator[tuple[str, Array]]:
    """The model's parameters under their GGUF names."""
    config = model.config
    for key, weight in model.state_dict().items():
        array = weight.numpy()
        if key == "lm_head.weight":
            if not config.tie_word_embeddings:
                yield "output.weight", array
        elif key == "model.embed_tokens.weight":
            yield "token_embd.weight", array
        elif key == "model.norm.weight":
            yield "output_norm.weight", array
        else:
            _, _, layer, *name, kind = key.split(".")
            part = NAMES[".".join(name)]
            if architecture == "llama" and part in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
                array = interleave(array, heads)
            yield f"blk.{layer}.{part}.{kind}", array


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any, GgufFile]:
    """A name, a transformers model, and the same model as a file."""
    architecture, options = CASES[request.param]
    model = make_model(architecture, options)
    scaling = options.get("rope_scaling")
    in_keys = (
        {
            "type": scaling["rope_type"],
            "factor": scaling["factor"],
            "original_context_length": scaling.get("original_max_position_embeddings", 512),
        }
        if scaling and scaling is not LLAMA3
        else None
    )
    sizes = SIZES | options
    path = write_model(
        tmp_path / "model.gguf",
        architecture,
        layers=sizes["num_hidden_layers"],
        width=sizes["hidden_size"],
        ffn=sizes["intermediate_size"],
        heads=sizes["num_attention_heads"],
        kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes.get("head_dim"),
        tied=sizes["tie_word_embeddings"],
        rope_base=sizes["rope_theta"],
        rope_scaling=in_keys,
        rope_freqs=llama3_divisors(sizes["rope_theta"], 16) if scaling is LLAMA3 else None,
        tensors=dict(gguf_tensors(model, architecture)),
    )
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
    stages = {"embedding": inner.embed_tokens, "norm": inner.norm}
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
