"""The commands pull and models of `nightmill`: fetch a model by its name, and say what is in the cache."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.commands.options import json_option
from nightmill.jobs.commands.terminal import echo, echo_json, table
from nightmill.jobs.errors import ModelFileError, RunnerError, SettingsError
from nightmill.worker.assembly.fetching import fetched, require_hub_extra
from nightmill.worker.assembly.options import require_worker_extra

if TYPE_CHECKING:
    from nightmill.worker.assembly.forecast import Card
    from nightmill.worker.model.hub.cached import CachedModel

_UNKNOWN = "-"


@click.command()
@click.argument("name")
@json_option
def pull(name: str, as_json: bool) -> None:
    """Fetch the model NAME into the cache, and print where it lies.

    \b
      nightmill pull hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF          the usual quantisation, Q4_K_M
      nightmill pull hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0     this one
      nightmill pull hf:OWNER/REPO/FILE.gguf                     this file
      nightmill pull https://example.org/models/FILE.gguf

    `--model NAME` of the other commands does the same first. The cache is the one that programs for the
    Hugging Face Hub share; HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean there.
    """
    require_worker_extra("pull")
    files = fetched(name, show=not as_json).files
    if as_json:
        echo_json({"name": name, "files": [str(file) for file in files]})
    else:
        for file in files:
            echo(file)


@click.command()
@click.option(
    "--gpu", type=click.IntRange(0), help="Index of the GPU to fit models on; the first by default."
)
@json_option
def models(gpu: int | None, as_json: bool) -> None:
    """Say which models are in the cache, what they are, and whether they fit this machine's GPU."""
    require_worker_extra("models")
    require_hub_extra("`nightmill models`")
    from nightmill.worker.assembly.forecast import card_here
    from nightmill.worker.model.hub.cached import cached_models
    from nightmill.worker.runners.gpu.device.known_cards import known_card

    settings = Settings.from_env()
    card = card_here(settings.gpu if gpu is None else gpu, known_card(settings.pretend_device))
    found = [_look_at(model, card, settings) for model in cached_models()]
    if as_json:
        for one in found:
            echo_json(asdict(one))
    elif found:
        rows = [
            (one.name, f"{one.size / 1e9:.1f} GB", one.kind(), one.quantisation, one.says()) for one in found
        ]
        table(("model", "size", "family", "quantisation", "fits the GPU"), rows, cut="fits the GPU")
    else:
        echo("no model is in the cache; `nightmill pull hf:OWNER/REPO` fetches one")


@dataclass(frozen=True, slots=True)
class Look:
    """The description of a cached model, and of its fit on the GPU.

    active         parameters that a token is computed with: fewer than all in mixtures of experts
    cache_tokens   None without a GPU, 0 if it does not fit
    weights, rate  bytes on the GPU, and output tokens per second to expect; None where it does not fit
    """

    name: str
    files: list[str]
    size: int
    family: str | None
    parameters: int | None
    active: int | None
    quantisation: str
    context: int | None
    cache_tokens: int | None
    weights: int | None
    weights_in: str | None
    sequences: dict[int, int] | None
    rate: int | None
    problem: str | None

    def kind(self) -> str:
        """Say the family and, of a mixture of experts, how many parameters are active."""
        if self.family is None:
            return _UNKNOWN
        if self.parameters is None or self.active is None or self.active == self.parameters:
            return self.family
        return f"{self.family}, {self.active / 1e9:.1f} of {self.parameters / 1e9:.1f} billion active"

    def says(self) -> str:
        """Say whether the model can be served, why not, or how fast."""
        if self.problem is not None:
            return f"no: {self.problem}"
        if self.weights is None or not self.sequences:
            return "no GPU to ask"
        from nightmill.worker.runners.gpu.precision import WeightsFormat

        length, count = next(iter(self.sequences.items()))
        kept = WeightsFormat(self.weights_in).words
        return (
            f"yes: {self.weights / 2**30:.1f} GiB of weights {kept}, a cache of {self.cache_tokens:,} "
            f"tokens, for {count:,} sequences of {length:,} at once, about {self.rate:,} tokens/s"
        )


def _look_at(model: "CachedModel", card: "Card | None", settings: Settings) -> Look:
    from nightmill.worker.assembly.forecast import forecast
    from nightmill.worker.assembly.sizes import precision_of
    from nightmill.worker.commands.inspection import quantisation_of, shares
    from nightmill.worker.model.families import read_spec
    from nightmill.worker.model.gguf.file import GgufFile

    family, quantisation, context, fits, problem = None, _UNKNOWN, None, None, None
    parameters, active = None, None
    try:
        with GgufFile.open(model.files[0]) as file:
            family = file.string("general.architecture", default=None)
            quantisation = ", ".join(shares(quantisation_of(file)))
            spec = read_spec(file)
            context = spec.context_length
            parameters, active = spec.parameters, spec.active_parameters
            if card is not None:
                fits = forecast(spec, card, settings, precision_of(settings, file, spec))
    except (ModelFileError, RunnerError, SettingsError) as error:
        problem = str(error).removeprefix(f"{model.files[0]}: ")
    nothing = None if card is None or problem is None else 0
    return Look(
        model.name,
        [str(file) for file in model.files],
        model.size,
        family,
        parameters,
        active,
        quantisation,
        context,
        nothing if fits is None else fits.cache_tokens,
        None if fits is None else fits.weights,
        None if fits is None else fits.weights_in,
        None if fits is None else fits.sequences,
        None if fits is None else fits.rate,
        problem,
    )
