"""A runner without arithmetic: the next token is a hash of the seed and of what lies in the cache.

It reads a sequence back through its page table, so a wrong page, slot, position or chunk changes the text.
"""

from collections import deque
from dataclasses import fields
from typing import Any

import numpy as np

from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.jobs.errors import RunnerError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.draft_model import DraftModel
from nightmill.worker.engine.drafting import Drafts
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.metering import Metering
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.runners.base import (
    FOUND,
    FROM_SLOT,
    NO_LOGPROBS,
    NOT_A_NUMBER,
    UNMASKED,
    Drawn,
    IntArray,
    PageKind,
    StepBatch,
    SumArray,
    wants_logprobs,
)
from tests.support.one_by_one import OneByOne
from tests.unit.engine.by_definition import (
    EOS,
    VOCAB,
    PieceStream,
    Rule,
    found_for,
    hashed,
    hidden_state,
    next_token,
)

ARITHMETIC = Arithmetic(
    runner="scripted", device="none", weights="none", kv="none", kernels="hash", model="none"
)


class ScriptedRunner:
    """Computes in `launch`, draws there or under masks in `draw`; checks every batch it is given.

    poison: a token of which no number can be computed. As with real attention, it spoils every place of the
    chunk that it is in, those before it too, and every later one that reads a spoilt place.

    page_kinds: of its pages, which must have one stride. It reads through the tables of all, of those with a
    window what is seen; where all have one, the rest is what it was told when the sequence was admitted.

    grid: over 1 it has states, too: each slot's is the tokens that went through it, which come in order, each
    once, in pieces that begin at multiples of `grid`. snapshots: how many copies of them can be kept.
    """

    def __init__(
        self,
        *,
        kv_pages: int = 64,
        page_size: int = 4,
        slots: int = 8,
        depth: int = 1,
        script: list[int] | None = None,
        poison: int | None = None,
        grid: int = 1,
        snapshots: int = 0,
        page_kinds: tuple[PageKind, ...] = (),
    ) -> None:
        self.kv_pages, self.page_size, self.slots, self.depth, self.vocab = (
            kv_pages,
            page_size,
            slots,
            depth,
            VOCAB,
        )
        self.max_draws = slots + grid  # so that many prompts are told in pieces
        self.page_kinds = page_kinds
        self.texts: list[list[int]] = [[] for _ in range(slots)]
        self.prompt_grid = grid
        self.snapshots = snapshots
        self.embeds = True
        self.predicts = False
        self.sums: list[SumArray | None] = [None] * slots
        self.ended: list[SumArray] = []
        self.states: list[list[int]] = [[-9]] * slots
        self.saved: list[list[int]] = [[-9]] * snapshots
        self.arithmetic = ARITHMETIC
        self.script = script  # the tokens of every answer, instead of the hash
        self.poison = poison
        (stride,) = {kind.stride for kind in page_kinds} or {1}
        cells = kv_pages * stride * page_size
        self.cache = np.full(cells, -7)
        self.spoilt = np.zeros(cells, dtype=np.bool_)
        self.drawn = np.zeros(cells, dtype=np.bool_)  # computed as a token that was drawn
        self.kinds: dict[tuple[int, bytes], bool] = {}
        self.last = np.zeros(slots, dtype=np.int64)
        self.admitted: list[tuple[int, int] | None] = [None] * slots  # seed, prompt and answer length
        self.queue: deque[tuple[Drawn, set[int]]] = deque()
        self.undrawn: tuple[StepBatch, list[tuple[int, list[int]] | None], list[list[int] | None]] | None = (
            None
        )
        self.batches: list[StepBatch] = []
        self.fail_at: int | None = None

    def launch(self, batch: StepBatch) -> None:
        if self.fail_at is not None and len(self.batches) >= self.fail_at:
            raise RunnerError("scripted failure")
        assert len(self.queue) < self.depth
        assert self.undrawn is None, "the masks of the launch before are missing"
        for field in fields(batch):
            if field.name not in (
                "admissions", "draws", "drawn", "snapshots", "further", "pools", "keeps", "restores",
                "text_types", "guesses",
            ):  # fmt: skip
                assert getattr(batch, field.name).dtype == np.int32
        self.batches.append(batch)
        busy = set().union(*(slots for _, slots in self.queue)) if self.queue else set()
        for admission in batch.admissions:
            assert admission.slot not in busy, "a slot changed hands while a launch still used it"
            self.admitted[admission.slot] = (admission.seed, len(admission.token_ids))
            self.last[admission.slot] = -99
            self.texts[admission.slot] = [*admission.token_ids]
            saved = self.saved[admission.snapshot] if admission.snapshot >= 0 else []
            self.states[admission.slot] = [*saved]
        assert len(batch.slots) <= self.slots
        for slot, place in batch.restores:
            self.states[slot] = [*self.saved[place]]
        for slot, place in batch.keeps:
            self.saved[place] = [*self.states[slot]]
        touched = [slot for slot, _ in (*batch.restores, *batch.keeps)]
        assert len({*touched}) == len(touched) and {*touched} <= {*batch.slots[: batch.drawn].tolist()}
        prompts = batch.slots[batch.drawn :].tolist()
        assert len(set(prompts)) == len(prompts)
        assert (np.diff(batch.sequence_starts)[: batch.drawn] == 1).all()
        starts = batch.sequence_starts
        assert starts[0] == 0 and starts[-1] == len(batch.tokens) == len(batch.positions) == len(
            batch.cache_rows
        )
        kinds = self.page_kinds or (PageKind(None, self.page_size),)
        written = [row for given in batch.kinds for row in given.cache_rows.tolist()]
        assert len(set(written)) == len(written), "two tokens share a cache row"
        drawing: list[tuple[int, int]] = []
        known: list[tuple[int, list[int]] | None] = []
        readers: dict[int, set[int]] = {}
        contexts = []
        hidden: list[tuple[int, int]] = []  # slots, and cells that their tables still name
        writers: dict[int, int] = {}
        texts: list[list[int]] = []
        for s, slot in enumerate(batch.slots):
            part = slice(starts[s], starts[s + 1])
            tokens = batch.tokens[part].astype(np.int64)
            assert (tokens[:-1] != FROM_SLOT).all()
            tokens[tokens == FROM_SLOT] = self.last[slot]
            length = batch.context_lengths[s]
            assert batch.positions[part].tolist() == list(range(length - len(tokens), length))
            seen: list[np.ndarray] = []
            for kind, given in zip(kinds, batch.kinds, strict=True):
                places = np.arange(kind.first_seen(length - len(tokens)), length)
                rows = given.page_tables[s][places // self.page_size] * self.page_size
                rows = rows + places % self.page_size
                assert (rows >= 0).all()
                unseen = given.page_tables[s][: kind.first_seen(length - len(tokens)) // self.page_size]
                assert (unseen >= 0).all(), "what nobody sees has no address"
                hidden += [(int(slot), int(entry) * self.page_size) for entry in unseen]
                writers |= dict.fromkeys(given.cache_rows[part].tolist(), int(slot))
                for row in rows.tolist():
                    readers.setdefault(row, set()).add(int(slot))
                assert given.cache_rows[part].tolist() == rows[len(rows) - len(tokens) :].tolist()
                self.cache[given.cache_rows[part]] = tokens
                self.drawn[given.cache_rows[part]] = s < batch.drawn
                seen.append(rows)
            contexts.append(seen)
            texts.append(self.texts[slot][: length - len(tokens)])
            texts[-1] += tokens.tolist()
        chunks = range(len(batch.slots))
        for s in (*chunks[batch.drawn :], *chunks[: batch.drawn]):  # prompts come before what was drawn
            length = starts[s + 1] - starts[s]
            for rows in contexts[s]:
                read = self.cache[rows].tolist()
                if len(read) == batch.context_lengths[s]:
                    texts[s] = read
                assert read == texts[s][len(texts[s]) - len(read) :], "a page holds other tokens"
            if self.prompt_grid > 1:
                self.go_on(batch, s, texts[s], int(length))
            before_it = np.concatenate([rows[:-length] for rows in contexts[s]])
            own = np.concatenate([rows[-length:] for rows in contexts[s]])
            self.spoilt[own] = (self.cache[own] == self.poison).any() or self.spoilt[before_it].any()
        for slot, place in batch.snapshots:
            assert slot in batch.slots[batch.drawn :] and slot not in batch.slots[: batch.drawn]
            assert len(self.states[slot]) % self.prompt_grid == 0
            self.saved[place] = [*self.states[slot]]
        for s, (slot, text) in enumerate(zip(batch.slots, texts, strict=True)):
            if starts[s + 1] - 1 in batch.draws["row"][batch.draws["slot"] >= 0]:
                admitted = self.admitted[slot]
                assert admitted is not None
                for rows in contexts[s]:
                    self.check_kinds(admitted[0], text, rows)
                spoilt = self.spoilt[contexts[s][0][-1]]
                known.append(None if spoilt else (admitted[0], text))
                drawing.append((slot, len(text)))
        assert all(len(readers[row]) == 1 for row in written), "a page is written that another sequence reads"
        for slot, cell in hidden:
            others = {writers.get(cell + place, slot) for place in range(self.page_size)}
            assert others == {slot}, "a table names a page that was given back, and that another writes"
        assert len(batch.draws) <= self.max_draws
        drawn, given = np.split(batch.draws, [len(drawing)])
        assert drawing == drawn[["slot", "position"]].tolist()
        assert (given["slot"] == -1).all() and (given["likely"] != NO_LOGPROBS).all()
        before: list[list[int] | None] = []  # the tokens that those follow which are given
        for row, place in given[["row", "position"]].tolist():
            s = int(np.searchsorted(starts, row, side="right")) - 1
            assert s >= batch.drawn and place == batch.positions[row] + 1
            lacking = len(texts[s]) - place
            own = np.concatenate([rows[: len(rows) - lacking] for rows in contexts[s]])
            before.append(None if self.spoilt[own].any() else texts[s][:place])
        masks = batch.draws["mask"][batch.draws["mask"] != UNMASKED].tolist()
        assert masks == list(range(len(masks)))
        self.pool(batch, contexts, texts)
        self.undrawn = batch, known, before
        if not masks:
            self.draw(np.zeros((0, 1), dtype=np.int32))

    def pool(self, batch: StepBatch, contexts: list[list[np.ndarray]], texts: list[list[int]]) -> None:
        """Add what `hidden_state` says of the rows of prompts to the sums of their slots."""
        assert len(set(batch.pools["slot"].tolist())) == len(batch.pools)
        assert len(batch.draws) + batch.pools["rows"].sum() <= self.max_draws
        for first, rows, slot, begins, ends in batch.pools.tolist():
            s = int(np.searchsorted(batch.sequence_starts, first, side="right")) - 1
            assert s >= batch.drawn and batch.slots[s] == slot
            assert first + rows <= batch.sequence_starts[s + 1] and rows > 0
            total = np.zeros(3) if begins else self.sums[slot]
            assert total is not None, "a sum goes on that did not begin"
            for place in batch.positions[first : first + rows].tolist():
                lacking = len(texts[s]) - place - 1
                own = np.concatenate([rows[: len(rows) - lacking] for rows in contexts[s]])
                total = total + (np.nan if self.spoilt[own].any() else hidden_state(texts[s][: place + 1]))
            self.sums[slot] = None if ends else total
            if ends:
                self.ended.append(total)

    def go_on(self, batch: StepBatch, s: int, context: list[int], length: int) -> None:
        """Take the tokens of a chunk through its slot's state."""
        state = self.states[batch.slots[s]]
        assert len(state) == len(context) - length, "a state is at another position than its sequence"
        assert s < batch.drawn or len(state) % self.prompt_grid == 0
        state += context[-length:]
        assert state == context, "a state has gone through other tokens"

    def mask_room(self, count: int) -> IntArray:
        return np.full((count, 1), -1, dtype=np.int32)

    def draw(self, masks: IntArray) -> None:
        assert self.undrawn is not None, "masks that nobody asked for"
        assert not len(masks) or not self.queue, "masks were made before the last tokens were known"
        (batch, known, before), self.undrawn = self.undrawn, None
        assert masks.shape == (np.count_nonzero(batch.draws["mask"] != UNMASKED), 1)
        tokens = np.full(len(batch.draws), NOT_A_NUMBER, dtype=np.int32)
        found = np.zeros(len(batch.draws), dtype=FOUND)
        for index, (slot, mask) in enumerate(batch.draws[["slot", "mask"]][: len(known)].tolist()):
            allowed = None
            if mask != UNMASKED:
                allowed = [token for token in range(VOCAB) if masks[mask, 0] >> token & 1]
            if (one := known[index]) is not None and allowed != []:
                tokens[index] = self.choose(*one, allowed)
                found[index] = found_for(one[1], int(tokens[index]))
            self.last[slot] = max(tokens[index], 0)
            if self.page_kinds:
                self.texts[slot].append(int(self.last[slot]))
        drawing = batch.draws["slot"][: len(known)].tolist()
        for slot in {slot for slot in drawing if drawing.count(slot) > 1}:
            self.last[slot] = -99  # which of several it is the contract does not say
        for index, prompt in enumerate(before, start=len(known)):
            if prompt is not None:
                tokens[index] = batch.draws["given"][index]
                found[index] = found_for(prompt, int(tokens[index]))
        told = found if wants_logprobs(batch.draws) else None
        sums, self.ended = np.array(self.ended) if self.ended else None, []
        self.queue.append((Drawn(tokens, told, sums), set(batch.slots.tolist())))

    def check_kinds(self, seed: int, text: list[int], rows: np.ndarray) -> None:
        """A position is computed in one way, whenever it is: those of a prompt first, then drawn ones."""
        kinds, tokens = self.drawn[rows].tolist(), bytes(text)
        assert kinds == sorted(kinds), "a drawn token's page serves as a part of a prompt"
        for place, kind in enumerate(kinds, start=len(text) - len(rows)):
            assert self.kinds.setdefault((seed, tokens[: place + 1]), kind) == kind

    def choose(self, seed: int, tokens: list[int], allowed: list[int] | None) -> int:
        if self.script is not None:
            return self.script[len(tokens) - seed]  # seed doubles as prompt length
        return next_token(seed, tokens, allowed)

    def collect(self) -> Drawn | None:
        return self.queue.popleft()[0] if self.queue else None

    def close(self) -> None:
        pass


CYCLE = [1, 2, 3, 4, 5]


class RepeatingRunner(ScriptedRunner):
    """Draws a cycle of tokens, whatever the prompt."""

    def choose(self, seed: int, tokens: list[int], allowed: list[int] | None) -> int:
        return CYCLE[len(tokens) % len(CYCLE)]


class GuessingRunner(ScriptedRunner):
    """Of a model that guesses: what it has drawn comes back as a prompt."""

    def check_kinds(self, seed: int, text: list[int], rows: np.ndarray) -> None:
        pass


class HastyRunner(GuessingRunner):
    """Draws what the scripted runner draws, but for one token in four."""

    def choose(self, seed: int, tokens: list[int], allowed: list[int] | None) -> int:
        token = super().choose(seed, tokens, allowed)
        return token if hashed(VOCAB, tokens) % 4 else (token + 1) % VOCAB


def hasty_model(context: int) -> DraftModel:
    """A model that guesses the scripted runner's tokens, most of them rightly."""
    runner = HastyRunner(slots=16, kv_pages=16 * (context // 4 + 3), depth=2)
    return DraftModel(runner, context=context + 8, token_budget=64)


class Clock:
    """Time that stands still until told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_engine(
    runner: ScriptedRunner, clock: Clock | None = None, metering: Metering | None = None, **limits: Any
) -> Engine:
    settings = {"context_length": 64, "max_sequences": runner.slots, "token_budget": 32} | limits
    text, sharing = Detokenizer(PieceStream, frozenset({EOS})), settings.pop("prefix_sharing", True)
    drafts = settings.pop("drafts", False)
    drafts = drafts if isinstance(drafts, Drafts) else Drafts.NGRAM if drafts else Drafts.OFF
    return Engine(
        runner,
        text,
        EngineSizes(**settings),
        prefix_sharing=bool(sharing),
        constraints=OneByOne(),
        drafts=drafts,
        clock=clock or Clock(),
        metering=metering,
    )


def make_request(
    job_id: str = "j", prompt: tuple[int, ...] = (0, 1, 2), *, seed: int = 1, deadline: float | None = None,
    priority: int = 5, attempt: int = 1, generated: tuple[int, ...] = (), rule: int | None = None,
    prompt_logprobs_from: int | None = None, interactive: bool = False, embeds: range | None = None,
    **params: object,
) -> Request:  # fmt: skip
    parsed = GenerationParams.parse(params)
    constraint = None if rule is None else Rule(rule)
    return Request(
        job_id, attempt, prompt, parsed, seed, deadline, priority, generated, constraint,
        interactive=interactive, prompt_logprobs_from=prompt_logprobs_from, embeds=embeds,
    )  # fmt: skip


def cyclic(job_id: str = "j", tokens: int = 40, **params: Any) -> Request:
    return make_request(job_id, (0, 1), max_tokens=tokens, ignore_eos=True, **params)


def run(engine: Engine, steps: int = 10_000) -> list[Completion]:
    """Step until there is nothing left, auditing after each step."""
    done: list[Completion] = []
    for _ in range(steps):
        if not engine.has_work:
            return done
        done += engine.step()
        engine.check_integrity()
    raise AssertionError("the engine does not come to an end")
