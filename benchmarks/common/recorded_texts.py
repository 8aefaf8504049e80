"""Real answers, and a runner that draws them whatever its weights are.

A model that fits on a laptop writes the answers; any other computes them as if they were its own, at its own
speed. So drafts are measured on real texts with weights of any size, random ones included.
"""

import json
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.request.structured import constrained_by
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.base import Drawn, IntArray, PageKind, Runner, StepBatch, mask_words

__all__ = [
    "NoArithmetic",
    "RecordedRunner",
    "RecordedText",
    "read_texts",
    "real_rows",
    "recorded",
    "write_texts",
    "write_vocabulary",
]

_PROMPTS = Path(__file__).parents[1] / "real_prompts"
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "date": {"type": ["string", "null"], "maxLength": 30},
        "place": {"type": ["string", "null"], "maxLength": 40},
        "people": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 3},
        "category": {"enum": ["event", "sale", "lost and found", "person", "other"]},
        "price": {"type": ["number", "null"], "minimum": 0, "maximum": 100000},
    },
    "required": ["title", "date", "place", "people", "category", "price"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class RecordedText:
    """A row, its prompt as tokens, and the tokens of its answer; `schema`: what the answer obeys."""

    kind: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    schema: dict[str, Any] | None = None

    def request(self, number: int, *, answers: int = 0) -> Request:
        """The request that this answers; `answers`: the most tokens, by default as many as were recorded."""
        return Request(
            f"{self.kind}-{number}", 1, self.prompt_ids,
            GenerationParams(max_tokens=answers or len(self.token_ids), temperature=0.0),
            seed=number,
            constrained=None if self.schema is None else constrained_by({"json_schema": self.schema}),
        )  # fmt: skip


def real_rows(kind: str, count: int) -> list[tuple[str, dict[str, Any] | None]]:
    """So many rows of a kind, summary, edit or json: each a message, and the schema of its answer."""
    name = "notices" if kind == "json" else "passages"
    text = (_PROMPTS / f"{name}.txt").read_text()
    pieces = [one.strip() for one in text.split("\n" if kind == "json" else "\n\n") if one.strip()]
    asked = {
        "summary": (
            "Summarise this text in three sentences, in its own words where you can:\n\n{}",
            "Which are the two most important sentences of this text? Copy them exactly:\n\n{}",
            "Write the key facts of this text as a list of short points:\n\n{}",
        ),
        "edit": (
            "Correct the spelling of this text, and change nothing else:\n\n{}",
            "Rewrite this text, with the first sentence left out:\n\n{}",
        ),
        "json": ("Extract title, date, place, people, category and price as JSON:\n\n{}",),
    }[kind]
    rows = [ask.format(piece) for ask in asked for piece in pieces]
    return [(rows[number % len(rows)], _SCHEMA if kind == "json" else None) for number in range(count)]


def write_texts(path: Path, texts: list[RecordedText]) -> None:
    """Write texts as JSON lines."""
    path.write_text("".join(json.dumps(asdict(text)) + "\n" for text in texts))


def read_texts(path: Path) -> list[RecordedText]:
    """Read what `write_texts` wrote."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        RecordedText(row["kind"], tuple(row["prompt_ids"]), tuple(row["token_ids"]), row["schema"])
        for row in rows
    ]


def write_vocabulary(file: GgufFile, path: Path) -> None:
    """Write the vocabulary of a model file as one without weights, for grammars over recorded tokens."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(file.string("tokenizer.ggml.model"))
    writer.add_tokenizer_pre(file.string("tokenizer.ggml.pre", default="default"))
    writer.add_token_list(file.strings("tokenizer.ggml.tokens"))
    if (kinds := file.integers("tokenizer.ggml.token_type", default=None)) is not None:
        writer.add_token_types(kinds)
    for name in ("bos", "eos"):
        if (token := file.integer(f"tokenizer.ggml.{name}_token_id", default=None)) is not None:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


class NoArithmetic:
    """A runner that computes nothing, under a `RecordedRunner`: for what a model's speed has no part in."""

    def __init__(self, vocab: int, *, slots: int, kv_pages: int) -> None:
        self.vocab, self.slots, self.kv_pages = vocab, slots, kv_pages
        self.page_size = 16
        self.page_kinds: tuple[PageKind, ...] = ()
        self.max_draws = slots + 64
        self.embeds = self.predicts = False
        self.prompt_grid, self.snapshots, self.depth = 1, 0, 3
        self.arithmetic = Arithmetic("none", "none", "none", "none", "none", "none")

    def launch(self, batch: StepBatch) -> None:
        """Do nothing."""

    def mask_room(self, count: int) -> IntArray:
        """Return room for masks."""
        return np.empty((count, mask_words(self.vocab)), dtype=np.int32)

    def draw(self, masks: IntArray) -> None:
        """Do nothing."""

    def collect(self) -> Drawn:
        """Return nothing, in whose place something was recorded."""
        return Drawn(np.zeros(0, dtype=np.int32))

    def close(self) -> None:
        """Do nothing."""


class RecordedRunner:
    """A runner whose draws are replaced by recorded tokens as they are collected; all else is computed.

    texts  by seed of their requests
    """

    def __init__(self, runner: Runner, texts: dict[int, RecordedText]) -> None:
        self._runner = runner
        self._tokens = {seed: (*text.prompt_ids, *text.token_ids) for seed, text in texts.items()}
        self._of_slot: list[tuple[int, ...]] = [()] * runner.slots
        self._drawing: deque[IntArray] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: StepBatch) -> None:
        """Launch, and note what its draws are to be."""
        for admission in batch.admissions:
            self._of_slot[admission.slot] = self._tokens.get(admission.seed, ())
        self._runner.launch(batch)
        places = zip(batch.draws["slot"].tolist(), batch.draws["position"].tolist(), strict=True)
        tokens = [self._at(slot, position) for slot, position in places]
        self._drawing.append(np.array(tokens, dtype=np.int32))

    def collect(self) -> Drawn | None:
        """Return the recorded tokens in place of those drawn."""
        drawn = self._runner.collect()
        return None if drawn is None else Drawn(self._drawing.popleft(), drawn.found, drawn.sums)

    def _at(self, slot: int, position: int) -> int:
        """The token at a place; past a text's end one that nobody takes."""
        tokens = self._of_slot[slot]
        return tokens[position] if position < len(tokens) else 0


def recorded(kind: str, request: Request, done: Completion, schema: dict[str, Any] | None) -> RecordedText:
    """A request and its completion as a text."""
    return RecordedText(kind, request.prompt_ids, done.token_ids, schema)
