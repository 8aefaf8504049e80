"""The quality that formats of weights, and of keys and values, cost a model, computed by NumPy.

    python -m benchmarks.formats [MODEL.gguf] [--tokens 20000] [text.txt ...]

First, facts found in long contexts over an FP8 cache: of so many random keys one is a noisy copy of the
query, and is found if it has the largest score; keys have a part in common, as keys with a bias have.

With a model: reads texts, by default those of `benchmarks/real_prompts` and the pages of `docs/`, in pieces
of 512 tokens, and compares the distribution of the next token at each place with that of the file as it is:
mean divergence (KL, in nats), and how often the best token is the same. NumPy rounds weights, activations,
keys and values as the kernels do that are held to it. Q8_0 and others are the same weights, rounded to that
type by `gguf`. Then it rounds them to Q4_K and Q6_K, and compares their elements in 16 bits, and those that
kernels make of packets, with the same weights in float. Prints tables in Markdown. Needs no GPU.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.model.tokenizer import Tokenizer
from nightmill.worker.runners.kv_format import KvFormat
from nightmill.worker.runners.reference.fp8 import POWERS_OF_HALF, as_kept
from tests.support.agreement import compared
from tests.support.driving import BLOCK, Chunk, Pages, Reference, logits_of
from tests.support.k_quants import quantised
from tests.support.packed_elements import elements_of

ROOT = Path(__file__).parents[1]
TEXTS = (*sorted((ROOT / "benchmarks" / "real_prompts").glob("*.txt")), *sorted((ROOT / "docs").glob("*.md")))
PIECE = 512  # tokens; a page of the cache goes into it a whole number of times
CONTEXTS = (1_000, 4_000, 16_000, 30_000)  # keys among which a fact is looked for
HEAD, QUERIES = 64, 100
NOISE = 6.0
"""Of the fact beside the query: so much that some of the facts are not found."""
REQUANTISED = ("Q8_0", "Q5_0", "Q4_0")
K_TYPES = (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K)
FLOATS, HALF, PACKED = "in float", "`--weights 16bit`", "`--weights file`"


class Requantised(GgufFile):
    """A model file whose matrices are rounded to another type as they are read."""

    kind: GGMLQuantizationType | None = None
    elements: str = FLOATS
    """What becomes of blocks of K types."""

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor's numbers."""
        values = super().array(name)
        if self.kind in K_TYPES and values.ndim > 1 and values.size % GGML_QUANT_SIZES[self.kind][0] == 0:
            blocks = quantised(
                values, self.kind
            )  # through ends of rows, if they are no whole number of blocks
            made = (
                elements_of(blocks, self.kind) if self.elements == PACKED else dequantize(blocks, self.kind)
            )
            if self.elements == HALF:
                made = made.astype(np.float16)
            return made.astype(np.float32).reshape(values.shape)
        if self.kind is None or values.ndim < 2 or values.shape[-1] % GGML_QUANT_SIZES[self.kind][0]:
            return values
        return dequantize(quantize(values, self.kind), self.kind).reshape(values.shape)


@dataclass(frozen=True)
class Choice:
    """What is chosen; `name` is for the table, `options` are the NumPy runner's."""

    name: str
    options: dict[str, Any]
    kind: GGMLQuantizationType | None = None
    elements: str = FLOATS


CHOICES = (
    *(Choice(f"weights rounded to {name}", {}, GGMLQuantizationType[name]) for name in REQUANTISED),
    Choice("`--weights fp8`", {"fp8": True}),
    Choice("`--kv fp8`", {"kv": KvFormat.FP8}),
    Choice("`--weights fp8 --kv fp8`", {"fp8": True, "kv": KvFormat.FP8}),
)


