"""Several models on one GPU at once: what fits, and a worker for each under one supervisor."""

import logging
import sys
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.base.logs import fit as fit_logs
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import ModelFileError, SettingsError
from nightmill.worker.assembly.fetching import with_models
from nightmill.worker.assembly.options import GROUP, LEDGER, merge_options
from nightmill.worker.service.turns.turning import named_models

if TYPE_CHECKING:
    from nightmill.worker.assembly.forecast import Card
    from nightmill.worker.assembly.together import Fit

log = logging.getLogger("nightmill.supervisor")


def fit_together(settings: Settings, card: "Card") -> "Fit":
    """Find whether the settings' models, which are named and here, fit that GPU at once.

    Raises ModelFileError for a model that cannot be opened, RunnerError for one that the kernels do not take.
    """
    from nightmill.worker.assembly.model import open_model
    from nightmill.worker.assembly.sizes import precision_of
    from nightmill.worker.assembly.together import Planned, share_out

    planned: dict[str, Planned] = {}
    for name, path in named_models(settings).items():
        try:
            model = open_model(Settings.model_validate(settings.model_dump() | {"model": path}))
        except ModelFileError as error:
            raise ModelFileError(f"--together: {name} has no share without its file: {error}") from error
        planned[name] = Planned(model.spec, precision_of(settings, model.file, model.spec))
    return share_out(planned, card, settings)


def cards_for(settings: Settings) -> list["Card"]:
    """Return this machine's GPU, or without one the card that is pretended; none if there is neither."""
    from nightmill.worker.assembly.forecast import card_here, card_of
    from nightmill.worker.runners.gpu.device.known_cards import known_card

    pretended = known_card(settings.pretend_device)
    here = None if settings.reference else card_here(settings.gpu, pretended)
    found = here or (None if pretended is None else card_of(pretended))
    return [] if found is None else [found]


def describe_fit(fit: "Fit") -> str:
    """Say for people what fits, and what each model gets."""
    from nightmill.worker.assembly.forecast import GIB

    if not fit.fits:
        return fit.refusal
    each = "; ".join(
        f"{name} {share.bytes / GIB:.1f} GiB: {share.forecast}" for name, share in fit.shares.items()
    )
    return f"all fit {fit.card} at once (speeds are those of a model that computes alone): {each}"


def fit_as_json(fit: "Fit") -> JsonObject:
    """Return the same for programs."""
    return {
        "card": fit.card.name,
        "free": fit.card.free,
        "fits": fit.fits,
        "budget": fit.budget,
        "needs": fit.needs,
        "would_fit": list(fit.would_fit),
        "shares": {
            name: {"bytes": share.bytes} | asdict(share.forecast) for name, share in fit.shares.items()
        },
    }


def serve_together(log_format: str | None, worker_id: str | None, options: Mapping[str, Any]) -> NoReturn:
    """Run a worker for each model. Raises SettingsError if they do not fit the GPU at once."""
    from nightmill.worker.assembly.shared_gpu import MOST_ENGINES, new_ledger
    from nightmill.worker.commands.process import end_seconds
    from nightmill.worker.commands.supervising import Each, commands_of_models, supervise

    settings = merge_options(Settings.from_env(), dict(options))
    if settings.models is None:
        raise SettingsError("--together: name the models, --models a.gguf,b.gguf")
    if worker_id is not None:
        raise SettingsError("--id: names one worker, and --together starts one for each model")
    settings = with_models(settings)
    models = named_models(settings)
    if len(models) > MOST_ENGINES:
        raise SettingsError(f"--together: {len(models)} models are more than {MOST_ENGINES}; name fewer")
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s: %(levelname)s] %(message)s")
    as_json = (log_format or settings.log_format) == "json"
    fit_logs(logging.getLogger().handlers, "json" if as_json else "text", settings.scrubbed)
    shares = _shares(settings)
    port, ledger, group = settings.metrics_port, new_ledger(), uuid.uuid4().hex
    commands = commands_of_models(
        [sys.executable, *sys.orig_argv[1:]],
        models,
        shares,
        {GROUP: group, LEDGER: str(ledger)},
        port,
    )
    address = None if port is None else (settings.metrics_host, port)
    raise SystemExit(
        supervise(
            commands,
            end_seconds(settings),
            each=Each.MODEL,
            as_json=as_json,
            address=address,
            pass_fds=[ledger],
        )
    )


def _shares(settings: Settings) -> dict[str, int]:
    """Return the bytes of the GPU's memory that each model gets; none without a GPU."""
    from nightmill.worker.assembly.sizes import gpu_index

    if gpu_index(settings) is None:
        return {}
    for card in cards_for(settings):
        fit = fit_together(settings, card)
        if not fit.fits:
            raise SettingsError(fit.refusal)
        log.info("%s", describe_fit(fit))
        return {name: share.bytes for name, share in fit.shares.items()}
    return {}
