"""From settings to an engine: opens the model file, picks a runner, sizes its memory."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from threadpoolctl import threadpool_limits

from nightmill import package_directory
from nightmill.jobs.contract import AS_USUAL, CallFormat, Markup, Prompt, Rendering, is_token_ids
from nightmill.jobs.errors import ChatTemplateError, InvalidParameterError, NightmillError, SettingsError
from nightmill.jobs.parameters import MAX_BANNED_TOKENS
from nightmill.jobs.settings import Settings
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.probing import probe
from nightmill.worker.engine.stats import EngineStats
from nightmill.worker.grammar import Grammars
from nightmill.worker.link.reporting import ReportingFile
from nightmill.worker.link.speed import room_of
from nightmill.worker.model.chat import ChatTemplate, Limits
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.gguf.parts import whole_name
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.model.tokenizer import TextStream, Tokenizer
from nightmill.worker.model.tokenizer.vocabulary import Vocabulary
from nightmill.worker.runners.base import Runner
from nightmill.worker.runners.gpu.device.device import device_count
from nightmill.worker.runners.gpu.element_choice import ElementChoice, choose_element
from nightmill.worker.runners.gpu.numbers import Numbers, WeightNumbers
from nightmill.worker.runners.kv_format import KvFormat
from nightmill.worker.runners.reference import ReferenceRunner, choose_kv_blocks
from nightmill.worker.runners.starting import Progress, StartStep, no_progress

if TYPE_CHECKING:
    from nightmill.jobs.sql.claims import Claim

log = logging.getLogger(__name__)

# The reference runner is bound by arithmetic: more sequences or longer chunks only use more memory.
REFERENCE_MAX_SEQUENCES = 32
REFERENCE_TOKEN_BUDGET = 512
REFERENCE_CONTEXT = 4096
GPU_MAX_SEQUENCES = 2048
GPU_TOKEN_BUDGET = 16384
GPU_CONTEXT = 32768
GPU_DEPTH = 3  # launches outstanding: the GPU works on one, one waits, the host prepares the third
BLOCK_SIZE = 16
INTERACTIVE_SHARE = 16
"""Of a worker's slots one in so many is kept for interactive jobs. 2,048 sequences at once are 1% faster than
1,920; with none kept, who waits for an answer would first wait for the end of another's."""
# An engine answers between two steps. On a GPU a step takes milliseconds, the first of a kind some seconds.
# With NumPy 512 tokens through 7 billion weights are 7 TFLOP: minutes on one core.
GPU_HANG_SECONDS = 60.0
REFERENCE_HANG_SECONDS = 600.0


