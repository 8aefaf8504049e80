"""The loop: plan a step, launch it, collect an earlier one, apply what it drew.

One thread owns an engine; nothing here is locked. Time is an argument (`clock`), arithmetic is the runner's,
choices are the scheduler's: what is left is bookkeeping of requests from submission to completion.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.errors import RunnerError
from nightmill.worker.engine.batch import BatchBuilder
from nightmill.worker.engine.completing import completion, not_computed, snapshot
from nightmill.worker.engine.constraints import GrammarBackend, NoGrammars, nothing_left
from nightmill.worker.engine.deltas import FollowedTexts
from nightmill.worker.engine.drafting import MOST_SEQUENCES, Drafter, Drafts, Guesser, StateCopies
from nightmill.worker.engine.embeddings import normalised
from nightmill.worker.engine.kv_cache import CacheIntegrityError, PagePool
from nightmill.worker.engine.launches import Launch
from nightmill.worker.engine.limits import RequestLimits
from nightmill.worker.engine.logprobs import Records
from nightmill.worker.engine.masking import FailedSequences, MaskedDraw, TokenMasks
from nightmill.worker.engine.metering import Metering
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.payoff import Payoff
from nightmill.worker.engine.plan import StepPlan
from nightmill.worker.engine.request import (
    Completion,
    Delta,
    DrawnTokens,
    Partial,
    Request,
    Sequence,
    SequenceState,
)
from nightmill.worker.engine.scheduler import Scheduler
from nightmill.worker.engine.sharing import PrefixGroups
from nightmill.worker.engine.stats import EngineStats
from nightmill.worker.engine.stops import TextWatch, reason_to_stop, streamed
from nightmill.worker.runners.base import (
    NO_LOGPROBS,
    NOT_A_NUMBER,
    Drawn,
    Runner,
    SumArray,
    masked_draws,
)

_NO_NUMBERS = (
    "the model's output for this prompt is not a number: what it computes is too large for F16, or its file "
    "is damaged. A worker that is started with --dtype bf16 has room for larger numbers; or try a shorter or "
    "different prompt. If every prompt fails like this, the file is damaged: download it again"
)
_USUAL_TOKENS = 1024  # of a sequence, by which it is said how many tokens a cache holds
_NO_EMBEDDINGS = (
    "embed: this worker computes no embeddings on its GPU: start another with --reference, which computes "
    "with NumPy"
)
_NO_TEXTS = (
    "model: this is an encoder, which embeds texts and writes none: give rows with embed, or another model"
)
_NOT_COMPILED = "what the answer must be was not compiled: a fault of the worker, retry the job"


class Engine:
    """Generates for many requests at once on one runner.

    text            how drawn tokens become text
    sizes           how much is computed at once
    prefix_sharing  compute equal beginnings of requests once, and keep such requests together;
                    not where a runner has states and no snapshots of them
    constraints     makes constraints, and asks those of a step together
    drafts          guess tokens while few requests run; not where a runner cannot take states back
    metering        what steps cost; by default their seconds alone

    Raises ValueError for sizes that contradict each other.
    """

    def __init__(
        self,
        runner: Runner,
        text: Detokenizer,
        sizes: EngineSizes,
        *,
        prefix_sharing: bool = True,
        constraints: GrammarBackend | None = None,
        drafts: Drafts = Drafts.OFF,
        clock: Callable[[], float] = time.time,
        metering: Metering | None = None,
    ) -> None:
        max_sequences, context_length = sizes.max_sequences, sizes.context_length
        if max_sequences > runner.slots:
            raise ValueError(f"max_sequences is {max_sequences}, but the runner has {runner.slots} slots")
        if context_length < 2:
            raise ValueError(f"a context of {context_length} has no room for a prompt and an answer")
        self._pool = PagePool(runner.kv_pages, runner.page_size, runner.page_kinds)
        grid, needs = runner.prompt_grid, self._pool.needs
        if grid > 1 and (not runner.snapshots or grid % needs.segment):
            prefix_sharing = False
        if sizes.encodes:  # a token's keys hang on those behind it
            prefix_sharing = False
            if sizes.token_budget < context_length:
                raise ValueError(
                    f"{sizes.token_budget} tokens a step have no room for a text of {context_length}"
                )
        self.encodes = sizes.encodes
        self._runner = runner
        self._max_sequences = max_sequences
        self._text_stream = text_stream = text.text_stream
        self._decode = text.decode or (lambda token_ids: streamed(text_stream(), token_ids))
        self._eos_ids = text.eos_ids
        self.constraints: GrammarBackend = constraints or NoGrammars()
        self._limits = RequestLimits(
            runner.vocab, context_length, runner.page_size, runner.kv_pages, sizes.model_context,
            cache_tokens=needs.most_tokens(runner.kv_pages),
        )  # fmt: skip
        self._token_masks = TokenMasks(self.constraints, runner.vocab)
        self._clock = clock
        self._metering = metering or Metering(None, time.monotonic)
        # Of the runner's snapshots, drafts have some to take states back from. Where windows give pages back,
        # the tokens that are computed again then may need them.
        drafting = drafts is not Drafts.OFF and not sizes.encodes
        drafting &= grid == 1 or (runner.takes_back and not needs.windowed)
        places = min(MOST_SEQUENCES, runner.snapshots // 2) if drafting and grid > 1 else 0
        self._scheduler = Scheduler(
            self._pool, max_sequences=max_sequences, token_budget=sizes.token_budget,
            prefix_sharing=prefix_sharing, interactive_slots=sizes.interactive_slots,
            max_given=max(1, runner.max_draws - max_sequences),
            prompt_grid=0 if sizes.encodes else runner.prompt_grid,
            snapshots=runner.snapshots - places,
        )  # fmt: skip
        self._drafter: Drafter | None = None
        if drafting:
            copies = StateCopies(runner.snapshots - places, places) if grid > 1 else None
            payoff = Payoff(self._metering.clock) if drafts is Drafts.AUTO else None
            self._drafter = Drafter(self.constraints, copies, payoff)
            self._drafter.with_logprobs = runner.takes_back
        self._scheduler.drafter = self._drafter
        self._groups = PrefixGroups() if prefix_sharing else None
        self._builder = BatchBuilder(self._pool, slots=runner.slots, context=self._limits.cache_context)
        self._sequences: dict[str, Sequence] = {}  # by job id; unfinished
        self._cancelled: list[Sequence] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []  # a heap; may hold finished sequences
        self._outstanding: deque[Launch] = deque()
        self._done: list[Completion] = []
        self._followed_texts = FollowedTexts(text_stream)
        self._failed = False
        self._submitted = self._steps = self._step_sequences = 0
        self._prompt_tokens = self._generated = self._resumed = 0

    def submit(self, request: Request) -> None:
        """Take a request in. Never raises for what is in it: a bad one completes with an error.

        One attempt of a job lives at a time: a newer attempt ends the older one (cancelled), an older one
        that comes late is cancelled itself, and the same attempt again is one and the same request.
        """
        if (known := self._sequences.get(request.job_id)) is not None:
            if request.attempt == known.request.attempt:
                return
            if request.attempt < known.request.attempt:
                self.reject(request, StopReason.CANCELLED, "a newer attempt of this job is running")
                return
            self._finish(known, StopReason.CANCELLED, error="a newer attempt of this job was started")
        params = request.params
        draws, embeds = request.draws, request.embeds is not None
        fault = self._limits.fault(request.prompt_ids, params, request.generated_ids, draws=draws)
        if fault is None and embeds and not self._runner.embeds:
            fault = _NO_EMBEDDINGS
        if fault is None and self.encodes and not embeds:
            fault = _NO_TEXTS
        if fault is None and request.constrained is not None and request.constraint is None:
            fault = _NOT_COMPILED
        if fault is not None:
            self.reject(request, StopReason.ERROR, fault)
            return
        self._submitted += 1
        prompt = list(request.prompt_ids)
        # What is drawn behind a text to score is told to nobody, and takes no place in the cache.
        most = 1 if embeds else params.max_tokens
        limit = min(len(prompt) + most, self._limits.cache_context + (not draws))
        group = None if self._groups is None else self._groups.place(request.prompt_ids, self._submitted)
        ends = frozenset(params.stop_token_ids).union(() if params.ignore_eos else self._eos_ids)
        sequence = Sequence(request, self._submitted, prompt, limit, group, ends=ends)
        if params.stop or request.thinking is not None:
            sequence.watch = TextWatch(
                self._text_stream(),
                params.stop,
                params.min_tokens,
                request.thinking,
                included=params.include_stop_str_in_output,
            )
        self._sequences[request.job_id] = sequence
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, sequence.order, sequence))
        self._scheduler.add(sequence)
        self._resume(sequence)

    def reject(self, request: Request, reason: StopReason, error: str | None = None) -> None:
        """Complete a request that is not computed."""
        self._done.append(not_computed(request, reason, error))

    def guess_by(self, model: Guesser) -> None:
        """Let a model guess, too, where drafts are made; it is closed with the engine."""
        if self._drafter is not None:
            self._drafter.model = model

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
        if not plan.empty:
            self._launch(plan)
            if self._outstanding[-1].masked:
                self._draw(self._outstanding[-1])
        if self._outstanding and (len(self._outstanding) >= self._runner.depth or plan.empty):
            self._apply(self._collect())
        elif self._sequences and plan.empty:
            raise CacheIntegrityError("there are requests, but no step could be planned")
        self._scheduler.release()
        if not self._outstanding and not self._sequences:
            self._metering.rest()
        done, self._done = self._done, []
        return done

    @property
    def has_work(self) -> bool:
        """True while `step` has something to compute or to return."""
        return bool(self._sequences or self._outstanding or self._done)

    @property
    def arithmetic(self) -> Arithmetic:
        """The runner's: what the bits of results depend on beside the requests."""
        return self._runner.arithmetic

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
            step_sequences=self._step_sequences,
            prompt_tokens=self._prompt_tokens,
            shared_tokens=self._scheduler.shared_tokens,
            generated_tokens=self._generated,
            resumed_tokens=self._resumed,
            preemptions=self._scheduler.preemptions,
            guessed_tokens=0 if self._drafter is None else self._drafter.guessed,
            guessed_right=0 if self._drafter is None else self._drafter.right,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            free_pages=self._pool.free,
            pages=self._pool.pages,
            cache_tokens=self._pool.needs.tokens_in(self._pool.pages, _USUAL_TOKENS),
            context=self._limits.cache_context,
            sequences=self._max_sequences,
            gpu_seconds=self._metering.seconds,
            energy_joules=self._metering.joules,
        )

    def partial(self, job_id: str) -> Partial | None:
        """Return a job's tokens and text so far; None if the engine does not have the job (any more)."""
        sequence = self._sequences.get(job_id)
        return None if sequence is None else snapshot(sequence, self._decode)

    def progress(self, job_ids: Iterable[str], at_least: int) -> list[DrawnTokens]:
        """The drawn tokens of those of these jobs that have `at_least` so many more than when last asked."""
        reports = []
        for job_id in job_ids:
            sequence = self._sequences.get(job_id)
            if sequence is not None and sequence.generated - sequence.reported >= at_least:
                sequence.reported = sequence.generated
                request, drawn = sequence.request, sequence.tokens[sequence.prompt_length :]
                reports.append(DrawnTokens(request.job_id, request.attempt, tuple(drawn)))
        return reports

    def follow(self, job_ids: Iterable[str]) -> None:
        """From now on `deltas` tells the texts of these jobs, and of no others, each from its beginning."""
        self._followed_texts.follow(job_ids)

    @property
    def followed(self) -> bool:
        """True if anybody follows a job."""
        return bool(self._followed_texts)

    def deltas(self) -> list[Delta]:
        """Return what was added to the texts of followed jobs since the last call.

        A text begins again at character 0 with another attempt. The end of a job's text is in its completion.
        """
        return self._followed_texts.deltas(self._sequences)

    def abandon(self) -> list[Partial]:
        """Drop all work and free its pages; returns what each unfinished request had.

        For draining, and after a RunnerError: the runner is then left alone. Completions already made are
        still returned by the next `step`.
        """
        metered = self._metering.joules is not None
        unfinished = self._sequences.values()
        partials = [snapshot(sequence, self._decode, metered=metered) for sequence in unfinished]
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
            self._scheduler.collected = self._outstanding.popleft().number
        self._scheduler.release()
        self._metering.rest()
        return partials

    def close(self) -> None:
        """Release the runner; the engine is of no use afterwards. Safe to call twice."""
        self.constraints.close()
        if self._drafter is not None and self._drafter.model is not None:
            self._drafter.model.close()
        self._runner.close()

    def check_integrity(self) -> None:
        """Audit pages, slots, states and counters; raises CacheIntegrityError at the first contradiction."""
        self._scheduler.check_integrity()
        if (live := self.running + self.waiting) != len(self._sequences):
            raise CacheIntegrityError(f"{len(self._sequences)} requests are live, {live} are scheduled")
        for sequence in self._sequences.values():
            draws = sum(launch.drawing.count(sequence) for launch in self._outstanding)
            touching = [launch.number for launch in self._outstanding if launch.plan.touches(sequence)]
            newest = touching[-1] if touching else min(sequence.last_launch, self._scheduler.collected)
            if (newest, draws) != (sequence.last_launch, sequence.drawing):
                raise CacheIntegrityError(f"{sequence.request.job_id} miscounts its launches")
            if sequence.state is SequenceState.FINISHED or len(sequence.tokens) >= sequence.length_limit:
                raise CacheIntegrityError(f"{sequence.request.job_id} is over and still live")

    def _resume(self, sequence: Sequence) -> None:
        """Go on from the tokens of an earlier attempt, as if they had been drawn here.

        One that asks for log-probabilities begins afresh: those of an earlier attempt are known to nobody.
        """
        if sequence.likely != NO_LOGPROBS or sequence.request.embeds is not None:
            return
        for token in sequence.request.generated_ids:
            self._resumed += 1
            sequence.reported += 1
            sequence.tokens.append(token)
            self._finish_if_over(sequence)
            self._follow_budget(sequence)
            if sequence.state is not SequenceState.FINISHED and sequence.masked_until:
                self._fail(self._token_masks.accept([sequence]))
            if sequence.state is SequenceState.FINISHED:
                return

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
        batch, wanted = self._builder.build(plan)
        self._metering.begin()
        self._failed = True  # unless the runner returns
        self._runner.launch(batch)
        self._steps += 1
        self._step_sequences += len(plan.decodes) + len(plan.chunks) + len(plan.drafts)
        self._scheduler.launched(plan, self._steps)
        for chunk in plan.chunks:
            end = min(chunk.start + chunk.length, chunk.sequence.prompt_length)
            self._prompt_tokens += max(0, end - chunk.start)
        masked = masked_draws(batch.draws).tolist()
        drawing, asking, embedding = wanted
        launch = Launch(self._steps, plan, [*drawing], [*asking], [*embedding], masked)
        self._outstanding.append(launch)
        self._failed = False

    def _draw(self, launch: Launch) -> None:
        """While the newest launch computes, see what those before it drew, make its masks, and let it draw.

        A text that nothing can follow ends.
        """
        while len(self._outstanding) > 1:
            self._apply(self._collect())
        before = launch.before()
        masked = [
            MaskedDraw(number, sequence, before.get(place, ()))
            for number, place in enumerate(launch.masked)
            if (sequence := launch.wanting(place)) is not None
        ]
        masks = self._runner.mask_room(len(launch.masked))
        written = self._token_masks.write(masks, masked)
        self._failed = True  # unless the runner returns
        self._runner.draw(masks)
        self._failed = False
        launch.ahead = {launch.masked[number]: constraint for number, constraint in written.ahead.items()}
        for draw in written.unmasked:
            sequence = draw.sequence
            sequence.computed -= launch.drop_from(launch.masked[draw.number], sequence)
            sequence.reach = sequence.computed  # its draws are under way
        self._fail(written.failed)

    def _fail(self, failed: FailedSequences) -> None:
        for sequence, fault in failed:
            self._finish(sequence, StopReason.ERROR, error=fault)

    def _collect(self) -> Drawn:
        self._failed = True  # unless the runner returns what it should
        drawn = self._runner.collect()
        launch = self._outstanding[0]
        if drawn is None or len(drawn.tokens) != len(launch.drawing) + len(launch.asking):
            raise RunnerError("the runner returned other tokens than the oldest launch was to draw")
        if len(launch.embedding) != (0 if drawn.sums is None else len(drawn.sums)):
            raise RunnerError("the runner returned other embeddings than the oldest launch was to complete")
        self._failed = False
        return drawn

    def _apply(self, drawn: Drawn) -> None:
        """Give each sequence its token; those that stopped in the meantime get none."""
        launch = self._outstanding.popleft()
        generated = self._generated
        self._metering.end(launch.plan)
        self._scheduler.collected = launch.number
        finished, not_a_number = SequenceState.FINISHED, NOT_A_NUMBER
        ids = drawn.tokens.tolist()
        records = None if drawn.found is None else Records(drawn.found)
        if launch.asking:
            self._tell(launch, ids, records)
        guesses = launch.guesses()
        if drawn.sums is not None:
            self._embed(launch, drawn.sums)
        for place, (sequence, token) in enumerate(zip(launch.drawing, ids, strict=False)):
            if sequence is None or sequence.state is finished:
                continue
            if token == not_a_number:
                launch.drop_rest(place)
                self._handle_nan(sequence)
                continue
            if guesses and guesses.get(place, token) != token:
                launch.drop_rest(place)
            self._generated += 1
            tokens = sequence.tokens
            tokens.append(token)
            if launch.ahead:
                sequence.constraint = launch.ahead.get(place, sequence.constraint)
            if records is not None and sequence.likely != NO_LOGPROBS:
                sequence.records += records.of(place, sequence.likely)
            if sequence.watch is not None or len(tokens) >= sequence.length_limit or token in sequence.ends:
                self._finish_if_over(sequence)  # in other cases there is no reason to stop
                self._follow_budget(sequence)
        if launch.masked:
            drew = [launch.wanting(place) for place in launch.masked if ids[place] != not_a_number]
            if obeying := [*dict.fromkeys(sequence for sequence in drew if sequence is not None)]:
                self._fail(self._token_masks.accept(obeying))
        self._follow_drafts(launch, self._generated - generated)

    def _follow_drafts(self, launch: Launch, tokens: int) -> None:
        """Go on from what was right of a launch's drafts, and see who may have guesses next."""
        if self._drafter is None:
            return
        self._drafter.settle(launch.plan.drafts, launch.number)
        self._drafter.drew(self.running, self.waiting, tokens, prompts=bool(launch.plan.chunks))
        active = self._drafter.rows(self.running, self.waiting) > 0
        if not active:
            self._drafter.let_run()
            return
        drew = dict.fromkeys(one for one in launch.drawing if one is not None)
        self._drafter.follow([one for one in drew if one.state is SequenceState.RUNNING])

    def _tell(self, launch: Launch, ids: list[int], records: Records | None) -> None:
        """Give sequences the log-probabilities of tokens of their prompts."""
        assert records is not None, "a runner that was given tokens told nothing"
        for place, sequence in enumerate(launch.asking, start=len(launch.drawing)):
            if sequence is None or sequence.state is SequenceState.FINISHED:
                continue
            if ids[place] != NOT_A_NUMBER:
                sequence.records += records.of(place, sequence.likely)
                continue
            self._handle_nan(sequence)
            launch.forget(sequence)

    def _embed(self, launch: Launch, sums: SumArray) -> None:
        """End the sequences whose embeddings are complete."""
        for sequence, total in zip(launch.embedding, sums, strict=True):
            if sequence is None or sequence.state is SequenceState.FINISHED:
                continue
            if np.isfinite(total).all():
                embedding = normalised(total, sequence.request.params.dimensions)
                self._finish(sequence, StopReason.EOS, embedding=embedding)
            else:
                self._handle_nan(sequence)

    def _handle_nan(self, sequence: Sequence) -> None:
        """A sequence's logits are not numbers: it fails, or is computed again without pages of others."""
        if not self._scheduler.retry_unshared_after_nan(sequence):
            request = sequence.request
            ruling = {"bad_words": request.banned, "logit_bias": request.params.logit_bias}
            fields = [name for name, given in ruling.items() if given and request.constraint is not None]
            error = nothing_left(*fields) if fields else _NO_NUMBERS
            self._finish(sequence, StopReason.ERROR, error=error)
            return
        for launch in self._outstanding:
            launch.forget(sequence)

    def _finish_if_over(self, sequence: Sequence) -> None:
        """Look at the token that was added last."""
        reason = reason_to_stop(
            sequence.tokens[-1],
            generated=sequence.generated,
            length=len(sequence.tokens),
            context=self._limits.cache_context,
            params=sequence.request.params,
            eos_ids=self._eos_ids,
            watch=sequence.watch,
        )
        if reason is not None:
            self._finish(sequence, reason)

    def _follow_budget(self, sequence: Sequence) -> None:
        """See what a budget of thoughts says of the token that was added last."""
        live = sequence.state is not SequenceState.FINISHED
        if live and sequence.budget is not None and sequence.follow_budget():
            self._builder.mask(sequence)

    def _finish(
        self,
        sequence: Sequence,
        reason: StopReason,
        error: str | None = None,
        embedding: bytes | None = None,
    ) -> None:
        """Make the completion; pages and slot follow when no launch uses them any more."""
        del self._sequences[sequence.request.job_id]
        self._scheduler.finish(sequence)
        metered = self._metering.joules is not None
        done = completion(sequence, self._decode, reason, error, embedding, metered=metered)
        self._done.append(done)
