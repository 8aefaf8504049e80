"""Read-only pages: the start page, batches, jobs, checked files, and the forms for submitting work."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import date, timedelta
from functools import wraps
from itertools import islice
from typing import Any
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.batches.result_files import output_row
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.formats import FileFormat
from nightmill.jobs.reply.batch_status import BatchStatus
from nightmill.jobs.reply.job import Job
from nightmill.jobs.server.errors import HttpError, http_error_of
from nightmill.jobs.server.events import COMMENT, EventStream, event, with_pauses
from nightmill.jobs.server.files import PREFIX, Files
from nightmill.jobs.server.folder import Folder
from nightmill.jobs.server.job_service import JobService
from nightmill.jobs.server.keys import Caller
from nightmill.jobs.server.pages.checking import Checking, seconds_of
from nightmill.jobs.server.pages.night import ShownBatch, Watch, open_batch
from nightmill.jobs.server.pages.rendering import PageRenderer, redirect
from nightmill.jobs.server.pages.session import Sessions, SignInNeeded, check_origin
from nightmill.jobs.sql.dashboard_queries import RowFilter
from nightmill.jobs.streams.pieces import START, TextPosition

Answer = Callable[[Request], Awaitable[Response]]

_LONGEST_WORD = 200  # characters of a filter
_SPENT = {
    "computing": "computing",
    "memory": "and short of memory",
    "tokenizer": "waiting for the tokenizer",
    "messages": "waiting for jobs",
    "loading": "loading models",
}
_ROWS_AT_ONCE = 200  # rows of a download between checks for a disconnect


def _day(text: str | None) -> date | None:
    """Read the date of a night; raises HttpError."""
    try:
        day = date.fromisoformat(text) if text else None
    except ValueError:
        day = date.max
    if day is not None and not date(2000, 1, 1) <= day <= date(9000, 1, 1):
        raise HttpError(400, "date: is not a date, such as 2026-11-26", param="date", code="invalid")
    return day


class Views:
    """The pages that change nothing."""

    def __init__(
        self,
        service: JobService,
        watch: Watch,
        files: Files,
        folder: Folder,
        checking: Checking,
        pages: PageRenderer,
        sessions: Sessions,
    ) -> None:
        self.service = service
        self.watch = watch
        self.pages = pages
        self.sessions = sessions
        self._files = files
        self._folder = folder
        self._checking = checking

    def shown(self, answer: Answer) -> Answer:
        """Wrap an endpoint: errors become pages, and callers who are not signed in are sent to sign in."""

        @wraps(answer)
        async def answered(request: Request) -> Response:
            try:
                if request.method == "POST":
                    check_origin(request)
                # First a statement with a short limit, as those of pages have long ones.
                request.state.now = await self.service.run(self.service.client.database.read_clock)
                await self.sessions.load(self.service.run)
                return await answer(request)
            except SignInNeeded:
                asked = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                back = asked if request.method == "GET" else "/"
                return redirect(request, f"/sign-in?{urlencode({'next': back})}")
            except (NightmillError, HttpError) as error:
                return await self._problem(request, http_error_of(error))

        return answered

    async def night(self, request: Request) -> Response:
        """GET /: the start page."""
        caller, run = self.sessions.caller(request), self.service.look
        batches = await self.watch.batches(caller)
        values: dict[str, Any] = {"batches": batches, "night": None, "workers": []}
        if caller.only is None:
            values |= {
                "night": await run(self.watch.night),
                "workers": await run(self.watch.workers, request.state.now),
            }
        return self.pages.page(request, "night.html", caller, values)

    async def night_report(self, request: Request) -> Response:
        """GET /night?date=...: what a night was, for those who see all jobs."""
        caller = self.sessions.caller(request)
        if caller.only is not None:
            raise HttpError(403, "what a night was is for keys that see all jobs", code="forbidden")
        day = _day(request.query_params.get("date"))
        report = await self.service.look(self.service.client.night, day)
        values = {
            "report": report,
            "before": report.date - timedelta(days=1),
            "after": report.date + timedelta(days=1),
            "spent": list(_SPENT.items()),
        }
        return self.pages.page(request, "night_report.html", caller, values)

    async def batch(self, request: Request) -> Response:
        """GET /batch?name=...: progress and rows of a batch."""
        caller, run, query = self.sessions.caller(request), self.service.look, request.query_params
        batch, http = await run(self.watch.batch, caller, query.get("name", ""))
        status = await self.watch.status_cache.of(batch)
        wanted = _filter(query)
        after = query.get("after") or None
        lines = await run(self.watch.looking.lines, batch.name, wanted, after, _rows_of(status, wanted))
        said = {name: value for name, value in query.items() if name != "after" and value}
        values = {
            "shown": ShownBatch(status, http, await run(self.watch.filename, http)),
            "lines": lines,
            "query": said,
            "next": None if lines.after is None else "batch?" + urlencode(said | {"after": lines.after}),
            "first": after is None,
            "open": open_batch(status),
            "may_change": caller.may_change(None if http is None else http.owner),
            "states": list(JobState),
            "reasons": list(StopReason),
        }
        return self.pages.page(request, "batch.html", caller, values)

    async def results(self, request: Request) -> Response:
        """GET /batch/results?name=...: the rows that succeeded so far, in the order of the file."""
        return await self._download(request, errors=False)

    async def errors(self, request: Request) -> Response:
        """GET /batch/errors?name=...: the rows that ended without a result."""
        return await self._download(request, errors=True)

    async def job(self, request: Request) -> Response:
        """GET /job?id=...: a job."""
        caller = self.sessions.caller(request)
        job = await self._job(caller, request)
        values = {"job": job, "may_change": caller.may_change(job.owner)}
        return self.pages.page(request, "job.html", caller, values)

    async def events(self, request: Request) -> Response:
        """GET /job/events?id=...: stream the text for the page of a job."""
        job = await self._job(self.sessions.caller(request), request)
        last = request.headers.get("last-event-id")
        return EventStream(
            job.id, self._pieces(job.id, TextPosition.parse(last) if last else START), lambda: None
        )

    async def hand_in(self, request: Request) -> Response:
        """GET /hand-in: the form for a file."""
        caller = self.sessions.caller(request)
        return self.pages.page(request, "hand_in.html", caller, {})

    async def checked(self, request: Request) -> Response:
        """GET /hand-in/file?id=...: the check of an uploaded file, before it is submitted."""
        caller, run = self.sessions.caller(request), self.service.look
        file = await self._files.find(caller, request.query_params.get("id", ""))
        found = await self._checking.look(request, file, self._folder.find(file.id))
        if found is None:
            return self.pages.page(request, "checking.html", caller, {"file": file})
        seconds = None if found.broken else await run(seconds_of, found, self.watch.looking)
        models = await run(self._models)
        values = {
            "file": file,
            "file_id": PREFIX + file.id,
            "found": found,
            "seconds": seconds,
            "models": models,
        }
        return self.pages.page(request, "checked.html", caller, values)

    def _models(self) -> list[str]:
        """Return the models that live workers serve, or load in turn, sorted."""
        workers = self.service.client.worker_store
        in_turn = {str(model) for worker in workers.could_serve() for model in worker.models or ()}
        return sorted({worker.model for worker in workers.serving()} | in_turn)

    async def playground(self, request: Request) -> Response:
        """GET /try: the form for one prompt."""
        caller, run = self.sessions.caller(request), self.service.look
        models = await run(self._models)
        return self.pages.page(request, "try.html", caller, {"models": models})

    async def sign_in(self, request: Request) -> Response:
        """GET /sign-in."""
        if not self.sessions.needed:
            return redirect(request, "/")
        values = {"next": request.query_params.get("next", "/"), "wrong": False}
        return self.pages.page(request, "sign_in.html", None, values)

    async def _download(self, request: Request, *, errors: bool) -> Response:
        caller = self.sessions.caller(request)
        batch, _ = await self.service.look(self.watch.batch, caller, request.query_params.get("name", ""))
        kind = FileFormat.OPENAI if batch.format is FileFormat.OPENAI else FileFormat.JSONL
        name = quote(f"{batch.name}.{'errors' if errors else 'results'}.jsonl", safe="")
        return StreamingResponse(
            self._rows(batch, kind, errors),
            media_type="application/octet-stream",
            headers={
                "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
                "X-Content-Type-Options": "nosniff",
                "Cache-Control": "no-store",
            },
        )

    async def _rows(self, batch: Batch, kind: FileFormat, errors: bool) -> AsyncIterator[str]:
        jobs: Iterator[Job] = batch.errors() if errors else batch.results()
        while rows := await self.service.look(lambda: list(islice(jobs, _ROWS_AT_ONCE))):
            yield "".join(
                json.dumps(output_row(job, kind, errors=errors), ensure_ascii=False) + "\n" for job in rows
            )

    async def _job(self, caller: Caller, request: Request) -> Job:
        return await self.service.job(caller, request.query_params.get("id", ""))

    async def _pieces(self, job_id: str, place: TextPosition) -> AsyncIterator[str]:
        try:
            async for piece in with_pauses(self.service.pieces(job_id, place)):
                yield COMMENT if piece is None else event({"t": piece}, place=piece.place)
            yield event({"over": True})
        except (NightmillError, HttpError) as error:
            yield event(http_error_of(error).body)

    async def _problem(self, request: Request, error: HttpError) -> Response:
        if request.headers.get("accept", "").startswith("application/json"):
            return JSONResponse(error.body, error.status)
        caller: Caller | None = None
        with suppress(SignInNeeded):
            caller = self.sessions.caller(request)
        values = {"status": error.status, "said": error.body["error"]["message"]}
        return self.pages.page(request, "problem.html", caller, values, status=error.status)


def _filter(query: Any) -> RowFilter:
    """Parse a filter from the query; unknown words are ignored."""
    state, reason = query.get("state"), query.get("reason")
    return RowFilter(
        state=JobState(state) if state in set(JobState) else None,
        reason=StopReason(reason) if reason in set(StopReason) else None,
        custom_id=(query.get("custom_id") or "")[:_LONGEST_WORD] or None,
        text=(query.get("text") or "")[:_LONGEST_WORD] or None,
    )


def _rows_of(status: BatchStatus, wanted: RowFilter) -> int:
    """Return an upper bound for the number of rows with that state and stop reason."""
    found = [status.rows]
    if wanted.state is not None:
        found.append(status.states.get(wanted.state, 0))
    if wanted.reason is not None:
        found.append(status.stop_reasons.get(wanted.reason, 0))
    return min(found)
