"""The engine under random use: each request completes once, with the text it would have alone.

Many prompts begin alike, so that pages are shared, evicted and waited for; work is abandoned at any step and
goes on from the tokens that it had. Some texts repeat, and drafts guess what they go on with, or a model.
In some runs a token cannot be computed with: only requests that have it fail. In some the runner has states,
and snapshots of them. Some requests obey a constraint, which may leave them nothing to draw, or one token
after another that is forced.
"""

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nightmill.jobs.base.contract import StopReason
from nightmill.worker.engine.page_tables import PageNeeds
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.model.spec import Pooling
from nightmill.worker.runners.base import PageKind
from tests.unit.engine.by_definition import (
    EOS,
    LOOPING,
    NARROW,
    VOCAB,
    Rule,
    expected,
    expected_embedding,
    expected_records,
)
from tests.unit.engine.scripted import Clock, ScriptedRunner, hasty_model, make_engine, make_request

CONTEXT = 24
KINDS: list[tuple[tuple[int | None, int], ...]] = [
    (), (), ((None, 1), (3, 1)), ((None, 2), (1, 1)), ((None, 3), (5, 1), (9, 1)), ((4, 1),),
    ((3, 1), (8, 2)),
]  # fmt: skip
"""Windows of kinds of pages, and how many parts such a page has; (): one kind, all of which is seen."""
BEGINNINGS = [(), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4), (1, 2, 9, 9, 9, 9)]
NO_LOGPROBS = -1
EARLY = {StopReason.CANCELLED, StopReason.DEADLINE}


def likely(request: Request) -> int:
    """How many likely tokens it is told with each, if anything."""
    if request.params.logprobs is None:
        return NO_LOGPROBS if request.prompt_logprobs_from is None else 0
    return request.params.logprobs


def resumed(request: Request) -> tuple[int, ...]:
    """The tokens that it goes on from: none where they had to be told."""
    return request.generated_ids if likely(request) == NO_LOGPROBS else ()


