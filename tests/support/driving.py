"""Drives runners step by step, with chosen tokens, and whole engines over lists of requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.drafting import Drafts
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import (
    Admission,
    IntArray,
    KindRows,
    PageKind,
    Runner,
    StepBatch,
    make_draws,
)
from nightmill.worker.runners.gpu.kv_cache import kinds_layout
from nightmill.worker.runners.gpu.precision import HALF
from nightmill.worker.runners.kv_format import KvFormat
from nightmill.worker.runners.reference import ReferenceRunner, Rounding
from nightmill.worker.runners.reference.kv_cache import reference_layout
from tests.support.cuda_runners import cuda_runner
from tests.support.engines import NoText, complete
from tests.support.one_by_one import OneByOne

BLOCK = 16
GREEDY = GenerationParams(temperature=0.0)
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Chunk:
    """Compute tokens[start:start + length] of the sequence in `slot`; the last `draws` rows give logits.

    drawn  the token (then it is one) counts as drawn, not as part of a prompt
    """

    slot: int
    tokens: Sequence[int]
    start: int
    length: int
    draws: int = 1
    drawn: bool = False


class Pages:
    """Gives every slot its own pages, in an order that is not the order of addresses."""

    def __init__(self, slots: int, per_slot: int) -> None:
        order = np.random.default_rng(0).permutation(slots * per_slot).astype(np.int32)
        self.tables = order.reshape(slots, per_slot)

    def batch(self, chunks: Sequence[Chunk], *, admit: bool, kinds: tuple[PageKind, ...] = ()) -> StepBatch:
        """The step of these chunks, drawn tokens first; admit: the sequences are new, and greedy.

        kinds  of the runner's pages, each of which gets as many pages as one alone would have
        """
        drawn = [chunk.drawn for chunk in chunks]
        assert drawn == sorted(drawn, reverse=True)
        assert all(chunk.length == 1 for chunk in chunks if chunk.drawn)
        lengths = np.array([chunk.length for chunk in chunks])
        starts = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        positions = np.concatenate([np.arange(c.start, c.start + c.length) for c in chunks]).astype(np.int32)
        slots = np.array([chunk.slot for chunk in chunks], dtype=np.int32)
        row_slots = np.repeat(slots, lengths)
        contexts = np.array([chunk.start + chunk.length for chunk in chunks], dtype=np.int32)
        width = -(-int(contexts.max()) // BLOCK)
        first, *further = (
            KindRows(
                (tables[row_slots, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32),
                tables[slots, :width],
            )
            for tables in self._entries(kinds)
        )
        drawing = np.concatenate(
            [np.arange(end - chunk.draws, end) for chunk, end in zip(chunks, starts[1:], strict=True)]
        )
        admissions = (Admission(c.slot, tuple(c.tokens), GREEDY, c.slot) for c in chunks)
        return StepBatch(
            tokens=np.concatenate([c.tokens[c.start : c.start + c.length] for c in chunks]).astype(np.int32),
            positions=positions,
            cache_rows=first.cache_rows,
            sequence_starts=starts,
            context_lengths=contexts,
            page_tables=first.page_tables,
            slots=slots,
            draws=make_draws(drawing.astype(np.int32), row_slots[drawing], positions[drawing] + 1),
            drawn=sum(drawn),
            admissions=tuple(admissions) if admit else (),
            further=tuple(further),
        )

    def _entries(self, kinds: tuple[PageKind, ...]) -> Iterator[IntArray]:
        """Tables for each kind: of entries of `BLOCK` tokens."""
        if not kinds:
            yield self.tables
        for number, kind in enumerate(kinds):
            parts = kind.tokens // BLOCK
            pages = self.tables + np.int32(number * self.tables.size)
            entries = pages[:, :, None] * kind.stride + np.arange(parts, dtype=np.int32)
            yield entries.reshape(len(pages), -1).astype(np.int32)


class HasLogits(Protocol):
    """A runner that shows the logits of its last launch."""

    def show(self, rows: int) -> Logits: ...

    @property
    def runner(self) -> Runner: ...


class Cuda:
    """The CUDA runner, with its logits."""

    def __init__(self, file: GgufFile, spec: ModelSpec, **options: Any) -> None:
        if (layout := kinds_layout(spec, options.get("precision", HALF).kv)) is not None:
            options["kv_pages"] *= len(layout.kinds)
        self.runner = cuda_runner(file, spec, **options)

    def show(self, rows: int) -> Logits:
        return self.runner.logits(rows)


class Reference:
    """The reference runner, with its logits."""

    def __init__(self, file: GgufFile, spec: ModelSpec, **options: Any) -> None:
        self._logits: Logits | None = None
        rounding = Rounding(options.pop("kv", KvFormat.ELEMENT), options.pop("fp8", False))
        options["kv_pages"] *= len(reference_layout(spec, options.get("page_size", BLOCK)).kinds)
        self.runner = ReferenceRunner(file, spec, trace=self._record, rounding=rounding, **options)

    def _record(self, stage: str, values: npt.NDArray[Any]) -> None:
        if stage == "logits":
            self._logits = values.copy()

    def show(self, rows: int) -> Logits:
        assert self._logits is not None
        assert len(self._logits) == rows
        return self._logits


def logits_of(subject: HasLogits, pages: Pages, chunks: Sequence[Chunk], *, admit: bool) -> Logits:
    """Run one step; the logits of its drawing rows in order."""
    batch = pages.batch(chunks, admit=admit, kinds=subject.runner.page_kinds)
    subject.runner.launch(batch)
    sampled = subject.runner.collect()
    assert sampled is not None
    logits = subject.show(len(batch.draws))
    np.testing.assert_array_equal(sampled.tokens, logits.argmax(axis=1))
    return logits


def generate(
    runner: Runner, requests: Sequence[Request], *, context: int, token_budget: int,
    eos_ids: frozenset[int] = frozenset(), check: bool = True, drafts: bool = False,
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Generate for all requests at once; the drawn tokens by job id. With drafts, some have to be right."""
    engine = Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=eos_ids),
        EngineSizes(context_length=context, max_sequences=runner.slots, token_budget=token_budget),
        constraints=OneByOne(),
        drafts=Drafts.NGRAM if drafts else Drafts.OFF,
    )
    done = complete(engine, requests, check=check)
    assert {completion.error for completion in done.values()} <= {None}
    assert not drafts or engine.stats.guessed_tokens > engine.stats.guessed_right > 0
    return {job_id: completion.token_ids for job_id, completion in done.items()}
