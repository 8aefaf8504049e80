"""`nightmill serve`: HTTP with OpenAI's endpoints."""

from typing import TypedDict, Unpack

import click

from nightmill.jobs.base.extras import pip_install
from nightmill.jobs.base.logs import LogFormat
from nightmill.jobs.base.settings import YEAR_SECONDS, Settings
from nightmill.jobs.base.times import parse_span
from nightmill.jobs.commands.options import LOG_FORMAT
from nightmill.jobs.errors import MissingExtraError, SettingsError


class _Limits(TypedDict):
    """Options that limit what callers may use."""

    max_requests: int
    request_seconds: float
    max_queued: int
    max_batches: int
    max_file_mib: int
    max_stored_mib: int


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=8080, show_default=True, help="Port to listen on."
)
@click.option(
    "--max-requests",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Most open requests; further ones are asked to retry.",
)
@click.option(
    "--request-seconds",
    type=click.FloatRange(1.0, YEAR_SECONDS),
    default=600.0,
    show_default=True,
    help="Longest time for an interactive answer, in seconds.",
)
@click.option(
    "--flex-seconds",
    type=click.FloatRange(1.0, YEAR_SECONDS),
    help="The same for the tier flex; by default 600 [NIGHTMILL_FLEX_SECONDS].",
)
@click.option(
    "--max-queued",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="Most queued jobs of one key.",
)
@click.option(
    "--max-batches",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Most unfinished batches of one key.",
)
@click.option(
    "--max-file-mib",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Largest file, in MiB.",
)
@click.option(
    "--max-stored-mib",
    type=click.IntRange(1),
    default=10_240,
    show_default=True,
    help="Most MiB of all files of one key, including results.",
)
@click.option(
    "--keep-files", help="Retention of files and ended batches: 30d, 12h; by default until deleted."
)
@click.option(
    "--cors-origin",
    "origins",
    multiple=True,
    metavar="ORIGIN",
    help="Origin of web pages that may call the server: https://app.example.org (repeatable).",
)
@click.option("--log-format", **LOG_FORMAT)
def serve(
    host: str,
    port: int,
    origins: tuple[str, ...],
    log_format: LogFormat | None,
    keep_files: str | None,
    flex_seconds: float | None,
    **limits: Unpack[_Limits],
) -> None:
    """Answer HTTP requests with OpenAI's endpoints; every request is a job.

    On an address that other machines can reach, NIGHTMILL_API_KEYS is required.
    """
    try:
        from nightmill.jobs.server.job_service import ServerLimits
        from nightmill.jobs.server.serving import serve as run
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"HTTP needs the package {error.name!r}: {pip_install('server')}") from None
    settings = Settings.from_env()
    kept = None if keep_files is None else parse_span("--keep-files", keep_files)
    if kept is not None and not kept:
        raise SettingsError("--keep-files 0: results would be deleted at once; without it they are kept")
    server_limits = ServerLimits(
        requests=limits["max_requests"],
        queued=limits["max_queued"],
        batches=limits["max_batches"],
        request_seconds=limits["request_seconds"],
        flex_seconds=settings.flex_seconds if flex_seconds is None else flex_seconds,
        file_bytes=limits["max_file_mib"] << 20,
        stored_bytes=limits["max_stored_mib"] << 20,
        keep_files=kept,
    )
    if log_format is not None:
        settings = settings.model_copy(update={"log_format": log_format})
    run(settings, host, port, server_limits, origins)
