"""The loop: plan a step, launch it, collect an earlier one, apply what it drew.

One thread owns an engine; nothing here is locked. Time is an argument (`clock`), arithmetic is the runner's,
choices are the scheduler's: what is left is bookkeeping of requests from submission to completion.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jobs.contract import StopReason
from jobs.errors import RunnerError
from worker.engine.batch import BatchBuilder
from worker.engine.kv_cache import BlockPool, CacheIntegrityError
from worker.engine.request import Completion, Partial, Request, Sequence, SequenceState
from worker.engine.scheduler import Scheduler, StepPlan
from worker.engine.stops import NewTextStream, TextWatch, decode, reason_to_stop
from worker.runners.base import Runner, SampledTokens


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine has done since it was made, and how full it is."""

    steps: int  # launches
    prompt_tokens: int  # computed; those computed again after preemption count again
    generated_tokens: int  # drawn and kept
    preemptions: int
    running: int
    waiting: int
    free_pages: int
    pages: int


@dataclass(slots=True)
class _Launch:
    """What an outstanding launch touches."""

    sequences: list[Sequence]
    drawing: list[Sequence]  # in the order of the tokens it will return


class Engine:
    """Generates for many requests at once on one runner.

    text_stream      makes a fresh decoder of tokens to text
    eos_ids          tokens that end a text
    context_length   most tokens a sequence may have, prompt included; the KV cache may allow fewer
    max_sequences    most sequences computed at once; at most `runner.slots`
    token_budget     most tokens computed in one step; at least `max_sequences`

    Raises ValueError for limits that contradict each other.
    """

    def __init__(
        self, runner: Runner, *, text_stream: NewTextStream, eos_ids: frozenset[int],
        context_length: int, max_sequences: int, token_budget: int, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        if max_sequences > runner.slots:
            raise ValueError(f"max_sequences is {max_sequences}, but the runner has {runner.slots} slots")
        if context_length < 2:
            raise ValueError(f"a context of {context_length} has no room for a prompt and an answer")
        self._runner = runner
        self._text_stream = text_stream
        self._eos_ids = eos_ids
        self._vocab = runner.vocab
        self._context = context_length
        self._cache_context = min(context_length, runner.kv_blocks * runner.block_size)
        self._clock = clock
        self._pool = BlockPool(runner.kv_blocks, runner.block_size)
        self._scheduler = Scheduler(self._pool, max_sequences=max_sequences, token_budget=token_budget)
        pages = self._pool.pages_for(self._cache_context)
        self._builder = BatchBuilder(slots=runner.slots, pages=pages, block_size=runner.block_size)
        self._sequences: dict[str, Sequence] = {}  # by job id; unfinished
        self._cancelled: list[Sequence] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []  # a heap; may hold finished sequences
        self._outstanding: deque[_Launch] = deque()
        self._done: list[Completion] = []
        self._failed = False
        self._submitted = self._steps = self._prompt_tokens = self._generated = 0

    def submit(self, request: Request) -> None:
        """Take a request in. Never raises for what is in it: a bad one completes with an error.

        One attempt of a job lives at a time: a newer attempt ends the older one (cancelled), an older one
        that comes late is cancelled itself, and the same attempt again is one and the same request.
        """
        if (known := self._sequences.get(request.job_id)) is not None:
            if request.attempt == known.request.attempt:
                return
            if request.attempt < known.request.attempt:
                self._reject(request, StopReason.CANCELLED, "a newer attempt of this job is running")
                return
            self._finish(known, StopReason.CANCELLED, error="a newer attempt of this job was started")
        if (fault := self._fault(request)) is not None:
            self._reject(request, StopReason.ERROR, fault)
            return
        self._submitted += 1
        prompt = list(request.prompt_ids)
        limit = min(len(prompt) + request.params.max_tokens, self._cache_context)
        sequence = Sequence(request, self._submitted, prompt, limit)
        if request.params.stop:
            sequence.watch = TextWatch(self._text_stream(), request.params.stop)
        self._sequences[request.job_id] = sequence
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, sequence.order, sequence))
        self._scheduler.add(sequence)

    def cancel(self, job_id: str) -> None:
        """Stop a job at the next step; it keeps what it has. Unknown and finished jobs are ignored."""
        if (sequence := self._sequences.get(job_id)) is not None:
            self._cancelled.append(sequence)

    def step(self) -> list[Completion]:
        """Do the next piece of work; returns the requests that finished since the last call.

        Raises RunnerError where the arithmetic failed. The engine is then only good for `abandon`.
        """
        if self._failed and self._sequences:
            raise RunnerError("the runner has failed: abandon the work and build another engine")
        self._end_unwanted()
        plan = self._scheduler.plan()
        if plan.chunks:
            self._launch(plan)
        if self._outstanding and (len(self._outstanding) >= self._runner.depth or not plan.chunks):
            self._apply(self._collect())
        elif self._sequences and not plan.chunks:
            raise CacheIntegrityError("there are requests, but no step could be planned")
        self._scheduler.release()
        done, self._done = self._done, []
        return done

    @property
    def has_work(self) -> bool:
        """True while `step` has something to compute or to return."""
        return bool(self._sequences or self._outstanding or self._done)

    @property
    def running(self) -> int:
        """Requests being computed."""
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot or for pages."""
        return self._scheduler.waiting

    @property
    def stats(self) -> EngineStats:
        """Counters since the start, and the present load."""
        return EngineStats(
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            preemptions=self._scheduler.preemptions,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            free_pages=self._pool.free,
            pages=self._pool.blocks,
        )

    def partial(self, job_id: str) -> Partial | None:
        """What a job has so far; None where the engine does not have it (any more)."""
        sequence = self._sequences.get(job_id)
        return None if sequence is None else self._snapshot(sequence)

    def abandon(self) -> list[Partial]:
        """Drop all work and free its pages; returns what each unfinished request had.

        For draining, and after a RunnerError: the runner is then left alone. Completions already made are
        still returned by the next `step`.
        """
        partials = [self._snapshot(sequence) for sequence in self._sequences.values()]
        for sequence in self._sequences.values():
            self._scheduler.finish(sequence)
        self._sequences.clear()
        self._deadlines.clear()
        self._cancelled.clear()
        while self._outstanding:
            if not self._failed:
                try:
                    self._runner.collect()
                except RunnerError:
                    self._failed = True  # what it would have drawn is dropped anyway
            self._settle(self._outstanding.popleft())
        self._scheduler.release()
        return partials

    def close(self) -> None:
        """Release the runner; the engine is of no use afterwards. Safe to call twice."""
        self._runner.close()

    def check_integrity(self) -> None:
        """Audit pages, slots, states and counters; raises CacheIntegrityError at the first contradiction."""
        self._scheduler.check_integrity()
        if (live := self.running + self.waiting) != len(self._sequences):
            raise CacheIntegrityError(f"{len(self._sequences)} requests are live, {live} are scheduled")
        for sequence in self._sequences.values():
            launches = sum(sequence in launch.sequences for launch in self._outstanding)
            draws = sum(sequence in launch.drawing for launch in self._outstanding)
            if (launches, draws) != (sequence.in_flight, sequence.drawing):
                raise CacheIntegrityError(f"{sequence.request.job_id} miscounts its launches")
            if sequence.state is SequenceState.FINISHED or len(sequence.tokens) >= sequence.length_limit:
                raise CacheIntegrityError(f"{sequence.request.job_id} is over and still live")

    def _fault(self, request: Request) -> str | None:
        """Why a request can never run, with the remedy; None where it can."""
        prompt = request.prompt_ids
        if not prompt:
            return "the prompt has no tokens: give it some text"
        if (lowest := min(prompt)) < 0 or (highest := max(prompt)) >= self._vocab:
            wrong = lowest if lowest < 0 else highest
            return (
                f"the prompt holds token id {wrong}, but this model's ids go from 0 to {self._vocab - 1}: "
                "tokenize it with this model's own vocabulary"
            )
        if len(prompt) < self._cache_context:
            return None
        if len(prompt) >= self._context:
            return (
                f"the prompt has {len(prompt)} tokens; this worker's context holds {self._context}, of which "
                "at least one must be left for the answer: shorten it or start the worker with "
                f"--context {len(prompt) + request.params.max_tokens}, if the model allows it"
            )
        return (
            f"the prompt has {len(prompt)} tokens; this worker's KV cache holds {self._cache_context} "
            f"({self._pool.blocks} pages of {self._pool.block_size}), of which at least one must be left for "
            "the answer: shorten it or give the worker more memory for its KV cache"
        )

    def _end_unwanted(self) -> None:
        """Finish what was cancelled or is past its deadline, wherever it stands."""
        cancelled, self._cancelled = self._cancelled, []
        for sequence in cancelled:
            if sequence.state is not SequenceState.FINISHED:
                self._finish(sequence, StopReason.CANCELLED)
        if not self._deadlines:
            return
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.state is not SequenceState.FINISHED:
                self._finish(sequence, StopReason.DEADLINE)

    def _launch(self, plan: StepPlan) -> None:
        batch, drawing = self._builder.build(plan)
        self._failed = True  # unless the runner returns
        self._runner.launch(batch)
        self._failed = False
        self._steps += 1
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.in_flight += 1
            sequence.computed = chunk.start + chunk.length
            self._prompt_tokens += max(0, min(sequence.computed, sequence.prompt_length) - chunk.start)
        for sequence in drawing:
            sequence.drawing += 1
        self._outstanding.append(_Launch([chunk.sequence for chunk in plan.chunks], drawing))

    def _collect(self) -> SampledTokens:
        self._failed = True  # unless the runner returns what it should
        drawn = self._runner.collect()
        if drawn is None or len(drawn.tokens) != len(self._outstanding[0].drawing):
            raise RunnerError("the runner returned other tokens than the oldest launch was to draw")
        self._failed = False
        return drawn

    def _apply(self, drawn: SampledTokens) -> None:
        """Give each sequence its token; those that stopped in the meantime get none."""
        launch = self._outstanding.popleft()
        self._settle(launch)
        for sequence, token in zip(launch.drawing, drawn.tokens.tolist(), strict=True):
            if sequence.state is SequenceState.FINISHED:
                continue
            sequence.tokens.append(token)
            self._generated += 1
            reason = reason_to_stop(
                token,
                generated=sequence.generated,
                length=len(sequence.tokens),
                context=self._cache_context,
                params=sequence.request.params,
                eos_ids=self._eos_ids,
                watch=sequence.watch,
            )
            if reason is not None:
                self._finish(sequence, reason)

    def _settle(self, launch: _Launch) -> None:
        for sequence in launch.sequences:
            sequence.in_flight -= 1
        for sequence in launch.drawing:
            sequence.drawing -= 1

    def _finish(self, sequence: Sequence, reason: StopReason, error: str | None = None) -> None:
        """Make the completion; pages and slot follow when no launch uses them any more."""
        del self._sequences[sequence.request.job_id]
        self._scheduler.finish(sequence)
        request = sequence.request
        drawn = sequence.tokens[sequence.prompt_length :]
        watch = sequence.watch
        if watch is None:
            text = decode(self._text_stream(), drawn[:-1] if reason is StopReason.EOS else drawn)
        else:
            cut = watch.finish()
            text = watch.text
            if cut and reason in (StopReason.LENGTH, StopReason.CONTEXT_FULL, StopReason.EOS):
                reason = StopReason.STOP_SEQUENCE  # completed by the bytes that were still held back
        self._done.append(
            Completion(
                job_id=request.job_id,
                attempt=request.attempt,
                token_ids=tuple(drawn),
                text=text,
                stop_reason=reason,
                prompt_tokens=sequence.prompt_length,
                completion_tokens=len(drawn),
                error=error,
            )
        )

    def _reject(self, request: Request, reason: StopReason, error: str) -> None:
        prompt_tokens = len(request.prompt_ids)
        self._done.append(
            Completion(request.job_id, request.attempt, (), "", reason, prompt_tokens, 0, error)
        )

    def _snapshot(self, sequence: Sequence) -> Partial:
        request = sequence.request
        drawn = sequence.tokens[sequence.prompt_length :]
        text = decode(self._text_stream(), drawn) if sequence.watch is None else sequence.watch.decided
        return Partial(request.job_id, request.attempt, tuple(drawn), text, sequence.prompt_length)
