"""A tokenizing process for this server: started by module name, queried in turn, killed if late.

It processes untrusted texts and templates of model files. So it has no secrets in its environment, limits its
own memory, and is killed if an answer is late. `nightmill.worker.assembly.tokenizing` documents the protocol
on its standard input and output.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.server.errors import HttpError, invalid

COMMAND = (sys.executable, "-m", "nightmill.worker.assembly.tokenizing")
START_SECONDS = 60.0
"""Limit for reading the vocabulary, perhaps from a slow disk."""
ANSWER_SECONDS = 20.0
"""Limit for one request, from its turn on."""
MOST_BYTES = 4 << 20
"""Largest text or chat as JSON, more than any context. This many random letters, the worst case tried,
took 15 s and 0.5 GB with Qwen2's vocabulary, prose 5 s and 0.7 GB (2 cores with load 15)."""
END_SECONDS = 5.0
"""Limit for its end after a kill."""
MOST_WAITING = 64
MOST_OF_ONE = 8
"""Most waiting requests of one key."""
_ANSWER_BYTES = 1 << 28
_INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG", "TMPDIR")


class StartError(Exception):
    """The process cannot start: `kind` is "missing" (a package) or "file"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class TokenizerProcess:
    """The tokenizer and chat template of a model file. For one event loop."""

    def __init__(self, begin: Mapping[str, Any]) -> None:
        self.begin = dict(begin)
        self.facts: JsonObject = {}
        """Its description of the vocabulary, once it has started."""
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._waiting: Counter[str | None] = Counter()  # by key

    @property
    def busy(self) -> bool:
        """True while a request waits for an answer."""
        return bool(self._waiting.total())

    async def start(self, owner: str | None) -> None:
        """Start it and load `facts`; raises StartError and HttpError."""
        async with self._in_turn(owner):
            await self._running()

    async def ask(self, owner: str | None, question: JsonObject) -> JsonObject:
        """Return the answer to one question; raises StartError, and HttpError that blames the question."""
        field = _field_of(question)
        line = await asyncio.to_thread(lambda: json.dumps(question).encode() + b"\n")
        if len(line) > MOST_BYTES:
            said = f"has {len(line):,} bytes as JSON, more than {MOST_BYTES:,}; tokenise it in parts"
            raise invalid(field, said)
        async with self._in_turn(owner):
            process = await self._running()
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    answer = await self._exchange(process, line)
            except TimeoutError:
                self.kill()
                said = f"takes more than {ANSWER_SECONDS:.0f} s to tokenise; give a shorter one"
                raise invalid(field, said) from None
            except BaseException:  # a disconnect: the answer must not go to the next question
                self.kill()
                raise
        if answer is None:
            raise invalid(field, "ends the process that tokenises; give a shorter one")
        if answer.get("error") is not None:
            if answer["error"] == "exhausted":
                self.kill()
            raise _refusal(answer, field)
        return answer

    def kill(self) -> None:
        """Kill it; the next question starts another."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()

    async def close(self) -> None:
        """Kill it, and wait up to END_SECONDS for its end."""
        process = self._process
        self.kill()
        if process is not None:
            with suppress(TimeoutError):  # stuck in the kernel, which is harmless
                await asyncio.wait_for(process.wait(), END_SECONDS)

    @asynccontextmanager
    async def _in_turn(self, owner: str | None) -> AsyncIterator[None]:
        if self._waiting.total() >= MOST_WAITING or (
            owner is not None and self._waiting[owner] >= MOST_OF_ONE
        ):
            raise HttpError(503, "too many texts wait to be tokenised; try again later", code="busy")
        self._waiting[owner] += 1
        try:
            async with self._turn:
                yield
        finally:
            self._waiting[owner] -= 1

    async def _running(self) -> Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *COMMAND, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=_environment(), cwd="/",
                start_new_session=True, limit=_ANSWER_BYTES,
            )  # fmt: skip
        except OSError as error:  # no memory, or too many processes
            raise HttpError(503, "no process can be started to tokenise; try again later") from error
        try:
            async with asyncio.timeout(START_SECONDS):
                facts = await self._exchange(process, json.dumps(self.begin).encode() + b"\n")
        except TimeoutError:
            self.kill()
            raise StartError("file", f"is not read within {START_SECONDS:.0f} s") from None
        except BaseException:  # as in `ask`
            self.kill()
            raise
        if facts is None or "error" in facts:
            self.kill()
            said = facts or {"error": "file", "message": "the process that reads it has ended"}
            raise StartError(said["error"], said["message"])
        self.facts = facts
        return process

    async def _exchange(self, process: Process, line: bytes) -> JsonObject | None:
        """Write a line and read one; None if the process has ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            await process.stdin.drain()
            answer = await process.stdout.readline()
        except (ConnectionError, ValueError):  # ValueError: an answer beyond the limit
            answer = b""
        if not answer.endswith(b"\n"):
            self.kill()
            return None
        found: JsonObject = await asyncio.to_thread(json.loads, answer)
        return found


def _environment() -> dict[str, str]:
    """Return an environment without secrets, limited to one thread per text, so that other work is not
    slowed."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return kept | {"RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


def _field_of(question: JsonObject) -> str:
    """Name the caller's field that a question is about."""
    if "decode" in question:
        return "tokens"
    return "prompt" if isinstance(question["prompt"], str) else "messages"


def _refusal(answer: JsonObject, asked: str) -> HttpError:
    message, field = str(answer.get("message")), answer.get("field")
    return invalid(field, message) if field else HttpError(400, message, param=asked, code="invalid_value")
