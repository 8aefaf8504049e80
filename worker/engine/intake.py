"""Takes requests in: why one can never run, or the sequence that it becomes."""

from nightmill.worker.engine.limits import RequestLimits
from nightmill.worker.engine.options import Detokenizer
from nightmill.worker.engine.request import Request, Sequence
from nightmill.worker.engine.sharing import PrefixGroups
from nightmill.worker.engine.stops import TextWatch

_NO_EMBEDDINGS = (
    "embed: this worker computes no embeddings on its GPU: start another with --reference, which computes "
    "with NumPy"
)
_NO_TEXTS = (
    "model: this is an encoder, which embeds texts or ranks them, and writes none: give rows with embed, or "
    "with rerank for a cross-encoder, or another model"
)
_NOT_COMPILED = "what the answer must be was not compiled: a fault of the worker, retry the job"


class Intake:
    """Judges requests, and makes sequences of those that can run.

    limits   that each request must fit into
    text     how drawn tokens become text
    groups   keeps requests with equal beginnings together; None: nothing is shared
    encodes  the model is an encoder
    embeds   the runner computes embeddings
    """

    def __init__(
        self,
        limits: RequestLimits,
        text: Detokenizer,
        groups: PrefixGroups | None,
        *,
        encodes: bool,
        embeds: bool,
    ) -> None:
        self._limits = limits
        self._text_stream, self._eos_ids = text.text_stream, text.eos_ids
        self._groups = groups
        self._encodes, self._embeds = encodes, embeds
        self._submitted = 0

    def fault(self, request: Request) -> str | None:
        """Why a request can never run, with the remedy; None where it can."""
        embeds = request.embeds is not None
        fault = self._limits.fault(
            request.prompt_ids, request.params, request.generated_ids, draws=request.draws
        )
        if fault is not None:
            return fault
        if embeds and not self._embeds:
            return _NO_EMBEDDINGS
        if self._encodes and not embeds:
            return _NO_TEXTS
        if request.constrained is not None and request.constraint is None:
            return _NOT_COMPILED
        return None

    def sequence(self, request: Request) -> Sequence:
        """Return the sequence of a request without a fault, the next in the order of submission."""
        self._submitted += 1
        params = request.params
        prompt = list(request.prompt_ids)
        # What is drawn behind a text to score is told to nobody, and takes no place in the cache.
        most = 1 if request.embeds is not None else params.max_tokens
        limit = min(len(prompt) + most, self._limits.cache_context + (not request.draws))
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
        return sequence