@dataclass
class Cost:
    """Sums over the places that were compared."""

    places: int = 0
    divergence: float = 0.0
    same: float = 0.0
    largest: float = 0.0

    def add(self, actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
        """Compare the logits of some places."""
        found = compared(actual, expected)
        self.places += found.rows
        self.divergence += found.rows * found.mean_kl
        self.same += found.rows * found.same_top
        self.largest = max(self.largest, found.largest_kl)

    def row(self, name: str) -> str:
        """Of the table."""
        return (
            f"| {name} | {self.divergence / self.places:.2g} | {self.largest:.2g} "
            f"| {self.same / self.places:.2%} |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, and print the table."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("texts", type=Path, nargs="*", default=TEXTS)
    parser.add_argument(
        "--tokens", type=int, default=20_000, help="places to compare, in whole pieces of 512"
    )
    parser.add_argument("--only-k-types", action="store_true", help="of a model only Q4_K and Q6_K")
    options = parser.parse_args(arguments)
    print("| keys | found as half | in FP8 | the same |\n| ---: | ---: | ---: | ---: |")
    for keys in CONTEXTS:
        half, fp8, same = facts_found(keys, np.random.default_rng(1))
        print(f"| {keys:,} | {half:.1%} | {fp8:.1%} | {same:.1%} |", flush=True)
    if options.model is None:
        return
    with GgufFile.open(options.model) as file:
        spec = read_spec(file)
        pieces = list(pieces_of(Tokenizer.from_gguf(file), options.texts, options.tokens))
    if not pieces:
        raise SystemExit(f"the texts have fewer than {PIECE} tokens")
    print(f"\n{spec.name}, {len(pieces) * PIECE:,} tokens of text, against the file as it is:\n")
    tables = [(Choice("", {}), CHOICES)] if not options.only_k_types else []
    tables += [
        (Choice("", {}, kind), tuple(Choice(f"{kind.name}, {one}", {}, kind, one) for one in (HALF, PACKED)))
        for kind in K_TYPES
    ]
    for against, choices in tables:
        if against.kind is not None:
            print(f"\nAgainst {against.kind.name} in float:\n")
        costs = costs_of(options.model, spec, pieces, against, choices)
        print("| | mean KL, nats | largest | same best token |\n| --- | --- | --- | --- |")
        for choice in choices:
            print(costs[choice.name].row(choice.name), flush=True)


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


def pieces_of(tokenizer: Tokenizer, texts: Sequence[Path], tokens: int) -> Iterator[list[int]]:
    """Token ids of the texts in pieces of PIECE, as many as make up `tokens`, or fewer if the texts end."""
    ids = [token for text in texts for token in tokenizer.encode(text.read_text(encoding="utf-8"))]
    for start in range(0, min(len(ids), tokens + PIECE - 1) - PIECE + 1, PIECE):
        yield ids[start : start + PIECE]


def costs_of(
    path: Path, spec: ModelSpec, pieces: Sequence[list[int]], against: Choice, choices: Sequence[Choice]
) -> dict[str, Cost]:
    """What each choice costs, by its name. All are computed piece by piece, so that no logits are kept."""
    costs = {choice.name: Cost() for choice in choices}
    with ExitStack() as stack:

        def made(choice: Choice) -> Reference:
            file = stack.enter_context(Requantised.open(path))
            file.kind, file.elements = choice.kind, choice.elements
            runner = Reference(
                file, spec, kv_pages=PIECE // BLOCK, page_size=BLOCK, slots=1, **choice.options
            )
            stack.enter_context(closing(runner.runner))
            return runner

        as_it_is = made(against)
        others = {choice.name: made(choice) for choice in choices}
        for number, piece in enumerate(pieces, start=1):
            print(f"{number} of {len(pieces)}", end="\r", file=sys.stderr, flush=True)
            logits = partial(_logits, piece=piece)
            expected = logits(as_it_is)
            for name, runner in others.items():
                costs[name].add(logits(runner), expected)
    return costs


def _logits(runner: Reference, piece: list[int]) -> npt.NDArray[np.float32]:
    pages = Pages(1, PIECE // BLOCK)
    return logits_of(runner, pages, [Chunk(0, piece, 0, len(piece), len(piece))], admit=True)


if __name__ == "__main__":
    main()
