"""From claims to what the engine is to do: prompts as token ids, answers, and what these must be."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime

from nightmill.jobs.arithmetic import Arithmetic
from nightmill.jobs.contract import Markup
from nightmill.jobs.errors import NightmillError, RunnerError
from nightmill.jobs.fields import INTERACTIVE
from nightmill.jobs.logprobs import Spell as TokenSpell
from nightmill.jobs.sql.claims import Claim
from nightmill.worker.engine.request import Request
from nightmill.worker.grammar.calls import calls_asked
from nightmill.worker.service.answering import Answering
from nightmill.worker.service.in_flight import InFlight
from nightmill.worker.service.resume import fingerprint, prompt_digest, tokens_to_resume
from nightmill.worker.service.telling import check_told, echo_of
from nightmill.worker.watched import describe

log = logging.getLogger(__name__)

Prompt = tuple[int, ...] | NightmillError  # its token ids, or why there are none

MarkupOf = Callable[[Claim, tuple[int, ...]], Markup | None]
"""What the texts of a job hold beside its answers, given its prompt."""

Tokenize = Callable[[Sequence[Claim]], Sequence[Prompt]]
"""A shard at once: one answer for each claim, in their order."""

Spell = Callable[[Sequence[str]], tuple[tuple[int, ...], ...]]
"""The runs of tokens that a text may hold these words as; or the tokens of each of these texts by itself."""


class Requesting:
    """Makes requests of claims, and marks the claims in hand with what their texts hang on.

    arithmetic  what the engine computes with
    now         the time by the database's clock
    """

    def __init__(
        self,
        in_flight: InFlight,
        answering: Answering,
        *,
        tokenize: Tokenize,
        spell: Spell,
        apart: Spell,
        spelling: TokenSpell,
        markup: MarkupOf,
        arithmetic: Callable[[], Arithmetic],
        now: Callable[[], datetime],
    ) -> None:
        self.tokenize = tokenize
        self._in_flight = in_flight
        self._answering = answering
        self._spell = spell
        self._apart = apart
        self._spelling = spelling
        self._markup = markup
        self._arithmetic = arithmetic
        self._now = now

    def prompts(self, claims: Sequence[Claim]) -> list[Prompt]:
        """Token ids, or errors; an exception that nobody expected is one job's alone."""
        if not claims:
            return []
        try:
            prompts = list(self.tokenize(claims))
            if len(prompts) != len(claims):
                raise ValueError(f"{len(prompts)} answers to {len(claims)} prompts")
            return prompts
        except RunnerError:
            raise  # what tokenises cannot be had: no job's fault
        except Exception as error:
            log.exception("%d prompts could not be tokenised", len(claims))
            fault = describe(error)
        if len(claims) > 1:
            return [prompt for claim in claims for prompt in self.prompts([claim])]
        return [NightmillError(f"the prompt could not be tokenised: {fault}")]

    def requests(self, claim: Claim, prompt_ids: tuple[int, ...]) -> list[Request]:
        """What the engine is to do for a job. Raises InvalidParameterError."""
        request, params = self._request(claim, prompt_ids), claim.params
        if params.score:
            return self._answering.score(request, self._apart(params.score))
        if params.echo:
            request = replace(request, echo=echo_of(claim.prompt, prompt_ids, self._spelling))
            if params.logprobs is not None:
                check_told(len(prompt_ids), params)
                request = replace(request, told_from=0)
        return self._answering.split(request)

    def _request(self, claim: Claim, prompt_ids: tuple[int, ...]) -> Request:
        """What the engine is to do for a job, whatever the number of its answers."""
        mark = fingerprint(self._arithmetic(), prompt_ids)
        markup, constrained = self._markup(claim, prompt_ids), claim.constrained
        tools = None if claim.rendering is None else claim.rendering.tools
        if markup is not None and (constrained is not None or (tools is not None and tools.required)):
            markup = replace(markup, thinking=None)  # there is no room for thoughts
        if tools is not None and markup is not None and markup.calls is not None:
            constrained = calls_asked(tools, markup.calls) if tools.required or tools.strict else constrained
        self._in_flight.mark((claim.job_id, claim.attempt), mark, markup, prompt_digest(prompt_ids))
        deadline = None
        if claim.deadline_at is not None:  # the engine counts on this host's clock, the row on the database's
            deadline = time.time() + (claim.deadline_at - self._now()).total_seconds()
        assert claim.params.seed is not None
        return Request(
            job_id=claim.job_id,
            attempt=claim.attempt,
            prompt_ids=prompt_ids,
            params=claim.params,
            seed=claim.params.seed,
            deadline=deadline,
            priority=claim.priority,
            interactive=claim.priority == INTERACTIVE,
            generated_ids=tokens_to_resume(claim.saved, mark),
            constrained=constrained,
            banned=self._spell(claim.params.bad_words) if claim.params.bad_words else (),
        )
