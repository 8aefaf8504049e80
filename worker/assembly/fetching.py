"""Settings that name a model become settings with a file, fetched under a bar or with lines in a log."""

import time
from collections.abc import Callable
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from nightmill.jobs.base.extras import pip_install
from nightmill.jobs.base.printable import printable
from nightmill.jobs.base.settings import MODEL_SCHEMES, Settings, parse_models
from nightmill.jobs.commands.terminal import LiveLine, ProgressLine
from nightmill.jobs.errors import MissingExtraError, ModelFetchError, ModelFileError, SettingsError
from nightmill.worker.assembly.names import name_of

if TYPE_CHECKING:
    from nightmill.worker.model.hub.fetch import Fetched
    from nightmill.worker.model.hub.transfer import Progress

LOG_SECONDS = 30.0


def with_model_file(
    settings: Settings, *, show: bool = True, tell: Callable[[str], object] = lambda progress: None
) -> Settings:
    """The settings, with a path in place of a model's name. `tell` is told of progress, beside the screen.

    Raises ModelFetchError, and MissingExtraError without the extra that a name needs.
    """
    if not isinstance(settings.model, str):
        return settings
    file = fetched(settings.model, show=show, tell=tell).files[0]  # of a split model, which opens the others
    return settings.model_copy(update={"model": file})


def with_models(
    settings: Settings, *, show: bool = True, tell: Callable[[str], object] = lambda progress: None
) -> Settings:
    """The settings, with a name and a path for each of `models`; raises as `with_model_file` does.

    A model that cannot be fetched stays, if it has a name: it may be had by the time of its turn. Raises
    SettingsError if two have one name.
    """
    if settings.models is None:
        return settings
    found: dict[str, str] = {}
    for name, model in parse_models(settings.models):
        path = model
        if model.startswith(MODEL_SCHEMES):
            try:
                path = str(fetched(model, show=show, tell=tell).files[0])
            except ModelFetchError as error:
                if name is None:
                    raise ModelFetchError(
                        f"{error}. With --models NAME={model} a worker starts without it"
                    ) from error
        known = name or name_of(Path(path))
        if known in found:
            raise SettingsError(f"--models: two are called {known!r}; write NAME=MODEL for one of them")
        if "," in path:
            raise SettingsError(
                f"--models: the path {path!r} has a comma; give a link to the file without one"
            )
        found[known] = path
    return settings.model_copy(update={"models": ",".join(f"{name}={path}" for name, path in found.items())})


def check_files(models: str) -> None:
    """Check that the files of a worker's list are there, but for those with a name of their own.

    Raises ModelFileError for one that is not: a misspelt path would be found when the first row waits for it.
    """
    for name, model in parse_models(models):
        if name is None and not model.startswith(MODEL_SCHEMES) and not Path(model).is_file():
            raise ModelFileError(
                f"--models: {printable(model)}: there is no such file; a worker starts without those that "
                f"have a name and may come later: --models NAME={printable(model)}"
            )


def with_files(settings: Settings, turn: str | None, tell: Callable[[str], object]) -> Settings:
    """The settings of a worker's process, with files in place of the names of models.

    turn  of several models, the one that this process serves, by name; None: it chooses later. Raises as
          `with_models` does
    """
    settings = with_models(settings, tell=tell)
    if settings.models is None:
        return with_model_file(settings, tell=tell)
    models = dict(parse_models(settings.models))
    if turn is not None and turn not in models:
        raise SettingsError(f"--turn: {turn!r} is not among the models of this worker")
    if settings.together and turn is None:  # Celery's command starts one worker
        raise SettingsError("--together starts a worker for each model: start them by `nightmill worker`")
    return settings_of_turn(settings, turn or next(filter(None, models)))


def settings_of_turn(settings: Settings, name: str) -> Settings:
    """The settings with which one of `models` is served, which all have names."""
    model = dict(parse_models(settings.models or ""))[name]
    return Settings.model_validate(settings.model_dump() | {"model": model, "model_name": name})


def fetched(
    name: str, *, show: bool = True, tell: Callable[[str], object] = lambda progress: None
) -> "Fetched":
    """The model of this name, from the cache or from where it is; raises as `with_model_file` does."""
    require_hub_extra(f"the model {printable(name.partition('?')[0])}")
    from nightmill.worker.model.hub.fetch import fetch

    with FetchProgress(show=show) as progress:

        def report(news: "Progress") -> None:
            tell(progress.show(news))

        found = fetch(name, report)
        if found.note:
            progress.say(found.note)
    return found


def require_hub_extra(what: str) -> None:
    """Raise MissingExtraError in an installation that cannot deal with names of models."""
    if find_spec("huggingface_hub") is None or find_spec("httpx2") is None:
        raise MissingExtraError(f"{what} needs huggingface_hub: {pip_install('hub')}")


class FetchProgress:
    """Shows on stderr how far a model is: a line on a terminal, elsewhere a line every half minute."""

    def __init__(self, *, show: bool = True, live: LiveLine | None = None) -> None:
        self._show = show
        self._live = live or LiveLine(ProgressLine(name="model"), show=show, estimate=True)
        self._logged_at = time.monotonic()
        self._note = ""
        self._speed = _Speed()

    def show(self, news: "Progress") -> str:
        """Show this in place of the last; returns it in words."""
        speed = self._speed.of(news.file, news.done)
        line = ProgressLine(
            name=news.file,
            done=news.done,
            total=news.total,
            count=_counted(news.done, news.total),
            note=news.note,
            speed=f"{speed / 1e6:,.1f} MB/s" if speed else "",
        )
        self._live.update(line)
        said = f"fetching {printable(news.file)}: {', '.join(filter(None, (line.count, line.facts())))}"
        if self._show and not self._live.shown and (news.note != self._note or self._due()):
            self._logged_at = time.monotonic()
            self.say(f"{datetime.now().astimezone():%H:%M:%S} {said}")
        self._note = news.note
        return said

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._show:
            self._live.say(text)

    def _due(self) -> bool:
        return time.monotonic() - self._logged_at >= LOG_SECONDS

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)


class _Speed:
    """Bytes a second since this process began with a file."""

    def __init__(self) -> None:
        self._file = ""
        self._from = 0
        self._began = 0.0

    def of(self, file: str, done: int) -> float:
        if file != self._file or done < self._from:
            self._file, self._from, self._began = file, done, time.monotonic()
        seconds = time.monotonic() - self._began
        return (done - self._from) / seconds if seconds > 1 else 0.0


def _counted(done: int, total: int | None) -> str:
    if total is None:
        return f"{done / 1e6:,.0f} MB" if done else ""
    return f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
