"""Applies what launches return: each sequence gets its token, and ends if that is its last."""

import numpy as np

from nightmill.jobs.base.contract import StopReason
from nightmill.worker.engine.batch import BatchBuilder
from nightmill.worker.engine.constraints import nothing_left
from nightmill.worker.engine.embeddings import normalised
from nightmill.worker.engine.launches import Launch, LaunchQueue
from nightmill.worker.engine.live_requests import LiveRequests
from nightmill.worker.engine.logprobs import Records
from nightmill.worker.engine.masking import TokenMasks
from nightmill.worker.engine.options import Rank
from nightmill.worker.engine.request import Sequence, SequenceState
from nightmill.worker.engine.scheduler import Scheduler
from nightmill.worker.engine.stops import reason_to_stop
from nightmill.worker.runners.base import NO_LOGPROBS, NOT_A_NUMBER, Drawn, SumArray

_NO_NUMBERS = (
    "the model's output for this prompt is not a number: what it computes is too large for F16, or its file "
    "is damaged. A worker that is started with --dtype bf16 has room for larger numbers; or try a shorter or "
    "different prompt. If every prompt fails like this, the file is damaged: download it again"
)


class Applier:
    """Gives sequences what was drawn for them, by a launch or by an earlier attempt.

    live     finishes sequences
    builder  is told whose draws are masked from now on
    eos_ids  tokens that end a text
    context  most tokens of a sequence
    rank     as of `EngineSizes`
    """

    def __init__(
        self,
        live: LiveRequests,
        scheduler: Scheduler,
        launches: LaunchQueue,
        builder: BatchBuilder,
        token_masks: TokenMasks,
        *,
        eos_ids: frozenset[int],
        context: int,
        rank: Rank | None = None,
    ) -> None:
        self._live = live
        self._scheduler = scheduler
        self._launches = launches
        self._builder = builder
        self._token_masks = token_masks
        self._eos_ids = eos_ids
        self._context = context
        self._rank = rank
        self.generated = 0
        """Tokens that launches drew for sequences which wanted them."""
        self.resumed = 0
        """Tokens of earlier attempts."""

    def resume(self, sequence: Sequence) -> None:
        """Go on from the tokens of an earlier attempt, as if they had been drawn here.

        One that asks for log-probabilities begins afresh: those of an earlier attempt are known to nobody.
        """
        if sequence.likely != NO_LOGPROBS or sequence.request.embeds is not None:
            return
        for token in sequence.request.generated_ids:
            self.resumed += 1
            sequence.reported += 1
            sequence.tokens.append(token)
            self._finish_if_over(sequence)
            self._follow_budget(sequence)
            if sequence.state is not SequenceState.FINISHED and sequence.masked_until:
                self._live.fail(self._token_masks.accept([sequence]))
            if sequence.state is SequenceState.FINISHED:
                return

    def apply(self, launch: Launch, drawn: Drawn) -> None:
        """Give each sequence its token; those that stopped in the meantime get none."""
        generated = self.generated
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
            self.generated += 1
            tokens = sequence.tokens
            tokens.append(token)
            if drawn.guesses is not None:
                further = drawn.guesses[place]
                sequence.asked = len(tokens), tuple(further[further >= 0].tolist())
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
                self._live.fail(self._token_masks.accept(obeying))
        self._follow_drafts(launch, self.generated - generated)

    def _follow_drafts(self, launch: Launch, tokens: int) -> None:
        """Go on from what was right of a launch's drafts, and see who may have guesses next."""
        if (drafter := self._scheduler.drafter) is None:
            return
        running, waiting = self._scheduler.running, self._scheduler.waiting
        drafter.settle(launch.plan.drafts, launch.number)
        drafter.drew(running, waiting, tokens, prompts=bool(launch.plan.chunks))
        if not drafter.rows(running, waiting):
            drafter.let_run()
            return
        drew = dict.fromkeys(one for one in launch.drawing if one is not None)
        drafter.follow([one for one in drew if one.state is SequenceState.RUNNING])

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
                request = sequence.request
                embeds, rank = request.embeds, self._rank
                if rank is not None and embeds is not None and request.second is not None:
                    embedding = rank(total, len(embeds))
                else:
                    embedding = normalised(total, request.params.dimensions)
                self._live.finish(sequence, StopReason.EOS, embedding=embedding)
            else:
                self._handle_nan(sequence)

    def _handle_nan(self, sequence: Sequence) -> None:
        """A sequence's logits are not numbers: it fails, or is computed again without pages of others."""
        if self._scheduler.retry_unshared_after_nan(sequence):
            self._launches.forget(sequence)
            return
        request = sequence.request
        ruling = {"bad_words": request.banned, "logit_bias": request.params.logit_bias}
        fields = [name for name, given in ruling.items() if given and request.constraint is not None]
        error = nothing_left(*fields) if fields else _NO_NUMBERS
        self._live.finish(sequence, StopReason.ERROR, error=error)

    def _finish_if_over(self, sequence: Sequence) -> None:
        """Look at the token that was added last."""
        reason = reason_to_stop(
            sequence.tokens[-1],
            generated=sequence.generated,
            length=len(sequence.tokens),
            context=self._context,
            params=sequence.request.params,
            eos_ids=self._eos_ids,
            watch=sequence.watch,
        )
        if reason is not None:
            self._live.finish(sequence, reason)

    def _follow_budget(self, sequence: Sequence) -> None:
        """See what a budget of thoughts says of the token that was added last."""
        live = sequence.state is not SequenceState.FINISHED
        if live and sequence.budget is not None and sequence.follow_budget():
            self._builder.mask(sequence)
