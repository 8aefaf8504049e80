"""Make `models/nightmill-demo.gguf`: corpus, tokenizer, training, export and measurement in one command.

    python -m tools.demo_model.train --out models

The model is a small qwen2 transformer in plain PyTorch. It trains on one CUDA GPU in a few minutes; `--toy`
takes the same steps on a CPU within a minute and gives a model of no use. What is measured is the exported
file: its Q8_0 weights are read back before the evaluation.
"""

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tools.demo_model import corpus
from tools.demo_model.network import Config, Model

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROW = 256  # tokens of a training row; several samples share one and cannot see each other
IGNORED = -100  # a target without loss


def train_tokenizer(vocab: int, seed: int) -> tokenizers.Tokenizer:
    """A byte-level BPE with Qwen2's splitting; the control tokens come last."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN2_SPLIT), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab - len(CONTROL), initial_alphabet=level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(tokenizer_texts(seed), trainer)
    tokenizer.add_special_tokens(list(CONTROL))
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens instead of {vocab}")
    return tokenizer


def tokenizer_texts(seed: int) -> Iterator[str]:
    """Corpus text, then every word in several dresses, so that any English text splits into few tokens."""
    for sample in corpus.samples(seed, 30_000):
        for question, answer in sample.turns:
            yield question
            yield answer
    for word in corpus.words():
        yield from (f" {word}", f" {word} {word.capitalize()}", word, f'"{word}", ({word}) {word}.')


def pack(tokenizer: tokenizers.Tokenizer, seed: int, count: int) -> tuple[NDArray[np.uint16], ...]:
    """Samples as rows of ROW tokens: (ids, learnt, sample numbers), each [rows, ROW]; 0 pads."""
    rows: list[tuple[NDArray[np.uint16], ...]] = []
    row, filled, number = tuple(np.zeros((3, ROW), np.uint16)), 0, 0
    for sample in corpus.samples(seed, count):
        ids: list[int] = []
        learnt: list[int] = []
        for i, piece in enumerate(piece for pair in sample.parts() for piece in pair):
            encoded = tokenizer.encode(piece).ids
            ids += encoded
            learnt += [i % 2] * len(encoded)
        if len(ids) > ROW:
            continue
        if filled + len(ids) > ROW:
            rows.append(row)
            row, filled, number = tuple(np.zeros((3, ROW), np.uint16)), 0, 0
        number += 1
        for values, target in zip((ids, learnt, [number] * len(ids)), row, strict=True):
            target[filled : filled + len(ids)] = values
        filled += len(ids)
    return tuple(np.stack(column) for column in zip(*rows, strict=True))


def generate_data(tokenizer: tokenizers.Tokenizer, seed: int, count: int) -> list[Tensor]:
    """`count` samples packed by all cores; shard i has its own seed, so cores do not change the data."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    shard = min(count, 20_000)
    seeds = range(1_000 * seed + 1, 1_000 * seed + 1 + count // shard)
    with get_context("fork").Pool() as pool:
        shards = pool.map(partial(pack, tokenizer, count=shard), seeds, chunksize=1)
    return [torch.from_numpy(np.concatenate(column)).to(torch.int16) for column in zip(*shards, strict=True)]


def loss_of(model: nn.Module, rows: Sequence[Tensor]) -> Tensor:
    """Mean cross-entropy of the learnt tokens of some rows."""
    ids, learnt, samples = (column.long() for column in rows)
    logits = model(ids[:, :-1], samples[:, :-1])
    targets = torch.where(learnt[:, 1:] > 0, ids[:, 1:], IGNORED)
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def train(
    model: Model, data: list[Tensor], valid: list[Tensor], options: argparse.Namespace
) -> dict[str, Any]:
    """AdamW with warm-up and a cosine to a hundredth; returns losses and speed."""
    device = next(model.parameters()).device
    torch.set_float32_matmul_precision("high")
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.98), fused=device.type == "cuda")
    step_loss = partial(loss_of, model)
    compiled = torch.compile(step_loss) if device.type == "cuda" else step_loss
    generator = torch.Generator().manual_seed(options.seed)
    order, losses = torch.empty(0, dtype=torch.long), []
    started = time.monotonic()
    for step in range(options.steps):
        if len(order) < options.batch:
            order = torch.cat((order, torch.randperm(len(data[0]), generator=generator)))
        picked, order = order[: options.batch].to(device), order[options.batch :]
        warm = min(1.0, (step + 1) / options.warmup)
        rate = options.rate * warm * (0.505 + 0.495 * math.cos(math.pi * step / options.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16):
            loss = compiled([column[picked] for column in data])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step % options.report == options.report - 1 or step == 0:
            mean, seconds = torch.stack(losses[-options.report :]).mean().item(), time.monotonic() - started
            speed = (step + 1) * options.batch * ROW / seconds / 1e6
            print(f"step {step + 1}/{options.steps}: loss {mean:.3f}, {seconds:.0f} s, {speed:.2f} Mtok/s")
    with torch.no_grad():
        chunks = range(0, len(valid[0]), options.batch)
        unseen = [loss_of(model, [column[i : i + options.batch] for column in valid]) for i in chunks]
    tail, held_out = torch.stack(losses[-200:]).mean().item(), torch.stack(unseen).mean().item()
    seconds = round(time.monotonic() - started, 1)
    return {"training_loss": tail, "held_out_loss": held_out, "training_seconds": seconds}


def gguf_names(model: Model) -> dict[str, nn.Parameter]:
    """Parameters by the names that GGUF gives the tensors of Qwen2."""
    return {name.replace("attention.", ""): parameter for name, parameter in model.named_parameters()}


def export(model: Model, tokenizer: tokenizers.Tokenizer, path: Path) -> None:
    """Write the GGUF file: matrices in Q8_0, norms and biases in F32, the metadata as llama.cpp converts."""
    config, writer = model.config, gguf.GGUFWriter(path, "qwen2")
    writer.add_type("model")
    writer.add_name("Nightmill demo")
    writer.add_description("A small model that writes haiku, trained for demonstrations and tests")
    writer.add_license("mit")
    writer.add_languages(["en"])
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.ffn_width)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.CONTROL if token in CONTROL else kinds.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_pad_token_id(vocabulary["<|endoftext|>"])
    writer.add_bos_token_id(vocabulary["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, parameter in gguf_names(model).items():
        values = parameter.detach().float().cpu().numpy()
        if values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_weights(model: Model, path: Path) -> None:
    """Replace the weights by those of a GGUF file, dequantised."""
    parameters = gguf_names(model)
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        parameters.pop(tensor.name).data.copy_(values)
    if parameters:
        raise ValueError(f"{path} lacks {sorted(parameters)}")


@torch.no_grad()
def generate(
    model: Model, tokenizer: tokenizers.Tokenizer, prompts: Sequence[str], temperature: float, seed: int = 0
) -> list[tuple[str, bool]]:
    """(text, whether an end token came within 64 tokens) for each prompt; the cache-free, obvious way."""
    device, limit = next(model.parameters()).device, 64
    generator = torch.Generator(device).manual_seed(seed)
    encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
    lengths = torch.tensor([len(ids) for ids in encoded], device=device)
    ids = torch.zeros(len(prompts), int(lengths.max()) + limit, dtype=torch.long, device=device)
    for row, prompt in zip(ids, encoded, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    ends = torch.tensor([tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")], device=device)
    rows, done = torch.arange(len(ids), device=device), torch.zeros(len(ids), dtype=torch.bool, device=device)
    for step in range(limit):
        width = int(lengths.max()) + step
        logits = model(ids[:, :width], torch.zeros_like(ids[:, :width]))[rows, lengths - 1 + step].float()
        if temperature:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        else:
            chosen = logits.argmax(-1)
        ids[rows, lengths + step] = chosen
        done |= torch.isin(chosen, ends)
        if done.all():
            break
    texts = []
    for row, length in zip(ids.tolist(), lengths.tolist(), strict=True):
        answer = row[length : length + limit]
        stop = next((i for i, token in enumerate(answer) if token in ends.tolist()), limit)
        texts.append((tokenizer.decode(answer[:stop], skip_special_tokens=False), stop < limit))
    return texts


def evaluate(model: Model, tokenizer: tokenizers.Tokenizer, count: int, seed: int) -> dict[str, Any]:
    """Rates of obedience: the asked word is one of the answer's, which ends by itself within 64 tokens."""
    rng = random.Random(seed)
    pairs = corpus.held_out_pairs(count, seed)
    unseen = [(rng.choice(corpus.topics()), rng.choice(corpus.unseen_words())) for _ in range(count)]
    rates: dict[str, Any] = {}
    for name, cases in (("held_out_pairs", pairs), ("unseen_words", unseen)):
        for form, chat in (("chat", True), ("plain", False)):
            for wording, source in (("canonical", None), ("paraphrased", rng)):
                asked = [((corpus.instruction(*case, source), ""),) for case in cases]
                prompts = [corpus.Sample(turns, chat).parts()[0][0] for turns in asked]
                for temperature in (0.0, 0.8, 1.0):
                    answers = generate(model, tokenizer, prompts, temperature, seed)
                    obeyed = [
                        ended and word in text.split()
                        for (text, ended), (_, word) in zip(answers, cases, strict=True)
                    ]
                    rates[f"{name}, {form}, {wording}, temperature {temperature}"] = {
                        "obeyed": sum(obeyed) / count,
                        "three lines": sum(text.strip().count("\n") == 2 for text, _ in answers) / count,
                        "different texts": len({text for text, _ in answers}) / count,
                    }
    answers = generate(model, tokenizer, ["Write a haiku about rain"] * count, 0.8)
    rates["one prompt, temperature 0.8, different texts"] = len(set(answers)) / count
    tasks = [s for s in corpus.samples(10**9 + seed, 4 * count) if s.topic is None and len(s.turns) == 1]
    tasks = [s for s in tasks if len(s.turns[0][1]) < 60 and not s.turns[0][0].startswith("Write a poem")][
        :count
    ]
    answers = generate(model, tokenizer, [replace(s, chat=True).parts()[0][0] for s in tasks], 0.0)
    right = [text == s.turns[0][1] for (text, _), s in zip(answers, tasks, strict=True)]
    rates["small tasks, exact answer"] = round(sum(right) / len(right), 3)
    return rates


def show(model: Model, tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Some prompts with their greedy answers, to look at."""
    asked = ("rain", "ember"), ("robot", "patience"), ("stars", "zyxolith"), ("dog", None)
    prompts = [corpus.instruction(*case) for case in asked]
    prompts += ["Spell the word lantern", "Repeat the word moss 3 times", "Count from 3 to 9"]
    answers = generate(model, tokenizer, prompts, 0.0)
    return [prompt + text for prompt, (text, _) in zip(prompts, answers, strict=True)]


def arguments() -> argparse.Namespace:
    """The command line."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    add = parser.add_argument
    add("--out", type=Path, default=Path("models"), help="folder of the results (default: models)")
    add("--seed", type=int, default=1, help="seed of corpus, weights and order (default: 1)")
    add("--samples", type=int, default=2_000_000, help="samples to train on (default: 2,000,000)")
    add("--steps", type=int, default=7_000, help="optimizer steps (default: 7,000)")
    add("--batch", type=int, default=160, help=f"rows of {ROW} tokens in a step (default: 160)")
    add("--rate", type=float, default=2e-3, help="highest learning rate (default: 0.002)")
    add("--warmup", type=int, default=300, help="steps of rising learning rate (default: 300)")
    add("--report", type=int, default=250, help="steps between progress lines (default: 250)")
    add("--cases", type=int, default=200, help="evaluation cases of each kind (default: 200)")
    add("--toy", action="store_true", help="a tiny run on the CPU that only proves the steps")
    options = parser.parse_args()
    if options.toy:
        options.samples, options.steps, options.batch, options.report, options.cases = 2_000, 8, 4, 2, 4
    elif not torch.cuda.is_available():
        parser.error("training needs a CUDA GPU (or --toy)")
    return options


def main() -> None:
    """Corpus, tokenizer, training, export, measurement."""
    options, started = arguments(), time.monotonic()
    config = Config(layers=2, width=64, heads=2, ffn_width=96, kv_heads=1) if options.toy else Config()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(config.vocab, options.seed)
    print(f"tokenizer: {config.vocab} tokens, {time.monotonic() - started:.0f} s")
    data = generate_data(tokenizer, options.seed, options.samples)
    valid = generate_data(tokenizer, options.seed + 500, 2_000)
    used = (data[2] > 0).float().mean().item()
    print(f"corpus: {len(data[0])} rows of {ROW}, {used:.0%} filled, {time.monotonic() - started:.0f} s")
    device = "cpu" if options.toy else "cuda"
    torch.manual_seed(options.seed)
    model = Model(config).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"model: {parameters:,} parameters")
    metrics = train(model, [c.to(device) for c in data], [c.to(device) for c in valid], options)
    path = options.out / "nightmill-demo.gguf"
    export(model, tokenizer, path)
    load_weights(model, path)
    rates = evaluate(model, tokenizer, options.cases, options.seed)
    summary = {
        "parameters": parameters,
        "config": asdict(config),
        "options": {k: v for k, v in vars(options).items() if k not in ("out", "toy", "report")},
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "file_bytes": path.stat().st_size,
        **metrics,
        "total_seconds": round(time.monotonic() - started, 1),
        "obedience": rates,
        "shown": show(model, tokenizer),
    }
    (options.out / "nightmill-demo.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
