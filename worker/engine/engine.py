"""The loop: plan a step, launch it, collect an earlier one, apply what it drew.

One thread owns an engine; nothing here is locked. Time is an argument (`clock`), arithmetic is the runner's,
choices are the scheduler's, requests are kept by `LiveRequests`, launches by `LaunchQueue`, and what these
return is applied by `Applier`: what is left is the order of a step.
"""

import time
from collections.abc import Callable, Iterable

from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.errors import RunnerError
from nightmill.worker.engine.applying import Applier
from nightmill.worker.engine.batch import BatchBuilder
from nightmill.worker.engine.constraints import GrammarBackend, NoGrammars
from nightmill.worker.engine.deltas import FollowedTexts
from nightmill.worker.engine.drafting import MOST_SEQUENCES, Drafter, Drafts, Guesser, StateCopies
from nightmill.worker.engine.intake import Intake
from nightmill.worker.engine.kv_cache import CacheIntegrityError, PagePool
from nightmill.worker.engine.launches import Launch, LaunchQueue
from nightmill.worker.engine.limits import RequestLimits
from nightmill.worker.engine.live_requests import LiveRequests
from nightmill.worker.engine.masking import MaskedDraw, TokenMasks
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
    SequenceState,
)
from nightmill.worker.engine.scheduler import Scheduler
from nightmill.worker.engine.sharing import PrefixGroups
from nightmill.worker.engine.stats import EngineStats
from nightmill.worker.engine.stops import streamed
from nightmill.worker.runners.base import (
    Runner,
)

