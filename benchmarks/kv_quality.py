"""What an FP8 cache costs in quality: a model's logits over a text, and facts found in long contexts.

    python -m benchmarks.kv_quality [MODEL.gguf TEXT.txt] [--tokens 2048] [--reference]

Logits of the same tokens with keys and values as elements and in FP8, side by side: mean and largest KL
divergence, and how often the most likely token is the same. Facts: of so many random keys one is a noisy copy
of the query, and is found if it has the largest score; keys have a part in common, as keys with a bias have.
"""

import argparse
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer.tokenizer import Tokenizer
from nightmill.worker.runners.gpu.numbers import Numbers
from nightmill.worker.runners.kv_format import KvFormat
from nightmill.worker.runners.reference.fp8 import POWERS_OF_HALF, as_kept
from tests.gpu.comparing import Agreement, compare_logits
from tests.gpu.driving import BLOCK, Chunk, Cuda, Pages, Reference, logits_of

CHUNK = 128  # tokens whose logits are compared at once
CONTEXTS = (1_000, 4_000, 16_000, 30_000)
HEAD, QUERIES = 64, 100
NOISE = 6.0
"""Of the fact beside the query: so much that some of the facts are not found."""


def agreement(path: Path, text: str, tokens: int, *, reference: bool) -> tuple[Agreement, int]:
    """Of logits with either cache, over the first tokens of a text; and how many."""
    with GgufFile.open(path) as file:
        spec = read_spec(file)
        ids = Tokenizer.from_gguf(file).encode(text)[: min(tokens, spec.context_length)]
        pages = -(-len(ids) // BLOCK)
        subjects = {}
        found: dict[KvFormat, list[npt.NDArray[np.float32]]] = {kv: [] for kv in KvFormat}
        for kv in KvFormat:
            options = {"slots": 1, "kv_blocks": pages}
            if reference:
                subjects[kv] = Reference(file, spec, kv=kv, **options)
            else:
                subjects[kv] = Cuda(
                    file, spec, numbers=Numbers(kv=kv), context=len(ids), max_draws=CHUNK, **options
                )
            with closing(subjects[kv].runner):
                for start in range(0, len(ids), CHUNK):
                    length = min(CHUNK, len(ids) - start)
                    chunk = Chunk(0, ids, start, length, length)
                    found[kv].append(logits_of(subjects[kv], Pages(1, pages), [chunk], admit=not start))
        return compare_logits(*map(np.concatenate, (found[KvFormat.FP8], found[KvFormat.ELEMENT]))), len(ids)


def facts_found(keys: int, rng: np.random.Generator) -> tuple[float, float, float]:
    """Shares of the facts that are found among so many keys: as half, in FP8, and by both or neither."""
    common = rng.standard_normal(HEAD) * np.where(np.arange(HEAD) < 4, 30.0, 1.0)
    queries = rng.standard_normal((QUERIES, HEAD))
    places = rng.integers(0, keys, QUERIES)
    hits = {}
    noise = rng.standard_normal((QUERIES, HEAD)) * NOISE
    for name in ("half", "fp8"):
        own = np.random.default_rng(keys)
        found = np.empty(QUERIES, dtype=bool)
        for index, (query, place) in enumerate(zip(queries, places, strict=True)):
            context = own.standard_normal((keys, HEAD), dtype=np.float32)
            context[place] = query + noise[index]
            context = (context + common).astype(np.float16).astype(np.float32)
            if name == "fp8":
                context = as_kept(context, POWERS_OF_HALF)
            found[index] = np.argmax(context @ query.astype(np.float32)) == place
        hits[name] = found
    return hits["half"].mean(), hits["fp8"].mean(), (hits["half"] == hits["fp8"]).mean()


def main() -> None:
    """Print both."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("model", nargs="?", type=Path)
    arguments.add_argument("text", nargs="?", type=Path)
    arguments.add_argument("--tokens", type=int, default=2048)
    arguments.add_argument("--reference", action="store_true", help="by NumPy, without a GPU")
    options = arguments.parse_args()
    print("| keys | found as half | in FP8 | the same |\n| ---: | ---: | ---: | ---: |")
    for keys in CONTEXTS:
        half, fp8, same = facts_found(keys, np.random.default_rng(1))
        print(f"| {keys:,} | {half:.1%} | {fp8:.1%} | {same:.1%} |", flush=True)
    if options.model and options.text:
        found, count = agreement(
            options.model, options.text.read_text(), options.tokens, reference=options.reference
        )
        print(
            f"{count:,} tokens: mean KL {found.mean_kl:.2g}, largest {found.largest_kl:.2g}, the same most "
            f"likely token in {found.same_top:.1%} of the {found.clear_rows:,} places that are clear"
        )


if __name__ == "__main__":
    main()
