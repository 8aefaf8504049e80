"""A process that tokenises as workers of a model file do: `python -m nightmill.worker.assembly.tokenizing`.

A server of HTTP starts it by this name, since the client must not import the worker, and ends it whenever an
answer does not come in time. It has no secrets, takes no jobs, and needs neither database, broker nor GPU.
Commands and answers are objects of JSON, one a line, on standard input and output. The first command is
`{"file", "tool_format", "digest"}`; each later one asks for tokens, or with `decode` for a text. An answer
with `error` says what is wrong: `missing` (a package), `file`, `invalid` (the request), or `exhausted`, which
is the last.
"""

import json
import os
import resource
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from nightmill.worker.assembly.encoding import PromptEncoder

MEMORY_BYTES = 2 << 30
"""The most private memory of this process."""
START_SECONDS, ANSWER_SECONDS = 120.0, 60.0
"""The most processor time to read the file, and for an answer; then the kernel ends this process (SIGPROF),
even if the process that started it is dead."""

Answer = dict[str, Any]


def main() -> None:
    """Serve the parent until it closes standard input."""
    with open(0, "rb") as source, os.fdopen(os.dup(1), "wb") as sink:
        os.dup2(2, 1)  # whatever prints must not end up between the answers

        def answer(made: Answer) -> None:
            sink.write(json.dumps(made).encode() + b"\n")
            sink.flush()

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, START_SECONDS)
        try:
            model, facts = _open(json.loads(source.readline()))
        except ModuleNotFoundError as error:
            answer({"error": "missing", "message": str(error.name)})
            return
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a file, it is the answer
            answer({"error": "file", "message": str(error) or type(error).__name__})
            return
        answer(facts)
        try:
            _serve(model, source, answer)
        finally:
            model.close()


def _open(begin: Mapping[str, Any]) -> "tuple[PromptEncoder, Answer]":
    """The model, and what is to be known of it."""
    from nightmill.jobs.base.arithmetic import DIGITS
    from nightmill.worker.assembly.encoding import PromptEncoder, chat_of
    from nightmill.worker.model.chat import Limits
    from nightmill.worker.model.gguf.file import GgufFile
    from nightmill.worker.model.tokenizer import Tokenizer

    file = GgufFile.open(begin["file"])
    if begin["digest"] and file.digest()[:DIGITS] != begin["digest"]:
        raise ValueError(f"{begin['file']}: is another file than that of the worker")
    tokenizer = Tokenizer.from_gguf(file)
    model = PromptEncoder(tokenizer=tokenizer, chat=chat_of(file, tokenizer, begin["tool_format"], Limits()))
    vocabulary = tokenizer.vocabulary
    return model, {
        "vocab_size": len(vocabulary.tokens),
        "bos_token": None if vocabulary.bos_id is None else vocabulary.text_of(vocabulary.bos_id),
        "eos_token": None if vocabulary.eos_id is None else vocabulary.text_of(vocabulary.eos_id),
        "add_bos_token": tokenizer.add_bos,
        "chat_template": file.string("tokenizer.chat_template", default="") or None,
    }


def _serve(model: "PromptEncoder", source: BinaryIO, answer: Callable[[Answer], None]) -> None:
    from nightmill.jobs.errors import NightmillError

    signal.setitimer(signal.ITIMER_PROF, 0)
    for line in source:
        signal.setitimer(signal.ITIMER_PROF, ANSWER_SECONDS)
        try:
            asked = json.loads(line)
            answer(_decoded(model, asked) if "decode" in asked else _encoded(model, asked))
        except NightmillError as error:
            answer({"error": "invalid", "message": str(error)})
        except MemoryError:  # what is left of the memory is in pieces
            with suppress(MemoryError):
                answer({"error": "exhausted", "message": "it needs too much memory"})
            return
        signal.setitimer(signal.ITIMER_PROF, 0)


def _encoded(model: "PromptEncoder", asked: Mapping[str, Any]) -> Answer:
    """The tokens of `prompt`: a text, a chat or token ids. `ids`, `texts`: whether these are wanted, too."""
    from nightmill.jobs.base.contract import Rendering

    prompt = asked["prompt"]
    if isinstance(prompt, str) and asked.get("special") is False:
        ids = tuple(model.tokenizer.encode(prompt, add_bos=False))
    else:
        ids = model.encode(prompt, Rendering.read(asked.get("rendering")))
    made: Answer = {"count": len(ids)}
    if asked.get("ids"):
        made["tokens"] = ids
    if asked.get("texts"):
        made["token_strs"] = [model.tokenizer.vocabulary.text_of(token_id) for token_id in ids]
    return made


def _decoded(model: "PromptEncoder", asked: Mapping[str, Any]) -> Answer:
    ids = asked["decode"]
    wrong = next((place for place, one in enumerate(ids) if one >= model.tokenizer.vocab_size), None)
    if wrong is not None:
        last = model.tokenizer.vocab_size - 1
        return {
            "error": "invalid",
            "field": f"tokens[{wrong}]",
            "message": f"must be a token id of this model, from 0 to {last} (got {ids[wrong]})",
        }
    return {"text": model.tokenizer.decode(ids, special=True)}


if __name__ == "__main__":
    main()
