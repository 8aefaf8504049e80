"""Blocks that predict further tokens (MTP): what a file says of them, their arithmetic, drafts by them."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.model import open_model
from nightmill.worker.engine.drafting import Drafts
from nightmill.worker.engine.request import Request
from nightmill.worker.engine.stats import EngineStats
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec, Predictor
from nightmill.worker.runners.reference.runner import ReferenceRunner
from tests.support.driving import Chunk, Pages
from tests.support.engines import Bits, bits, complete, engine_of
from tests.support.expert_cases import EXPERT_FILES
from tests.support.family_cases import file_of
from tests.support.ggufs import spec_tensors
from tests.support.hybrid_cases import HYBRID_FILES

CASES = {"qwen35": HYBRID_FILES["qwen35"], "glm4moe": EXPERT_FILES["glm4moe"]}
PROMPT, PAGE, CONTEXT = 21, 16, 96
Tensors = dict[str, npt.NDArray[np.float32]]
Wide = npt.NDArray[np.float64]


def predicting(name: str) -> ModelSpec:
    """The spec of a case, whose file has one block more."""
    like = CASES[name][1]
    layer = next(one for one in reversed(like.layers) if not one.state)
    return replace(
        like,
        predictor=Predictor(
            block=len(like.layers),
            layer=layer,
            norm=like.output_norm,
            last_norm_name="nextn.shared_head_norm",
            hands_on_normed=name == "qwen35",
        ),
    )


def block_tensors(spec: ModelSpec) -> Tensors:
    """Random weights of its predictor."""
    assert spec.predictor is not None
    own = spec_tensors(spec.predictor.model(spec), seed=1)
    rng = np.random.default_rng(2)
    for weight in spec.predictor.weights(spec.width).values():
        for tensor, shape in weight.parts:
            noise = rng.standard_normal(shape)
            noise = noise * (1.5 / np.sqrt(shape[-1])) if len(shape) == 2 else 1 + 0.1 * noise
            own[tensor] = noise.astype(np.float32)
    return {tensor: one for tensor, one in own.items() if tensor.startswith("blk.")}


def alike_tensors(spec: ModelSpec) -> Tensors:
    """Weights with which each token depends only on the one before it, and the predictor says so, too."""
    own = spec_tensors(spec) | block_tensors(spec)
    adding = ("attn_output.weight", "ssm_out.weight", "ffn_down.weight", "ffn_down_exps.weight",
              "ffn_down_shexp.weight")  # fmt: skip
    changed = {tensor: np.zeros_like(one) for tensor, one in own.items() if tensor.endswith(adding)}
    block = f"blk.{len(spec.layers)}.nextn."
    changed[f"{block}enorm.weight"] = np.ones(spec.width, dtype=np.float32)
    changed[f"{block}shared_head_norm.weight"] = own["output_norm.weight"]
    both = np.eye(spec.width, 2 * spec.width, dtype=np.float32)
    return own | changed | {f"{block}eh_proj.weight": both}


def opened(path: Path, name: str, tensors: dict[str, Any] | None = None) -> GgufFile:
    """A file of the case with such a block; tensors: in place of random ones, or None: left out."""
    keys, like = CASES[name]
    keys = keys | {"block_count": len(like.layers) + 1, "nextn_predict_layers": 1}
    return file_of(path, keys, like, **(block_tensors(predicting(name)) | (tensors or {})))


@pytest.mark.parametrize("name", CASES)
def test_a_block_that_predicts_is_read_if_it_is_whole(name: str, tmp_path: Path) -> None:
    spec = predicting(name)
    with opened(tmp_path, name) as file:
        assert read_spec(file) == spec
    for tensor in ("nextn.hnorm.weight", "attn_k.weight", "nextn.shared_head_norm.weight"):
        with opened(tmp_path, name, {f"blk.{len(spec.layers)}.{tensor}": None}) as file:
            assert read_spec(file) == replace(spec, predictor=None)


def rms(x: Wide, weight: Wide, eps: float) -> Wide:
    found: Wide = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight
    return found


def sigmoid(x: Wide) -> Wide:
    found: Wide = 1 / (1 + np.exp(-x))
    return found


class Oracle:
    """The block of Qwen3.5 in float64, as vLLM's `qwen3_next_mtp.py` and `qwen3_next.py` compute it.

    The embedding of the next token and the normed hidden state, each normed, go through `fc`, then a layer of
    gated attention and SwiGLU; a norm; the head. A further guess takes what that norm gave as hidden state.
    """

    def __init__(self, file: GgufFile, spec: ModelSpec) -> None:
        block = f"blk.{len(spec.layers)}."
        self.of = {
            name.removeprefix(block): file.array(name).astype(np.float64)
            for name in file.tensors
            if name.startswith((block, "token_embd"))
        }
        self.attention = spec.layers[2].attention
        self.eps = spec.output_norm.eps

    def guesses(self, tokens: list[int], hidden: Wide, count: int) -> list[int]:
        """What follows tokens (n + 1), whose hidden states but for the last are these (n, width)."""
        tokens, found = list(tokens), list[int]()
        for _ in range(count):
            x = self.through(tokens[1:], hidden)
            normed = rms(x[-1], self.of["nextn.shared_head_norm.weight"], self.eps)
            found.append(int((self.of["token_embd.weight"] @ normed).argmax()))
            tokens.append(found[-1])
            hidden = np.concatenate([hidden, normed[None]])
        return found

    def through(self, tokens: list[int], hidden: Wide) -> Wide:
        of, eps, attention = self.of, self.eps, self.attention
        embedded = rms(of["token_embd.weight"][tokens], of["nextn.enorm.weight"], eps)
        x = np.concatenate([embedded, rms(hidden, of["nextn.hnorm.weight"], eps)], axis=1)
        x = x @ of["nextn.eh_proj.weight"].T
        n, heads, kv, dim = len(x), attention.heads, attention.kv_heads, attention.head_dim
        y = rms(x, of["attn_norm.weight"], eps)
        q, gate = np.split((y @ of["attn_q.weight"].T).reshape(n, heads, 2 * dim), 2, axis=2)
        k = (y @ of["attn_k.weight"].T).reshape(n, kv, dim)
        v = (y @ of["attn_v.weight"].T).reshape(n, kv, dim)
        q = self.rotated(rms(q, of["attn_q_norm.weight"], eps))
        k = self.rotated(rms(k, of["attn_k_norm.weight"], eps))
        k, v = (np.repeat(one, heads // kv, axis=1) for one in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(dim)
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        mixed = np.einsum("hij,jhd->ihd", weights / weights.sum(axis=2, keepdims=True), v) * sigmoid(gate)
        x = x + mixed.reshape(n, -1) @ of["attn_output.weight"].T
        y = rms(x, of["post_attention_norm.weight"], eps)
        gated = y @ of["ffn_gate.weight"].T
        inner = gated * sigmoid(gated) * (y @ of["ffn_up.weight"].T)
        found: Wide = x + inner @ of["ffn_down.weight"].T
        return found

    def rotated(self, x: Wide) -> Wide:
        half = self.attention.rope.dim // 2
        angles = np.outer(np.arange(len(x)), self.attention.rope.base ** (-np.arange(half) / half))[:, None]
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned = low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)
        return np.concatenate([*turned, rest], axis=2)


def test_guesses_are_those_of_an_oracle(tmp_path: Path) -> None:
    """Behind a prompt in two pieces, behind tokens one by one, and behind three in one step."""
    file = opened(tmp_path, "qwen35")
    spec = read_spec(file)
    text = np.random.default_rng(4).integers(0, spec.vocab, 80).tolist()
    found: list[npt.NDArray[Any]] = []

    def trace(stage: str, values: npt.NDArray[Any]) -> None:
        if stage == "norm":
            found.append(values.astype(np.float64))

    oracle = Oracle(file, spec)
    runner = ReferenceRunner(file, spec, kv_pages=12, page_size=PAGE, slots=2, trace=trace)
    runner.predict()
    pages, compared = Pages(2, 6), 0
    steps = [[Chunk(1, text, 0, 64)], [Chunk(1, text, 64, 3)]]
    steps += [[Chunk(1, text, place, 1, drawn=True)] for place in (67, 68)]
    steps += [[Chunk(1, text, place, 1, drawn=True) for place in (69, 70, 71)]]
    with closing(runner):
        for number, chunks in enumerate(steps):
            runner.launch(pages.batch(chunks, admit=number == 0))
            drawn = runner.collect()
            assert drawn is not None and drawn.guesses is not None
            hidden = np.concatenate(found)
            for index, chunk in enumerate(chunks):
                end = chunk.start + chunk.length  # the place that is drawn
                # Further guesses stay within the page of the last token that was computed.
                count = min(3, PAGE - (end - 1) % PAGE)
                wanted = oracle.guesses([*text[:end], int(drawn.tokens[index])], hidden[:end], count)
                assert drawn.guesses[index].tolist() == wanted + [-1] * (3 - count)
                compared += count
    assert compared >= 15


def asked() -> list[Request]:
    wishes: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0}, {"temperature": 0.9}, {"top_k": 20, "logprobs": 2}, {"repetition_penalty": 1.3},
    )  # fmt: skip
    return [
        Request(
            str(n), 1, tuple(range(5, 26 + 9 * n)),
            GenerationParams.parse({"max_tokens": 24, "ignore_eos": True} | wishes[n % 4]), seed=n,
        )
        for n in range(5)
    ]  # fmt: skip


def run(file: GgufFile, spec: ModelSpec, drafts: Drafts) -> tuple[Bits, EngineStats]:
    runner = ReferenceRunner(file, spec, kv_pages=80, page_size=PAGE, slots=24)
    if drafts is not Drafts.OFF:
        runner.predict()
    engine = engine_of(runner, CONTEXT, budget=200, drafts=drafts)
    with closing(engine):
        return bits(complete(engine, asked())), engine.stats


@pytest.mark.parametrize("name", CASES)
def test_drafts_by_a_predictor_change_no_bit(name: str, tmp_path: Path) -> None:
    """One that guesses at random, and one that knows the model; rows with penalties are not guessed."""
    for tensors in (None, alike_tensors(predicting(name))):
        file = opened(tmp_path, name, tensors)
        spec = read_spec(file)
        plain, before = run(file, spec, Drafts.OFF)
        drafted, after = run(file, spec, Drafts.NGRAM)
        assert drafted == plain
        assert (before.guessed_tokens, after.guessed_tokens > 50) == (0, True)
        if tensors is not None:
            assert after.guessed_right > 0.9 * after.guessed_tokens
            assert after.step_sequences < 0.6 * before.step_sequences


def test_a_worker_with_drafts_has_its_model_predict(tmp_path: Path) -> None:
    path = opened(tmp_path, "qwen35", alike_tensors(predicting("qwen35"))).path
    settings = Settings(model=path, reference=True, max_sequences=8, context=CONTEXT)
    found = {}
    for drafts in ("off", "auto", "ngram"):
        chosen = settings.model_copy(update={"drafts": drafts})
        with closing(build_engine(chosen, open_model(chosen))) as engine:
            done = bits(complete(engine, asked()[:2]))
            found[drafts] = done, engine.stats.guessed_right > 20
    assert found["off"] == (found["ngram"][0], False)
    assert found["auto"][0] == found["off"][0]
    assert found["ngram"][1]
