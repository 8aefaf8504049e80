"""Routes of the web pages."""

from starlette.routing import Route

from nightmill.jobs.server.batch_submission import UploadedBatchSubmission
from nightmill.jobs.server.files import Files
from nightmill.jobs.server.folder import Folder
from nightmill.jobs.server.job_service import JobService
from nightmill.jobs.server.pages.actions import Actions
from nightmill.jobs.server.pages.checking import Checking
from nightmill.jobs.server.pages.night import Watch
from nightmill.jobs.server.pages.rendering import PageRenderer
from nightmill.jobs.server.pages.session import Sessions
from nightmill.jobs.server.pages.views import Views
from nightmill.jobs.sql.server_secrets import ServerSecrets


def page_routes(
    service: JobService, submission: UploadedBatchSubmission, files: Files, folder: Folder, checking: Checking
) -> list[Route]:
    """Return the routes of all pages and their forms."""
    pages, sessions = PageRenderer(), Sessions(service.keys, ServerSecrets(service.client.database))
    views = Views(service, Watch(service, submission.store), files, folder, checking, pages, sessions)
    actions = Actions(views, submission, files)
    read = {
        "/": views.night,
        "/night": views.night_report,
        "/batch": views.batch,
        "/batch/results": views.results,
        "/batch/errors": views.errors,
        "/job": views.job,
        "/job/events": views.events,
        "/hand-in": views.hand_in,
        "/hand-in/file": views.checked,
        "/hand-in/wait": actions.entering,
        "/try": views.playground,
        "/sign-in": views.sign_in,
    }
    done = {
        "/batch/cancel": actions.cancel_batch,
        "/batch/retry": actions.retry_batch,
        "/job/cancel": actions.cancel_job,
        "/job/retry": actions.retry_job,
        "/job/repeat": actions.repeat_job,
        "/hand-in": actions.upload,
        "/hand-in/begin": actions.submit,
        "/try": actions.begin,
        "/sign-in": actions.sign_in,
        "/sign-out": actions.sign_out,
    }
    return [
        *(Route(path, views.shown(answer), include_in_schema=False) for path, answer in read.items()),
        *(
            Route(path, views.shown(answer), methods=["POST"], include_in_schema=False)
            for path, answer in done.items()
        ),
        Route("/static/{name}", pages.static, include_in_schema=False),
    ]
