"""How the engine scales on the GPU: from 1 to 4,096 sequences, and from contexts of 128 to 32,000 tokens.

    python -m benchmarks.scaling MODEL.gguf [--repeat 2]

Random token ids, no end-of-text. Prints one JSON line a point; decode rates count from the step after which
all prompts are computed.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.engine import NoText
from jobs.contract import GenerationParams
from worker.engine.engine import Engine
from worker.engine.request import Request
from worker.model.config import ModelConfig
from worker.model.gguf_file import GgufFile
from worker.runners.gpu.runner import CudaRunner

SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PROMPT, ANSWER = 512, 256
CONTEXTS = (128, 512, 2048, 8192, 32000)
LONG_SEQUENCES, LONG_ANSWER = 32, 64
TOKEN_BUDGET = 16384


def main() -> None:
    """Both series."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--repeat", type=int, default=2)
    options = arguments.parse_args()
    file = GgufFile.open(options.model)
    config = ModelConfig.from_gguf(file)
    series = (
        [(count, PROMPT, ANSWER) for count in SEQUENCES],
        [(LONG_SEQUENCES, context - LONG_ANSWER, LONG_ANSWER) for context in CONTEXTS],
    )
    for points in series:
        slots = max(count for count, _, _ in points)
        context = max(prompt + answer for _, prompt, answer in points) + 1
        runner = CudaRunner(
            file, config, slots=slots, depth=3, context=context, max_tokens=TOKEN_BUDGET,
            report=lambda line: print(line, file=sys.stderr),
        )  # fmt: skip
        for count, prompt, answer in points:
            runs = [
                measure(runner, config.vocab, count, prompt, answer, turn)
                for turn in range(options.repeat + 1)
            ]
            whole, decode = (statistics.median(rates) for rates in zip(*runs[1:], strict=True))
            print(
                json.dumps(
                    {
                        "sequences": count,
                        "prompt": prompt,
                        "answer": answer,
                        "output_tokens_per_s": round(whole),
                        "decode_tokens_per_s": round(decode),
                        "gpu": runner.device.name,
                    }
                ),
                flush=True,
            )
        runner.close()


def measure(
    runner: CudaRunner, vocab: int, count: int, prompt: int, answer: int, seed: int
) -> tuple[float, float]:
    """Output tokens per second over all, and while there was nothing left but decoding."""
    draw = np.random.default_rng(seed)
    engine = Engine(
        runner, text_stream=NoText, eos_ids=frozenset(), context_length=prompt + answer + 1,
        max_sequences=count, token_budget=TOKEN_BUDGET, prefix_sharing=False,
    )  # fmt: skip
    for number in range(count):
        params = GenerationParams(max_tokens=answer, temperature=0.6, ignore_eos=True)
        tokens = tuple(draw.integers(0, vocab, prompt).tolist())
        engine.submit(Request(f"{seed}-{number}", 1, tokens, params, seed=number))
    began = decode_began = time.perf_counter()
    before = 0
    while engine.has_work:
        engine.step()
        if not before and engine.stats.prompt_tokens == count * prompt and engine.stats.generated_tokens:
            decode_began, before = time.perf_counter(), engine.stats.generated_tokens
    end = time.perf_counter()
    return count * answer / (end - began), (count * answer - before) / (end - decode_began)


if __name__ == "__main__":
    main()