@dataclass(frozen=True)
class OpenModel:
    """A model file, opened and checked: what an engine needs.

    progress        is told the steps in which an engine on it starts
    plain_products  `Numbers.plain_products`
    """

    file: GgufFile
    spec: ModelSpec
    vocabulary: Vocabulary
    progress: Progress = field(default=no_progress, kw_only=True)
    plain_products: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class LoadedModel(OpenModel):
    """A model file with what turns prompts into tokens."""

    name: str
    tokenizer: Tokenizer
    chat: ChatTemplate | str  # or why there is none

    def tokenize_all(self, claims: Sequence["Claim"]) -> list[tuple[int, ...] | NightmillError]:
        """For each claimed job its token ids, or why it has none: a ChatTemplateError, InvalidPromptError.

        Raises RunnerError where the process that renders chats cannot be started, which is no job's fault.
        """
        return self.encode_all(
            [_prompt_of(claim) for claim in claims],
            [claim.rendering for claim in claims],
            [claim.requested_at for claim in claims],
        )

    def markup(self, claim: "Claim", prompt_ids: Sequence[int]) -> Markup | None:
        """What the texts of a chat, whose prompt this is, hold beside its answers; None for other prompts."""
        if claim.messages is None or isinstance(self.chat, str):
            return None
        return self.chat.markup(claim.rendering, prompt_ids)

    def spell(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The runs of tokens that a text may hold these words as: each at its beginning, and after a space.

        Raises InvalidParameterError if they have more than MAX_BANNED_TOKENS.
        """
        texts = [start + word.lstrip(" ") for word in words for start in ("", " ")]
        runs = tuple(dict.fromkeys(tuple(ids) for ids in self.tokenizer.encode_batch(texts, add_bos=False)))
        if (count := sum(map(len, runs))) > MAX_BANNED_TOKENS:
            raise InvalidParameterError(
                f"bad_words: have {count:,} tokens in all spellings, and at most {MAX_BANNED_TOKENS:,} are "
                "taken: give fewer or shorter ones",
                field="bad_words",
            )
        return runs

    def apart(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each of these texts by itself, for behind a prompt. Raises InvalidPromptError."""
        return tuple(tuple(ids) for ids in self.tokenizer.encode_batch(texts, add_bos=False))

    def spelling(self, token_id: int) -> tuple[bytes, str]:
        """The bytes that a token adds to a text, and its name."""
        return self.vocabulary.bytes_of(token_id), self.vocabulary.text_of(token_id)

    def encode(self, prompt: Prompt, rendering: Rendering | None = None) -> tuple[int, ...]:
        """A prompt's token ids. Raises what `encode_all` would answer."""
        ids = self.encode_all([prompt], [rendering])[0]
        if isinstance(ids, NightmillError):
            raise ids
        return ids

    def encode_all(
        self,
        prompts: Sequence[Prompt],
        renderings: Sequence[Rendering | None] = (),
        times: Sequence[datetime | None] = (),
    ) -> list[tuple[int, ...] | NightmillError]:
        """As `tokenize_all`, for plain texts, chats and token ids, which stay as they are.

        renderings: how each of them becomes a prompt if it is a chat; by default all as usual
        times: when each was asked for, which is the time for chat templates; by default now
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        said = renderings or [None] * len(prompts)
        chats = [
            (prompt, rendering or AS_USUAL, time)
            for prompt, rendering, time in zip(prompts, said, times or [None] * len(prompts), strict=True)
            if not isinstance(prompt, str) and _is_chat(prompt)
        ]
        of_texts = iter(
            self.tokenizer.encode_each([self.tokenizer.split(text, special=False) for text in texts])
        )
        of_chats = iter(
            [ChatTemplateError(self.chat)] * len(chats)
            if isinstance(self.chat, str)
            else self.chat.encode_all(
                [chat for chat, _, _ in chats],
                [rendering for _, rendering, _ in chats],
                [time for _, _, time in chats],
            )
        )
        answers: list[tuple[int, ...] | NightmillError] = []
        for prompt in prompts:
            if is_token_ids(prompt):
                answers.append(tuple(prompt))
            elif isinstance(prompt, str) or _is_chat(prompt):
                ids = next(of_texts if isinstance(prompt, str) else of_chats)
                answers.append(ids if isinstance(ids, NightmillError) else tuple(ids))
            else:
                answers.append(ChatTemplateError("the messages are not a list of objects"))
        return answers

    def close(self) -> None:
        """End the process that renders chats. It ends by itself when this process does."""
        if not isinstance(self.chat, str):
            self.chat.close()


def _prompt_of(claim: "Claim") -> Prompt:
    if claim.prompt_ids is not None:
        return claim.prompt_ids
    if claim.messages is None:
        return claim.prompt or ""
    return claim.messages if isinstance(claim.messages, list) else ["no list"]  # which is no chat


def _is_chat(messages: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether a row's messages are what every client stores."""
    return isinstance(messages, Sequence) and all(isinstance(message, Mapping) for message in messages)


def open_model(settings: Settings, *, progress: Progress | None = None) -> OpenModel:
    """Open and check the model file; raises SettingsError where none is named, ModelFileError for faults.

    `progress` is told how far an engine on it is, and how much of the weights a runner has read.
    """
    file = ReportingFile.open(model_path(settings))
    file.progress = progress
    vocabulary = Vocabulary.from_gguf(file)
    return OpenModel(file, read_spec(file), vocabulary, progress=progress or no_progress)


def load_model(settings: Settings) -> LoadedModel:
    """Open the model file and build its tokenizer, which takes a second; raises as `open_model` does."""
    path = model_path(settings)
    file = GgufFile.open(path)
    tokenizer = Tokenizer.from_gguf(file)
    spec = read_spec(file)
    # No text of more bytes fits the context.
    fitting = spec.context_length * max(len(token.encode()) for token in tokenizer.vocabulary.tokens)
    limits = Limits(answer_bytes=min(fitting, Limits.answer_bytes))
    try:
        chat: ChatTemplate | str = ChatTemplate.from_gguf(
            file,
            tokenizer,
            limits,
            None if settings.tool_format == "auto" else CallFormat(settings.tool_format),
        )
    except ChatTemplateError as error:  # plain prompts work without one
        chat = str(error)
    return LoadedModel(
        name=served_name(settings),
        file=file,
        spec=spec,
        vocabulary=tokenizer.vocabulary,
        tokenizer=tokenizer,
        chat=chat,
    )


def served_name(settings: Settings) -> str:
    """What jobs call the model of these settings; raises SettingsError where none is named."""
    return settings.model_name or name_of(model_path(settings))


def model_path(settings: Settings) -> Path:
    """The model's file; raises SettingsError where none is named."""
    if settings.model is None:
        raise SettingsError(
            "no model file is named: give --model FILE or set NIGHTMILL_MODEL (`nightmill demo` uses the "
            "bundled one)"
        )
    return Path(settings.model)  # names have been replaced by paths: see worker.fetching


def name_of(path: Path) -> str:
    """What jobs call a model file: its name but for ending and part, in characters that names may have."""
    name = re.sub(r"[^A-Za-z0-9._:+@-]", "-", whole_name(path.name.removesuffix(".gguf")))
    return name.lstrip("._:+@-")[:200] or "model"


def demo_model() -> Path:
    """The bundled model."""
    return package_directory() / "_models" / "nightmill-demo.gguf"


def gpu_index(settings: Settings) -> int | None:
    """The GPU to generate on: the one that is named, else the first there is; None: the reference runner."""
    if settings.reference:
        return None
    if settings.gpu is not None:
        return settings.gpu
    return 0 if device_count() else None


def max_sequences(settings: Settings) -> int:
    """Sequences to generate at once."""
    default = REFERENCE_MAX_SEQUENCES if gpu_index(settings) is None else GPU_MAX_SEQUENCES
    return settings.max_sequences or default


def interactive_slots(settings: Settings) -> int:
    """Of those, how many only interactive jobs may have: a sixteenth, where there are two or more."""
    running = max_sequences(settings)
    return max(1, running // INTERACTIVE_SHARE) if running > 1 else 0


def capacity(settings: Settings) -> int:
    """Jobs that a worker claims at once: what runs, and enough to refill it while the next are claimed."""
    running = max_sequences(settings)
    return running + max(4, running // 2)


def hang_seconds(settings: Settings) -> float:
    """Silence after which an engine counts as hung."""
    default = REFERENCE_HANG_SECONDS if gpu_index(settings) is None else GPU_HANG_SECONDS
    return default if settings.hang_seconds is None else settings.hang_seconds


def context_length(settings: Settings, spec: ModelSpec) -> int:
    """Tokens that a sequence may have; raises SettingsError where the model cannot have so many."""
    if settings.context is None:
        usual = REFERENCE_CONTEXT if gpu_index(settings) is None else GPU_CONTEXT
        return min(spec.context_length, usual)
    if settings.context > spec.context_length:
        raise SettingsError(
            f"--context {settings.context} is more than the {spec.context_length} tokens that the model "
            "was made for"
        )
    return settings.context


def element_of(settings: Settings, model: OpenModel) -> ElementChoice:
    """What a GPU computes the model in, and why."""
    return choose_element(model.file, model.spec, settings.dtype)


def numbers_of(settings: Settings, file: GgufFile, spec: ModelSpec) -> Numbers:
    """The formats that a GPU computes and keeps a model in."""
    element = choose_element(file, spec, settings.dtype).element
    return Numbers(element, WeightNumbers(settings.weights), KvFormat(settings.kv))


def build_engine(settings: Settings, model: OpenModel) -> Engine:
    """The runner with the weights, and the engine on it. Called in the process and thread that will run it.

    Raises RunnerError where the GPU cannot be used, ModelFileError for weights that do not suit it.
    """
    spec, sequences = model.spec, max_sequences(settings)
    context = context_length(settings, spec)
    gpu = gpu_index(settings)
    vocabulary = model.vocabulary
    vocabulary.spell_all()
    grammars = Grammars(vocabulary, spec.vocab)  # which reads the vocabulary while the runner loads
    runner: Runner
    model.progress(StartStep.STARTING, "")
    if gpu is None:
        token_budget = max(REFERENCE_TOKEN_BUDGET, sequences)
        runner = _reference_runner(settings, model, sequences=sequences, context=context)
    else:
        from nightmill.worker.runners.gpu.runner import CudaRunner

        runner = cuda = CudaRunner(
            model.file, spec, slots=sequences, depth=GPU_DEPTH, gpu_memory=settings.gpu_memory,
            context=context, max_tokens=max(GPU_TOKEN_BUDGET, sequences), gpu=gpu,
            numbers=replace(
                numbers_of(settings, model.file, spec), plain_products=model.plain_products
            ),
            progress=model.progress,
        )  # fmt: skip
        token_budget = cuda.max_tokens
        room = room_of(
            spec, cuda.device.peaks(), cuda.device.multiprocessors, weights=cuda.memory.weights,
            page=cuda.memory.cache // cuda.kv_blocks, pages=cuda.kv_blocks, kept=cuda.numbers.weights,
            slots=sequences, context=context,
        )  # fmt: skip
        log.info("a KV cache in %s has room for %s", cuda.numbers.kv_name.upper(), room)

    def engine() -> Engine:
        return Engine(
            runner,
            text_stream=lambda: TextStream(vocabulary, strip_space=False),  # an answer continues its prompt
            decode=vocabulary.decode,
            eos_ids=vocabulary.eos_ids,
            context_length=context,
            model_context=spec.context_length,
            max_sequences=sequences,
            interactive_slots=interactive_slots(settings),
            token_budget=token_budget,
            prefix_sharing=settings.prefix_sharing,
            constraints=grammars,
        )

    try:
        model.progress(StartStep.PROBING, "")
        probe(engine(), spec.vocab)  # by an engine of its own, which counts for itself
    except BaseException:  # Ctrl-C too must not leave memory of the GPU behind
        runner.close()
        raise
    return engine()


def _reference_runner(
    settings: Settings, model: OpenModel, *, sequences: int, context: int
) -> ReferenceRunner:
    # The products of a step are too small to share: with two BLAS threads on two busy cores, 32 sequences of
    # the demo model generated 74 tokens/s, with one thread 620 (the threads wait for each other by spinning).
    threadpool_limits(limits=1, user_api="blas")
    return ReferenceRunner(
        model.file,
        model.spec,
        kv_blocks=choose_kv_blocks(
            model.spec, max_sequences=sequences, context=context, block_size=BLOCK_SIZE
        ),
        block_size=BLOCK_SIZE,
        slots=sequences,
        kv=KvFormat(settings.kv),
        fp8=WeightNumbers(settings.weights) is WeightNumbers.FP8,
    )


def describe(settings: Settings, model: LoadedModel, stats: EngineStats) -> str:
    """One line for the log: what serves what, and how much of it."""
    spec = model.spec
    pages = stats.pages
    gpu = gpu_index(settings)
    if gpu is None:
        weights = WeightNumbers(settings.weights)
        kept = Numbers(
            weights=weights if weights is WeightNumbers.FP8 else WeightNumbers.ELEMENT,
            kv=KvFormat(settings.kv),
        ).words
        runner = f"reference runner (NumPy){kept and f', {kept}'}"
    else:
        kept = numbers_of(settings, model.file, spec).words
        runner = f"CUDA runner on GPU {gpu} in {element_of(settings, model)}{kept and f', {kept}'}"
    return (
        f"{model.name}: {spec.family}, {len(spec.layers)} layers of width {spec.width}, vocabulary "
        f"{spec.vocab:,}; {runner}, up to {max_sequences(settings)} sequences of "
        f"{context_length(settings, spec):,} tokens, KV cache of {pages * BLOCK_SIZE:,} tokens"
    )
