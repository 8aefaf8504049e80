"""Actions on web pages: each is a form with a token, and redirects to a page."""

from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.fields import FIELDS, OF_A_BATCH, FieldKind, check_option, deadline_moment
from nightmill.jobs.request.limits import LIMIT_KEYS, Limits
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server.batch_submission import UploadedBatchSubmission
from nightmill.jobs.server.bodies import TIMES, read_times
from nightmill.jobs.server.errors import HttpError, http_error_of
from nightmill.jobs.server.files import PREFIX, Files
from nightmill.jobs.server.pages.rendering import redirect
from nightmill.jobs.server.pages.session import TOKEN, check_token
from nightmill.jobs.server.pages.views import Views
from nightmill.jobs.sql.http_batches import HttpBatch, HttpStatus

_TRIED = ("max_tokens", "temperature", "seed")
_READ = {FieldKind.INTEGER: int, FieldKind.NUMBER: float}


class Actions:
    """The forms of pages."""

    def __init__(self, views: Views, submission: UploadedBatchSubmission, files: Files) -> None:
        self._views = views
        self._service = views.service
        self._sessions = views.sessions
        self._submission = submission
        self._files = files
        self._ids = IdSource()

    async def cancel_batch(self, request: Request) -> Response:
        """POST /batch/cancel."""
        caller, form = await self._form(request)
        batch, http = await self._service.run(self._views.watch.batch, caller, form.get("name", ""))
        caller.need_to_change(None if http is None else http.owner)
        if http is None or http.status.final:
            await self._service.look(batch.cancel)
        elif http.status is not HttpStatus.CANCELLING:
            await self._submission.cancel(caller, http.batch)
        self._views.watch.status_cache.forget(batch.name)
        return _to(request, "/batch", name=batch.name)

    async def retry_batch(self, request: Request) -> Response:
        """POST /batch/retry: queue the rows again that ended without a result."""
        caller, form = await self._form(request)
        batch, http = await self._service.run(self._views.watch.batch, caller, form.get("name", ""))
        caller.need_to_change(None if http is None else http.owner)
        if http is None:
            await self._service.look(batch.retry_failed)
        else:
            await self._submission.retry(caller, http.batch)
        self._views.watch.status_cache.forget(batch.name)
        return _to(request, "/batch", name=batch.name)

    async def cancel_job(self, request: Request) -> Response:
        """POST /job/cancel."""
        caller, form = await self._form(request)
        job = await self._service.cancel(caller, form.get("id", ""))
        return _to(request, "/job", id=job.id)

    async def retry_job(self, request: Request) -> Response:
        """POST /job/retry: queue a job again that ended without a result."""
        caller, form = await self._form(request)
        job = await self._service.job(caller, form.get("id", ""))
        caller.need_to_change(job.owner)
        await self._service.run(self._service.client.retry, job.id)
        return _to(request, "/job", id=job.id)

    async def repeat_job(self, request: Request) -> Response:
        """POST /job/repeat: queue a new job with the same prompt, parameters and seed."""
        caller, form = await self._form(request)
        job = await self._service.job(caller, form.get("id", ""))
        return _to(request, "/job", id=await self._service.queue(caller, _again(job)))

    async def begin(self, request: Request) -> Response:
        """POST /try: queue one prompt."""
        caller, form = await self._form(request)
        said: dict[str, Any] = {name: _read(name, form[name]) for name in _TRIED if form.get(name)}
        if form.get("model"):
            said["model"] = form["model"]
        prompt = form.get("prompt", "").replace("\r\n", "\n")
        if form.get("kind") == "plain":
            said["prompt"] = prompt
        else:
            system = [{"role": "system", "content": form["system"]}] if form.get("system") else []
            said["messages"] = [*system, {"role": "user", "content": prompt}]
        spec = JobSpec.parse(said, self._service.interactive_defaults)
        return _to(request, "/job", id=await self._service.queue(caller, spec))

    async def upload(self, request: Request) -> Response:
        """POST /hand-in: upload a file."""
        caller = self._sessions.caller(request)

        def ours(texts: dict[str, str]) -> None:
            check_token(request, {TOKEN: texts.pop(TOKEN, "")})

        file = await self._files.take(request, caller, ours)
        return _to(request, "/hand-in/file", id=PREFIX + file.id)

    async def submit(self, request: Request) -> Response:
        """POST /hand-in/begin: submit the file as a batch."""
        caller, form = await self._form(request)
        caller.need_to_submit()
        now = await self._service.run(self._service.client.database.now)
        said: dict[str, Any] = {
            name: _read(name, value) for name, value in form.items() if name in OF_A_BATCH and value.strip()
        }
        read_times(said, now)
        begins, ends = said.get("scheduled_at"), deadline_moment(said.get("deadline"), now)
        settings = {name: value for name, value in said.items() if name not in TIMES}
        defaults = JobSpec.defaults(settings, OF_A_BATCH)
        limits = {name: form[name].strip() for name in LIMIT_KEYS if form.get(name, "").strip()}
        Limits.of(limits)
        settings |= limits
        if defaults.model is not None:
            await self._service.run(self._service.client.enqueueing.check_model, defaults.model)
        if form.get("name"):
            check_option("batch", form["name"])
        asked = HttpBatch(
            id=self._ids.draw(),
            owner=caller.name,
            input_file=form.get("file", ""),
            created_at=now,
            name=form.get("name") or None,
            settings=settings,
            scheduled_at=begins,
            deadline_at=ends,
        )
        batch = await self._submission.submit(request, caller, asked, "file")
        return _to(request, "/hand-in/wait", id=batch.batch)

    async def entering(self, request: Request) -> Response:
        """GET /hand-in/wait?id=...: redirect to the batch, once its first rows are entered."""
        caller = self._sessions.caller(request)
        http = await self._submission.find(caller, request.query_params.get("id", ""))
        try:
            await self._service.run(self._views.watch.batch, caller, http.batch)
            return _to(request, "/batch", name=http.batch)
        except HttpError:
            values = {"http": http, "waits": http.status is HttpStatus.VALIDATING}
            return self._views.pages.page(request, "entering.html", caller, values)

    async def sign_in(self, request: Request) -> Response:
        """POST /sign-in."""
        form = await self._service.bodies.form(request, None)
        check_token(request, form)
        there = form.get("next", "/")
        local = there.startswith("/") and not there.startswith(("//", "/\\"))
        response = redirect(request, there if local else "/")
        secure = request.url.scheme == "https"
        if self._sessions.sign_in(response, form.get("key", "").strip(), secure=secure) is not None:
            return response
        values = {"next": there if local else "/", "wrong": True}
        return self._views.pages.page(request, "sign_in.html", None, values, status=403)

    async def sign_out(self, request: Request) -> Response:
        """POST /sign-out."""
        await self._form(request)
        response = redirect(request, "/sign-in")
        self._sessions.sign_out(response)
        return response

    async def _form(self, request: Request) -> tuple[Any, dict[str, str]]:
        """Authenticate a form post; returns (caller, fields)."""
        caller = self._sessions.caller(request)
        form = await self._service.bodies.form(request, caller.name)
        check_token(request, form)
        return caller, form


