"""How many chats become token ids in a second of processor time, through the model's own template.

RAYON_NUM_THREADS=1 python benchmarks/chats.py MODEL.gguf
"""

import argparse
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nightmill.worker.model.chat import ChatTemplate
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer

SHARD = 64
SYLLABLES = "mi la ru ten sor ka ne vol dra chi pe ston gar il ma wen do qua ber lin tor os".split()  # noqa: SIM905 - a list of them is harder to read


def chats(count: int, words: int) -> Iterator[list[dict[str, Any]]]:
    """Of words that no tokenizer has seen before."""
    draw = random.Random(0)
    for _ in range(count):
        text = " ".join("".join(draw.choices(SYLLABLES, k=draw.randint(1, 3))) for _ in range(words))
        yield [{"role": "user", "content": text}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=8192)
    parser.add_argument("--words", type=int, default=100)
    options = parser.parse_args()
    work = list(chats(options.count, options.words))
    shards = [work[start : start + SHARD] for start in range(0, len(work), SHARD)]
    file = GgufFile.open(options.file)
    tokenizer = Tokenizer.from_gguf(file)
    before = sum(os.times()[:4])
    template = ChatTemplate.from_gguf(file, tokenizer)
    tokens = sum(len(ids) for shard in shards for ids in template.encode_all(shard) if isinstance(ids, list))
    template.close()  # the time of the process that renders counts from here
    seconds = sum(os.times()[:4]) - before
    print(f"{len(work) / seconds:,.0f} chats of {tokens / len(work):.0f} tokens per second of processor time")


if __name__ == "__main__":
    main()
