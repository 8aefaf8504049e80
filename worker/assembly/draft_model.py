"""The model of `--draft`: opened, checked against the one that it guesses for, and on a runner of its own."""

from pathlib import Path

from gguf import TokenType

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import SettingsError
from nightmill.worker.assembly.model import OpenModel
from nightmill.worker.assembly.sizes import PAGE_SIZE, REFERENCE
from nightmill.worker.engine.draft_model import DraftModel
from nightmill.worker.engine.drafting import MOST_SEQUENCES
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.model.tokenizer.vocabulary import Vocabulary
from nightmill.worker.runners.base import Runner
from nightmill.worker.runners.gpu.device.chosen import ChosenGpu
from nightmill.worker.runners.gpu.element_choice import choose_element
from nightmill.worker.runners.gpu.memory import RunnerSizes
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.reference import ReferenceRunner, choose_kv_pages

__all__ = ["build_draft_model", "open_draft_model"]

_STEP_TOKENS = 2048
_MOST_PAGES = (
    4096  # 65,536 tokens, 0.8 GB of a 0.5B: pages of texts that were read are kept for the next draft
)


def open_draft_model(settings: Settings, model: OpenModel) -> tuple[GgufFile, ModelSpec, int]:
    """Open the file and check that its model can guess for another; also how many tokens both have.

    Raises SettingsError if it cannot, ModelFileError for faults of the file.
    """
    path = settings.draft
    assert path is not None
    if settings.drafts == "off":
        raise SettingsError(
            "--draft: names a model that guesses, but drafts are off: add --drafts auto, or leave it out"
        )
    file = GgufFile.open(path)
    spec = read_spec(file)
    tokens = _shared_tokens(path, Vocabulary.from_gguf(file), model.vocabulary)
    if spec.state_bytes:
        raise SettingsError(
            f"--draft {path}: keeps states, which cannot go on from one question to the next: take a model "
            "whose layers all have attention"
        )
    return file, spec, tokens


def _shared_tokens(path: Path, theirs: Vocabulary, ours: Vocabulary) -> int:
    """The number of tokens that both vocabularies begin with; behind them one may have tokens for padding.

    Models of a family often differ in these, as Qwen2.5 of 0.5B and of 7B. Raises SettingsError.
    """
    shared = min(len(theirs.tokens), len(ours.tokens))
    for token in range(max(len(theirs.tokens), len(ours.tokens))):
        names, kinds = zip(*(_token(one, token) for one in (theirs, ours)), strict=True)
        if names[0] != names[1] and (token < shared or kinds != (TokenType.UNUSED, TokenType.UNUSED)):
            raise SettingsError(
                f"--draft {path}: has another vocabulary than the model: token {token} is {names[0]!r} "
                f"there, and {names[1]!r} in the model. Take a smaller model of the same family"
            )
    return shared


def _token(vocabulary: Vocabulary, token: int) -> tuple[str | None, int]:
    """The text and the kind of a token; behind the last one there is none, which nobody uses."""
    if token < len(vocabulary.tokens):
        return vocabulary.tokens[token], vocabulary.kinds[token]
    return None, TokenType.UNUSED


def build_draft_model(
    settings: Settings, model: OpenModel, *, gpu: ChosenGpu | None, context: int
) -> DraftModel | None:
    """The model of these settings, loaded; None if they name none. Before the other's memory is planned.

    gpu      None: it computes with NumPy
    context  tokens of the longest text

    Raises as `open_draft_model` does, and RunnerError where the GPU cannot be used.
    """
    if settings.draft is None:
        return None
    file, spec, tokens = open_draft_model(settings, model)
    context = min(context, spec.context_length)
    slots = MOST_SEQUENCES
    runner: Runner
    if gpu is None:
        pages = choose_kv_pages(spec, max_sequences=slots, context=context, page_size=PAGE_SIZE)
        token_budget = REFERENCE.tokens_of_a_step(slots)
        runner = ReferenceRunner(file, spec, kv_pages=pages, page_size=PAGE_SIZE, slots=slots)
    else:
        from nightmill.worker.runners.gpu.runner import CudaRunner

        sizes = RunnerSizes(
            slots, context, max_tokens=_STEP_TOKENS, gpu_memory=settings.gpu_memory,
            kv_pages=max(-(-context // PAGE_SIZE), min(slots * -(-context // PAGE_SIZE), _MOST_PAGES)),
        )  # fmt: skip
        element = choose_element(file, spec, settings.dtype).element
        runner = cuda = CudaRunner(file, spec, sizes, gpu=gpu, precision=Precision(element))
        token_budget = cuda.max_tokens
    return DraftModel(runner, context=context, token_budget=token_budget, tokens=tokens)
