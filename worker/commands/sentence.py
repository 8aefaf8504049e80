"""A few words that a model writes, to see that it is whole: greedy, by the runner that serves it here."""

from dataclasses import dataclass
from typing import Final

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.base.printable import printable
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import ChatTemplateError, RunnerError
from nightmill.jobs.reply.embeddings import relevance_of
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.model import LoadedModel
from nightmill.worker.assembly.sizes import context_length, gpu_index
from nightmill.worker.engine.request import Request

__all__ = ["Sentence", "write_sentence"]

ASKED: Final = "Write one short sentence about the sea."
_PLAIN: Final = "The sea is"
_TOKENS = 32
_CONTEXT = 512  # a cache of one such sequence leaves a GPU's memory to the workers beside it
_MOST_WITH_NUMPY = 600_000_000  # parameters: 2 GB in float, and half a minute on two cores


@dataclass(frozen=True, slots=True)
class Sentence:
    """The result of having the model write a sentence. `ok` is None if nothing was tried."""

    ok: bool | None
    found: str
    text: str | None = None


def write_sentence(settings: Settings, model: LoadedModel) -> Sentence:
    """Have the model write, embed or rank a sentence. Raises NightmillError as `build_engine` does."""
    parameters = model.spec.parameters
    if gpu_index(settings) is None and parameters > _MOST_WITH_NUMPY:
        return Sentence(
            None, "none is written: without a GPU a model of this size takes minutes and much memory"
        )
    about = f'answers "{ASKED}" with'
    try:
        prompt = model.encode([{"role": "user", "content": ASKED}])
    except ChatTemplateError:  # plain prompts work without a template
        prompt, about = model.encode(_PLAIN), f'goes on with "{_PLAIN}" by'
    context = min(_CONTEXT, context_length(settings, model.spec))
    small = settings.model_copy(update={"max_sequences": 1, "context": context})
    try:
        engine = build_engine(small, model)
    except RunnerError as error:
        return Sentence(None, f"none is written: {error}")
    params = GenerationParams(max_tokens=min(_TOKENS, max(1, context - len(prompt))), temperature=0.0)
    embeds, second = range(1) if engine.encodes else None, None
    if model.pairs is not None and model.pairs.relevant:
        prompt = model.pairs.pair(ASKED, _PLAIN)
        embeds, second = model.pairs.places(len(prompt)), model.pairs.second(prompt)
    try:
        engine.submit(Request("check", 1, prompt, params, 0, embeds=embeds, second=second))
        done = []
        while engine.has_work:
            done += engine.step()
    finally:
        engine.close()
    (completion,) = done
    if completion.stop_reason is StopReason.ERROR:
        return Sentence(False, f"the model writes nothing: {completion.error}")
    if completion.embedding is not None and second is not None:
        found = relevance_of(completion.embedding)
        return Sentence(True, f'finds "{_PLAIN}" {found:.4f} relevant for "{ASKED}"')
    if completion.embedding is not None:
        return Sentence(True, f'embeds "{_PLAIN}" as {model.spec.width:,} numbers')
    text = completion.text.strip()
    shown = f"“{printable(text)}”" if text else "nothing at all"
    return Sentence(bool(text) or None, f"{about} {shown} ({completion.stop_reason})", completion.text)
