"""Which path leads to which page."""

from starlette.routing import Route

from nightmill.jobs.server.desk import Desk
from nightmill.jobs.server.files import Files
from nightmill.jobs.server.folder import Folder
from nightmill.jobs.server.handing_in import HandingIn
from nightmill.jobs.server.pages.actions import Actions
from nightmill.jobs.server.pages.checking import Checking
from nightmill.jobs.server.pages.night import Watch
from nightmill.jobs.server.pages.rendering import Pages
from nightmill.jobs.server.pages.session import Sessions
from nightmill.jobs.server.pages.views import Views
from nightmill.jobs.sql.server_secrets import ServerSecrets


def page_routes(
    desk: Desk, handing_in: HandingIn, files: Files, folder: Folder, checking: Checking
) -> list[Route]:
    """All pages and their forms."""
    pages, sessions = Pages(), Sessions(desk.keys, ServerSecrets(desk.client.database))
    views = Views(desk, Watch(desk, handing_in.store), files, folder, checking, pages, sessions)
    actions = Actions(views, handing_in, files)
    read = {
        "/": views.night,
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
