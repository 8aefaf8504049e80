"""Several models on one GPU at once: what fits, and a worker for each under one supervisor."""

import logging
import sys
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

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
    from nightmill.worker.assembly.forecast import GIB, card_here
    from nightmill.worker.assembly.sizes import gpu_index
    from nightmill.worker.runners.gpu.device.known_cards import known_card

    gpu = gpu_index(settings)
    card = None if gpu is None else card_here(gpu, known_card(settings.pretend_device))
    if card is None:
        return {}
    fit = fit_together(settings, card)
    if not fit.fits:
        raise SettingsError(fit.refusal)
    for name, share in fit.shares.items():
        log.info("%s gets %.1f GiB: %s", name, share.bytes / GIB, share.forecast)
    return {name: share.bytes for name, share in fit.shares.items()}