_USUAL_TOKENS = 1024  # of a sequence, by which it is said how many tokens a cache holds


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
        self.constraints: GrammarBackend = constraints or NoGrammars()
        self._metering = metering or Metering(None, time.monotonic)
        # Of the runner's snapshots, drafts have some to take states back from. Where windows give pages back,
        # the tokens that are computed again then may need them.
        drafting = drafts is not Drafts.OFF and not sizes.encodes
        drafting &= grid == 1 or not needs.windowed
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
            self._drafter.predicts = runner.predicts
        self._scheduler.drafter = self._drafter
        limits = RequestLimits(
            runner.vocab, context_length, runner.page_size, runner.kv_pages, sizes.model_context,
            cache_tokens=needs.most_tokens(runner.kv_pages),
        )  # fmt: skip
        self._context = context = limits.cache_context
        groups = PrefixGroups() if prefix_sharing else None
        self._intake = Intake(limits, text, groups, encodes=sizes.encodes, embeds=runner.embeds)
        text_stream = text.text_stream
        decode = text.decode or (lambda token_ids: streamed(text_stream(), token_ids))
        self._live = LiveRequests(self._scheduler, decode, self._metering, clock)
        self._followed_texts = FollowedTexts(text_stream)
        predicts = drafting and runner.predicts
        self._builder = BatchBuilder(self._pool, slots=runner.slots, context=context, predicts=predicts)
        self._launches = LaunchQueue(runner)
        self._token_masks = TokenMasks(self.constraints, runner.vocab)
        self._applier = Applier(
            self._live, self._scheduler, self._launches, self._builder, self._token_masks,
            eos_ids=text.eos_ids, context=context, rank=sizes.rank,
        )  # fmt: skip
        self._step_sequences = self._prompt_tokens = 0

    def submit(self, request: Request) -> None:
        """Take a request in. Never raises for what is in it: a bad one completes with an error.

        One attempt of a job lives at a time: a newer attempt ends the older one (cancelled), an older one
        that comes late is cancelled itself, and the same attempt again is one and the same request.
        """
        if (known := self._live.by_job.get(request.job_id)) is not None:
            if request.attempt == known.request.attempt:
                return
            if request.attempt < known.request.attempt:
                self.reject(request, StopReason.CANCELLED, "a newer attempt of this job is running")
                return
            self._live.finish(known, StopReason.CANCELLED, error="a newer attempt of this job was started")
        if (fault := self._intake.fault(request)) is not None:
            self.reject(request, StopReason.ERROR, fault)
            return
        sequence = self._intake.sequence(request)
        self._live.add(sequence)
        self._applier.resume(sequence)

    def reject(self, request: Request, reason: StopReason, error: str | None = None) -> None:
        """Complete a request that is not computed."""
        self._live.reject(request, reason, error)

    def guess_by(self, model: Guesser) -> None:
        """Let a model guess, too, where drafts are made; it is closed with the engine."""
        if self._drafter is not None:
            self._drafter.model = model

    def cancel(self, job_id: str) -> None:
        """Stop a job at the next step; it keeps what it has. Unknown and finished jobs are ignored."""
        self._live.cancel(job_id)

    def step(self) -> list[Completion]:
        """Do the next piece of work; returns the requests that finished since the last call.

        Raises RunnerError where the arithmetic failed. The engine is then only good for `abandon`.
        """
        if self._launches.failed and self._live:
            raise RunnerError("the runner has failed: abandon the work and build another engine")
        self._live.end_unwanted()
        plan = self._scheduler.plan()
        if not plan.empty:
            launch = self._launch(plan)
            if launch.masked:
                self._draw(launch)
        if self._launches and (self._launches.full or plan.empty):
            self._collect()
        elif self._live and plan.empty:
            raise CacheIntegrityError("there are requests, but no step could be planned")
        self._scheduler.release()
        if not self._launches and not self._live:
            self._metering.rest()
        return self._live.take_done()

    @property
    def has_work(self) -> bool:
        """True while `step` has something to compute or to return."""
        return bool(self._live or self._launches or self._live.any_done)

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
            steps=self._launches.launched,
            step_sequences=self._step_sequences,
            prompt_tokens=self._prompt_tokens,
            shared_tokens=self._scheduler.shared_tokens,
            generated_tokens=self._applier.generated,
            resumed_tokens=self._applier.resumed,
            preemptions=self._scheduler.preemptions,
            guessed_tokens=0 if self._drafter is None else self._drafter.guessed,
            guessed_right=0 if self._drafter is None else self._drafter.right,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            free_pages=self._pool.free,
            pages=self._pool.pages,
            cache_tokens=self._pool.needs.tokens_in(self._pool.pages, _USUAL_TOKENS),
            context=self._context,
            sequences=self._max_sequences,
            gpu_seconds=self._metering.seconds,
            energy_joules=self._metering.joules,
        )

    def partial(self, job_id: str) -> Partial | None:
        """Return a job's tokens and text so far; None if the engine does not have the job (any more)."""
        return self._live.partial(job_id)

    def progress(self, job_ids: Iterable[str], at_least: int) -> list[DrawnTokens]:
        """The drawn tokens of those of these jobs that have `at_least` so many more than when last asked."""
        return self._live.progress(job_ids, at_least)

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
        return self._followed_texts.deltas(self._live.by_job)

    def abandon(self) -> list[Partial]:
        """Drop all work and free its pages; returns what each unfinished request had.

        For draining, and after a RunnerError: the runner is then left alone. Completions already made are
        still returned by the next `step`.
        """
        partials = self._live.abandon()
        self._launches.drop()
        self._scheduler.collected(self._launches.launched)
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
        if (live := self.running + self.waiting) != len(self._live):
            raise CacheIntegrityError(f"{len(self._live)} requests are live, {live} are scheduled")
        for sequence in self._live:
            self._launches.check_integrity(sequence)
            if sequence.state is SequenceState.FINISHED or len(sequence.tokens) >= sequence.length_limit:
                raise CacheIntegrityError(f"{sequence.request.job_id} is over and still live")

    def _launch(self, plan: StepPlan) -> Launch:
        batch, receivers = self._builder.build(plan)
        self._metering.begin()
        launch = self._launches.launch(batch, plan, receivers)
        self._step_sequences += len(plan.decodes) + len(plan.chunks) + len(plan.drafts)
        self._scheduler.launched(plan, launch.number)
        for chunk in plan.chunks:
            end = min(chunk.start + chunk.length, chunk.sequence.prompt_length)
            self._prompt_tokens += max(0, end - chunk.start)
        return launch

    def _draw(self, launch: Launch) -> None:
        """While the newest launch computes, see what those before it drew, make its masks, and let it draw.

        A text that nothing can follow ends.
        """
        while len(self._launches) > 1:
            self._collect()
        before = launch.before()
        masked = [
            MaskedDraw(number, sequence, before.get(place, ()))
            for number, place in enumerate(launch.masked)
            if (sequence := launch.wanting(place)) is not None
        ]
        masks = self._runner.mask_room(len(launch.masked))
        written = self._token_masks.write(masks, masked)
        self._launches.draw(masks)
        launch.ahead = {launch.masked[number]: constraint for number, constraint in written.ahead.items()}
        for draw in written.unmasked:
            sequence = draw.sequence
            sequence.computed -= launch.drop_from(launch.masked[draw.number], sequence)
            sequence.reach = sequence.computed  # its draws are under way
        self._live.fail(written.failed)

    def _collect(self) -> None:
        """Apply what the oldest launch drew."""
        launch, drawn = self._launches.collect()
        self._metering.end(launch.plan)
        self._scheduler.collected(launch.number)
        self._applier.apply(launch, drawn)