def _to(request: Request, path: str, **query: str) -> Response:
    """Redirect to the page with the result."""
    return redirect(request, f"{path}?{urlencode(query)}")


def _read(name: str, text: str) -> Any:
    """Parse a form field by its type: a number, or text that the parser may refuse."""
    read = _READ.get(FIELDS[name].kind) if name in FIELDS else None
    try:
        return text if read is None else read(text)
    except ValueError:
        return text


def _again(job: Job) -> JobSpec:
    """Make a spec for the same text as that job; raises HttpError if its row is incomplete."""
    params = job.params.model_dump(exclude_defaults=True, exclude={"seed"})
    said: dict[str, Any] = {**params, "seed": job.seed, "model": job.model}
    if job.rendering is not None:
        said |= {
            "chat_template_kwargs": dict(job.rendering.variables) or None,
            "add_generation_prompt": job.rendering.add_generation_prompt,
            "continue_final_message": job.rendering.continue_final_message,
        }
    tools = None if job.rendering is None else job.rendering.tools
    asked = replace(JobSpec(), constrained=job.constrained, tools=tools)
    prompt = next((one for one in (job.prompt, job.prompt_ids, job.messages) if one is not None), None)
    if prompt is None:
        raise HttpError(409, "this row has no prompt that could be computed again", code="no_prompt")
    try:
        return JobSpec.parse({**said, "messages" if job.messages is not None else "prompt": prompt}, asked)
    except NightmillError as error:
        raise http_error_of(error) from None
