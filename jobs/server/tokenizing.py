"""Conversion of texts and chats to token ids and back, exactly like the workers of a model.

A worker's row names its model file. This server reads the same file in a separate process
(`tokenizer_process`), from the worker's path if the content matches the worker's, or from the path in
NIGHTMILL_TOKENIZER_FILES for the model.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.base.extras import pip_install
from nightmill.jobs.reply.job import Worker
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server.errors import HttpError
from nightmill.jobs.server.job_service import JobService
from nightmill.jobs.server.tokenizer_process import StartError, TokenizerProcess

log = logging.getLogger("nightmill.server")

MOST_PROCESSES = 4
"""Most processes at once, one per model; the least recently used one is ended first."""


@dataclass(frozen=True, slots=True)
class Served:
    """A served model with the location of its vocabulary."""

    name: str
    context_length: int | None
    process: TokenizerProcess


class Tokenizing:
    """The tokenizers of one server."""

    def __init__(self, service: JobService) -> None:
        self._service = service
        self._files = service.client.settings.tokenizer_paths
        self._processes: OrderedDict[tuple[str, str, str], TokenizerProcess] = OrderedDict()

    async def count(self, model: str | None, spec: JobSpec, owner: str | None = None) -> int:
        """Count the prompt tokens of `spec` for this model; raises HttpError.

        model  None: the only served model
        owner  name of the asking key, whose waiting requests are limited
        """
        answer = await self.encode(await self.served(model), spec, owner)
        return int(answer["count"])

    async def served(self, model: str | None) -> Served:
        """Return the tokenizer of a model; raises HttpError if it is not served, or its file is not available
        here."""
        workers = await self._service.run(self._service.client.worker_store.serving, model)
        names = sorted({worker.model for worker in workers})
        if not names:
            if model is not None:
                await self._service.run(self._service.client.enqueueing.check_model, model)
            which = "" if model is None else f" that serves {model!r}"
            raise HttpError(503, f"there is no live worker{which}; try again later", code="not_served")
        if len(names) > 1:
            said = f"model: is missing, and several are served: {', '.join(names)}; name one"
            raise HttpError(400, said, param="model", code="missing_field")
        worker = next((one for one in workers if one.model_file or one.model in self._files), None)
        if worker is None:
            said = f"the workers of {names[0]!r} are starting; try again later"
            raise HttpError(503, said, code="not_served")
        return Served(names[0], worker.context_length, await self._process(worker))

    async def encode(
        self, served: Served, spec: JobSpec, owner: str | None = None, **options: bool
    ) -> JsonObject:
        """Return `count` of the prompt's tokens and, on request, `ids` as tokens and `texts` as token_strs.

        special: False omits the BOS token of texts. Raises HttpError.
        """
        rendering = spec.rendering
        said = {"prompt": spec.prompt, "rendering": None if rendering is None else rendering.values()}
        return await self._ask(served, owner, said | options)

    async def decode(self, served: Served, token_ids: list[int], owner: str | None = None) -> str:
        """Return the text of these tokens, with control tokens spelled out; raises HttpError."""
        return str((await self._ask(served, owner, {"decode": token_ids}))["text"])

    async def facts(self, served: Served, owner: str | None = None) -> JsonObject:
        """Return the file's description of its vocabulary, see `nightmill.worker.assembly.tokenizing`; raises
        HttpError."""
        """The file's vocabulary, as `nightmill.worker.assembly.tokenizing` describes it; raises HttpError."""
        try:
            await served.process.start(owner)
        except StartError as error:
            raise _not_here(served, error) from None
        return served.process.facts

    async def close(self) -> None:
        """End all processes."""
        while self._processes:
            await self._processes.popitem()[1].close()

    async def _ask(self, served: Served, owner: str | None, question: JsonObject) -> JsonObject:
        try:
            return await served.process.ask(owner, question)
        except StartError as error:
            raise _not_here(served, error) from None

    async def _process(self, worker: Worker) -> TokenizerProcess:
        named: Path | None = self._files.get(worker.model)
        file, digest = (worker.model_file or "", _digest(worker)) if named is None else (str(named), "")
        key = (file, digest, worker.tool_format)
        process = self._processes.get(key)
        if process is None:
            await self._make_way()
            process = TokenizerProcess({"file": file, "digest": digest, "tool_format": worker.tool_format})
            self._processes[key] = process
        self._processes.move_to_end(key)
        return process

    async def _make_way(self) -> None:
        """End idle processes first until there are fewer than MOST_PROCESSES."""
        while len(self._processes) >= MOST_PROCESSES:
            idle = (key for key, process in self._processes.items() if not process.busy)
            key = next(idle, None)
            if key is None:
                raise HttpError(503, "too many texts wait to be tokenised; try again later", code="busy")
            await self._processes.pop(key).close()


def _digest(worker: Worker) -> str:
    """Return the digest of the worker's model file."""
    try:
        return Arithmetic.parse(worker.arithmetic or "").model
    except ValueError:  # written by another version
        return ""


def _not_here(served: Served, error: StartError) -> HttpError:
    """Make the error for a vocabulary that is not available on this machine, which its operator must fix."""
    if error.kind == "missing":
        said = (
            f"tokenising needs the package {error} on this server: {pip_install('server,worker')}, "
            "and start it again"
        )
        return HttpError(501, said, code="tokenizer_missing")
    log.warning("the vocabulary of %s cannot be read: %s", served.name, error)
    said = (
        f"this server cannot read the model file of {served.name!r}, or finds another there (its log says "
        "more): run it where the worker's file is, or name a copy with "
        f"NIGHTMILL_TOKENIZER_FILES={served.name}=PATH"
    )
    return HttpError(501, said, code="tokenizer_missing")
