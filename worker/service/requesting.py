"""From claims to what the engine is to do: prompts as token ids, answers, and what these must be."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime

from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.jobs.base.contract import CallFormat, ConstraintKind
from nightmill.jobs.errors import NightmillError, RunnerError
from nightmill.jobs.request.fields import INTERACTIVE
from nightmill.jobs.sql.claims import Claim
from nightmill.worker.engine.request import Request
from nightmill.worker.grammar.calls import calls_asked
from nightmill.worker.grammar.thoughts import behind_thoughts
from nightmill.worker.service.answering import YES_AND_NO, Answering
from nightmill.worker.service.in_flight import InFlight
from nightmill.worker.service.logprobs import check_prompt_logprobs, echo_of, with_prompt_logprobs
from nightmill.worker.service.prompting import Prompting, TokenIds
from nightmill.worker.service.resume import marks, tokens_to_resume
from nightmill.worker.watched import describe

log = logging.getLogger(__name__)

PromptOrError = TokenIds | NightmillError


class Requesting:
    """Makes requests of claims, and marks the claims in hand with what their texts hang on.

    arithmetic  what the engine computes with
    now         the time by the database's clock
    """

    def __init__(
        self,
        in_flight: InFlight,
        answering: Answering,
        prompting: Prompting,
        *,
        arithmetic: Callable[[], Arithmetic],
        now: Callable[[], datetime],
    ) -> None:
        self._in_flight = in_flight
        self._answering = answering
        self._prompting = prompting
        self._arithmetic = arithmetic
        self._now = now

    def prompts(self, claims: Sequence[Claim]) -> list[PromptOrError]:
        """Token ids, or errors; an exception that nobody expected is one job's alone."""
        if not claims:
            return []
        try:
            prompts = list(self._prompting.tokenize_all(claims))
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
        """Build the requests to the engine for a job. Raises InvalidParameterError."""
        request, params = self._request(claim, prompt_ids), claim.params
        if params.embed:
            return [self._answering.embed(request, self._prompting.embedded(params, len(prompt_ids)))]
        if params.rerank is not None:
            return self._ranking(request)
        if params.score:
            return self._answering.score(request, self._prompting.tokenize_texts(params.score))
        if params.echo:
            # Of a prompt that was cut the text is that of its tokens.
            whole = None if params.truncate_prompt_tokens else claim.prompt
            request = replace(request, echo=echo_of(whole, prompt_ids, self._prompting.spell_token))
            if params.logprobs is not None:
                request = replace(request, prompt_logprobs_from=0)
        check_prompt_logprobs(len(prompt_ids), params)
        requests = self._answering.split(request)
        if params.prompt_logprobs is not None:  # by one of them
            requests[0] = with_prompt_logprobs(requests[0], params.prompt_logprobs)
        return requests

    def _ranking(self, request: Request) -> list[Request]:
        """Rank a document by a cross-encoder's head, or by how likely a model says yes against no."""
        if (paired := self._prompting.paired(request.prompt_ids)) is not None:
            places, second = paired
            return [self._answering.embed(request, places, second)]
        return self._answering.score(request, self._prompting.tokenize_texts(YES_AND_NO), YES_AND_NO)

    def _request(self, claim: Claim, prompt_ids: tuple[int, ...]) -> Request:
        """Build the request to the engine for a job, whatever the number of its answers."""
        mark, digest = marks(f"{self._arithmetic()}\x00".encode(), prompt_ids)
        markup, constrained = self._prompting.markup(claim, prompt_ids), claim.constrained
        tools = None if claim.rendering is None else claim.rendering.tools
        must = constrained is not None or (tools is not None and tools.required)
        if markup is not None and must and markup.closed:
            markup = replace(markup, thinking=None)  # it must begin with the answer
        if tools is not None and markup is not None and markup.calls is not None:
            form = None if tools.required else constrained
            if tools.required or tools.strict or form is not None:
                constrained = calls_asked(tools, markup.calls, form)
        if constrained is not None and markup is not None and markup.thinking is not None:
            free = not must and not markup.opened  # strict calls in a text that is free
            if not (
                free or (markup.calls is CallFormat.HARMONY and constrained.kind is ConstraintKind.CALLS)
            ):
                constrained = behind_thoughts(constrained, markup.thinking, opened=markup.opened)
        closing = None
        limited = claim.params.max_reasoning_tokens is not None
        if limited and markup is not None and markup.thinking is not None and not markup.closed:
            closing = self._prompting.closing(markup, calls=tools is not None and tools.required)
        self._in_flight.mark((claim.job_id, claim.attempt), mark, markup, digest)
        deadline = None
        if claim.deadline_at is not None:  # the engine counts on this host's clock, the row on the database's
            deadline = time.time() + (claim.deadline_at - self._now()).total_seconds()
        return Request(
            job_id=claim.job_id,
            attempt=claim.attempt,
            prompt_ids=prompt_ids,
            params=claim.params,
            seed=claim.seed,
            deadline=deadline,
            priority=claim.priority,
            interactive=claim.priority == INTERACTIVE,
            generated_ids=tokens_to_resume(claim.saved, mark),
            constrained=constrained,
            markup=markup,
            closing=closing,
            banned=self._prompting.tokenize_banned(claim.params.bad_words) if claim.params.bad_words else (),
        )