class EngineMachine(RuleBasedStateMachine):
    """Submits, cancels, steps and lets time pass; audits after every operation."""

    @initialize(
        depth=st.integers(1, 3),
        blocks=st.integers(2, 14),
        page_size=st.sampled_from([1, 2, 4]),
        slots=st.sampled_from([1, 2, 3, 5, 12]),
        spare=st.sampled_from([0, 1, 3, 30]),
        sharing=st.sampled_from([True, True, False]),
        poison=st.sampled_from([None, 3, 9, 13]),
        reserved=st.integers(0, 2),
        grid=st.sampled_from([1, 1, 2, 4]),
        snapshots=st.sampled_from([0, 1, 2, 3, 10]),
        kinds=st.sampled_from(KINDS),
        drafts=st.booleans(),
        model=st.booleans(),
    )
    def build(
        self, depth: int, blocks: int, page_size: int, slots: int, spare: int, sharing: bool,
        poison: int | None, reserved: int, grid: int,
        snapshots: int, kinds: tuple[tuple[int | None, int], ...], drafts: bool,
        model: bool,
    ) -> None:  # fmt: skip
        self.clock = Clock()
        self.poison = poison
        stride = max((parts for _, parts in kinds), default=1)
        page_kinds = tuple(PageKind(window, parts * page_size, stride) for window, parts in kinds)
        if kinds:
            grid, blocks = 1, 2 * blocks
            drafts = drafts and kinds[0][0] is None  # else the runner cannot read what was guessed
        runner = ScriptedRunner(
            kv_pages=blocks,
            page_size=page_size,
            slots=slots,
            depth=depth,
            poison=poison,
            grid=max(grid, page_size) if grid > 1 else 1,
            snapshots=snapshots,
            page_kinds=page_kinds,
        )
        most = PageNeeds(page_kinds).most_tokens(blocks) if kinds else blocks * page_size
        self.context = min(CONTEXT, most)
        self.engine = make_engine(
            runner,
            self.clock,
            context_length=CONTEXT,
            token_budget=slots + max(spare, runner.prompt_grid - 1),
            prefix_sharing=sharing,
            interactive_slots=min(reserved, slots - 1),
            drafts=drafts,
        )
        if model:
            self.engine.guess_by(hasty_model(CONTEXT))
        self.requests: dict[tuple[str, int], Request] = {}
        self.attempts: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.resumed = 0
        self.done: dict[tuple[str, int], Completion] = {}
        self.reported: dict[tuple[str, int], tuple[int, ...]] = {}
        self.told: dict[tuple[str, int], str] = {}

    @rule(
        job=st.integers(0, 9),
        beginning=st.sampled_from(BEGINNINGS),
        rest=st.lists(st.integers(0, VOCAB - 1), max_size=6),
        seed=st.integers(0, 2**63 - 1) | st.sampled_from(LOOPING),
        max_tokens=st.integers(1, 20),
        stop=st.sampled_from([(), (), ("ab",), ("é", "ST"), ("a ", "ba", "€b")]),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (), (0,), (2, 7, EOS)]),
        min_tokens=st.sampled_from([0, 0, 0, 3, 12]),
        priority=st.integers(0, 2),
        patience=st.sampled_from([None, None, None, 0, 1, 5]),
        obeys=st.sampled_from([None, None, 1, 2, *NARROW[:2]]),
        logprobs=st.sampled_from([None, None, 0, 2]),
        told=st.sampled_from([None, None, 0.0, 0.3, 0.9, 1.0]),
        pooling=st.sampled_from([None, None, None, Pooling.MEAN, Pooling.LAST]),
    )
    def submit(
        self,
        job: int,
        beginning: tuple[int, ...],
        rest: list[int],
        seed: int,
        patience: int | None,
        obeys: int | None,
        max_tokens: int,
        min_tokens: int,
        told: float | None,
        pooling: Pooling | None,
        **params: Any,
    ) -> None:
        job_id = f"j{job}"
        attempt = self.attempts[job_id] = self.attempts.get(job_id, 0) + 1
        deadline = None if patience is None else self.clock.now + patience
        prompt = (*beginning, *rest)
        if pooling is not None and prompt:
            self.submit_embedding(job_id, attempt, prompt, pooling, params["priority"])
            return
        request = make_request(
            job_id,
            prompt,
            seed=seed,
            attempt=attempt,
            deadline=deadline,
            rule=obeys,
            interactive=params["priority"] == 2,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            prompt_logprobs_from=None if told is None else int(told * len(prompt)),
            **params,
        )
        self.cancelled.discard(job_id)
        self.requests[job_id, attempt] = request
        self.engine.submit(request)

    def submit_embedding(
        self, job_id: str, attempt: int, prompt: tuple[int, ...], pooling: Pooling, priority: int
    ) -> None:
        request = make_request(
            job_id, prompt, attempt=attempt, priority=priority, interactive=priority == 2,
            embeds=pooling.places(len(prompt)), embed=True, dimensions=1 + len(prompt) % 3,
        )  # fmt: skip
        self.cancelled.discard(job_id)
        self.requests[job_id, attempt] = request
        self.engine.submit(request)

    @rule(job=st.integers(0, 9))
    def cancel(self, job: int) -> None:
        self.cancelled.add(f"j{job}")
        self.engine.cancel(f"j{job}")

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.take(self.engine.step())
            self.engine.check_integrity()

    @rule(at_least=st.integers(1, 3))
    def report_progress(self, at_least: int) -> None:
        """What a worker saves: each report is longer than the one before, and true."""
        for progress in self.engine.progress([f"j{job}" for job in range(10)], at_least):
            key = (progress.job_id, progress.attempt)
            known = len(self.reported.get(key, resumed(self.requests[key])))
            assert len(progress.token_ids) >= known + at_least
            assert self.expected(self.requests[key])[0][: len(progress.token_ids)] == progress.token_ids
            self.reported[key] = progress.token_ids
        for key, request in self.requests.items():
            partial = self.engine.partial(key[0])
            if key not in self.done and partial is not None and partial.attempt == key[1]:
                known = len(self.reported.get(key, resumed(request)))
                assert len(partial.token_ids) < known + at_least, "a request that grew is not reported"

    @rule(jobs=st.sets(st.integers(0, 9), max_size=4))
    def follow(self, jobs: set[int]) -> None:
        """Others' texts are told no more; one that is followed again is told from its beginning."""
        self.engine.follow([f"j{job}" for job in jobs])

    @rule()
    def tell(self) -> None:
        """What is told of a text is a true beginning of it, without gaps, whatever is drawn later."""
        for delta in self.engine.deltas():
            key = (delta.job_id, delta.attempt)
            before = "" if delta.start == 0 else self.told[key]
            assert delta.text and len(before) == delta.start
            self.told[key] = before + delta.text
            assert self.expected(self.requests[key])[1].startswith(self.told[key])
        assert self.engine.deltas() == []

    @precondition(lambda self: self.requests)
    @rule(keep=st.sampled_from([None, 1, 3, 100]))
    def abandon(self, keep: int | None) -> None:
        """The worker stops; where `keep` is given another goes on from as many tokens as were saved."""
        for partial in self.engine.abandon():
            key = (partial.job_id, partial.attempt)
            request = self.requests.pop(key)
            assert key not in self.done
            tokens, _, reason = self.expected(request)
            assert tokens[: len(partial.token_ids)] == partial.token_ids
            assert len(partial.token_ids) < len(tokens) or reason is StopReason.ERROR or not request.draws
            if keep is not None:
                attempt = self.attempts[partial.job_id] = self.attempts[partial.job_id] + 1
                rule = None if request.constraint is None else Rule(request.constraint.key)
                again = replace(
                    request, attempt=attempt, generated_ids=partial.token_ids[:keep], constraint=rule
                )
                self.cancelled.discard(again.job_id)
                self.requests[again.job_id, attempt] = again
                self.resumed += len(resumed(again))
                self.engine.submit(again)

    @invariant()
    def books_are_in_order(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def take(self, completions: list[Completion]) -> None:
        for completion in completions:
            key = (completion.job_id, completion.attempt)
            assert key not in self.done, "completed twice"
            self.done[key] = completion
            assert completion.text.startswith(self.told.get(key, ""))
            self.check(self.requests[key], completion)

    def expected(self, request: Request) -> tuple[tuple[int, ...], str, StopReason]:
        return expected(request, self.context, self.poison)

    def check(self, request: Request, completion: Completion) -> None:
        assert completion.completion_tokens == len(completion.token_ids)
        assert completion.prompt_tokens == len(request.prompt_ids)
        if not request.prompt_ids or len(request.prompt_ids) + request.draws > self.context:
            assert completion.stop_reason is StopReason.ERROR
            return
        tokens, text, reason = self.expected(request)
        told = completion.logprobs
        if likely(request) == NO_LOGPROBS:
            assert told is None
        else:
            assert told is not None and told.likely == likely(request)
            records = expected_records(request, tokens, told.likely)
            assert records[: len(told.records)] == told.records
            asked = (
                ()
                if request.prompt_logprobs_from is None
                else request.prompt_ids[request.prompt_logprobs_from :]
            )
            assert told.token_ids == (*asked, *completion.token_ids)[: len(told.token_ids)]
            assert told.given == min(len(asked), len(told.token_ids))
            assert len(told.records) == len(told.token_ids) * 4 * (1 + 2 * told.likely)
            if completion.stop_reason not in (*EARLY, StopReason.ERROR):
                assert told.records == records
        if completion.stop_reason in EARLY:
            if completion.stop_reason is StopReason.DEADLINE:
                assert request.deadline is not None
                assert request.deadline <= self.clock.now
            else:
                newer = self.attempts[request.job_id] > request.attempt
                assert newer or request.job_id in self.cancelled
            assert tokens[: completion.completion_tokens] == completion.token_ids
            return
        assert (completion.token_ids, completion.text, completion.stop_reason) == (tokens, text, reason)
        embeds = request.embeds is not None and reason is not StopReason.ERROR
        assert completion.embedding == (expected_embedding(request) if embeds else None)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if not self.engine.has_work:
                break
            self.take(self.engine.step())
        assert not self.engine.has_work, "livelock"
        assert self.done.keys() == self.requests.keys()
        stats = self.engine.stats
        assert stats.free_pages == stats.pages
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.resumed_tokens == self.resumed
        self.engine.check_integrity()


TestEngineAtRandom = EngineMachine.TestCase
TestEngineAtRandom.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
