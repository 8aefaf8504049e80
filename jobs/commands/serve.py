"""`nightmill serve`: HTTP with OpenAI's endpoints."""

import click

from nightmill.jobs.commands.options import LOG_FORMAT
from nightmill.jobs.errors import MissingExtraError
from nightmill.jobs.logs import LogFormat
from nightmill.jobs.settings import Settings
from nightmill.jobs.when import parse_span


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", type=click.IntRange(1, 65535), default=8080, show_default=True, help="On which port.")
@click.option(
    "--max-requests",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Requests open at once; more are asked to come again.",
)
@click.option(
    "--request-seconds",
    type=click.FloatRange(1.0),
    default=600.0,
    show_default=True,
    help="Longest time for an answer that somebody waits for.",
)
@click.option(
    "--max-queued",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="Jobs that one key may have queued at once.",
)
@click.option(
    "--max-batches",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Batches that one key may have going at once.",
)
@click.option(
    "--max-file-mib",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="MiB that one file may have.",
)
@click.option(
    "--max-stored-mib",
    type=click.IntRange(1),
    default=10_240,
    show_default=True,
    help="MiB that the files of one key may have together, results among them.",
)
@click.option("--keep-files", help="How long files and ended batches stay: 30d, 12h; else until deleted.")
@click.option("--log-format", **LOG_FORMAT)
def serve(
    host: str,
    port: int,
    max_requests: int,
    request_seconds: float,
    max_queued: int,
    max_batches: int,
    max_file_mib: int,
    max_stored_mib: int,
    keep_files: str | None,
    log_format: LogFormat | None,
) -> None:
    """Answer HTTP requests with OpenAI's endpoints; every request is a job.

    On an address that other machines reach, NIGHTMILL_API_KEYS must name who may use it.
    """
    try:
        from nightmill.jobs.server.desk import Limits
        from nightmill.jobs.server.serving import serve as run
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"HTTP needs the package {error.name!r}: pip install 'nightmill[server]'"
        ) from None
    limits = Limits(
        requests=max_requests,
        queued=max_queued,
        batches=max_batches,
        request_seconds=request_seconds,
        file_bytes=max_file_mib << 20,
        stored_bytes=max_stored_mib << 20,
        keep_files=None if keep_files is None else parse_span("--keep-files", keep_files),
    )
    settings = Settings.from_env()
    if log_format is not None:
        settings = settings.model_copy(update={"log_format": log_format})
    run(settings, host, port, limits)
