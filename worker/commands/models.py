"""The commands pull and models of `nightmill`: fetch a model by its name, and say what is in the cache."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from nightmill.jobs.commands.options import json_option
from nightmill.jobs.commands.terminal import echo, echo_json, table
from nightmill.jobs.errors import ModelFileError, RunnerError
from nightmill.jobs.settings import Settings
from nightmill.worker.fetching import fetched, require_hub_extra
from nightmill.worker.options import require_worker_extra

if TYPE_CHECKING:
    from nightmill.worker.model.gguf.file import GgufFile
    from nightmill.worker.model.hub.cached import CachedModel
    from nightmill.worker.model.spec import ModelSpec

_LEAST_SHARE = 0.005  # of a file's bytes, for a type of tensor to be named
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
    from nightmill.worker.model.hub.cached import cached_models

    settings = Settings.from_env()
    index = settings.gpu if gpu is None else gpu
    room = _gpu_room(index)
    found = [_look_at(model, room, settings) for model in cached_models()]
    if as_json:
        for one in found:
            echo_json(asdict(one))
    elif found:
        rows = [
            (one.name, f"{one.size / 1e9:.1f} GB", one.family or _UNKNOWN, one.quantisation, one.says())
            for one in found
        ]
        table(("model", "size", "family", "quantisation", "fits the GPU"), rows, cut="fits the GPU")
    else:
        echo("no model is in the cache; `nightmill pull hf:OWNER/REPO` fetches one")


@dataclass(frozen=True, slots=True)
class Look:
    """What there is to say of a cached model. `cache_tokens` is None without a GPU, 0 if it does not fit."""

    name: str
    files: list[str]
    size: int
    family: str | None
    quantisation: str
    context: int | None
    cache_tokens: int | None
    problem: str | None

    def says(self) -> str:
        """Whether it can be served."""
        if self.problem is not None:
            return f"no: {self.problem}"
        if self.cache_tokens is None:
            return "no GPU to ask"
        return f"yes, about {self.cache_tokens:,} tokens of cache"


@dataclass(frozen=True, slots=True)
class GpuRoom:
    """What a GPU has for a model."""

    free: int
    multiprocessors: int


def _gpu_room(index: int | None) -> GpuRoom | None:
    """Of the GPU of this index, by default the first; None if there is none that can be used."""
    from nightmill.worker.runners.gpu.device.device import Device, NoDeviceError

    try:
        with Device(index or 0) as device:
            return GpuRoom(device.free_memory(), device.multiprocessors)
    except NoDeviceError:
        return None


def _look_at(model: "CachedModel", room: GpuRoom | None, settings: Settings) -> Look:
    from nightmill.worker.model.families import read_spec
    from nightmill.worker.model.gguf.file import GgufFile

    family, quantisation, context, tokens, problem = None, _UNKNOWN, None, None, None
    try:
        with GgufFile.open(model.files[0]) as file:
            family = file.string("general.architecture", default=None)
            quantisation = ", ".join(quantisation_of(file))
            spec = read_spec(file)
            context = spec.context_length
            if room is not None:
                tokens = cache_tokens(spec, room, settings)
    except (ModelFileError, RunnerError) as error:
        problem = str(error).removeprefix(f"{model.files[0]}: ")
        tokens = None if room is None else 0
    return Look(
        model.name,
        [str(file) for file in model.files],
        model.size,
        family,
        quantisation,
        context,
        tokens,
        problem,
    )


def quantisation_of(file: "GgufFile") -> Iterator[str]:
    """The types of a file's tensors with their share of its bytes, the largest first: `Q4_K 81%`."""
    by_kind: Counter[str] = Counter()
    for info in file.tensors.values():
        by_kind[info.kind.name] += info.nbytes
    for kind, size in by_kind.most_common():
        if (share := size / by_kind.total()) >= _LEAST_SHARE:
            yield f"{kind} {share:.0%}"


def cache_tokens(spec: "ModelSpec", room: GpuRoom, settings: Settings) -> int:
    """Tokens of KV cache that a worker with these settings has beside the weights, to some percent.

    Raises RunnerError if the kernels do not take the model, or it does not fit.
    """
    from nightmill.worker.link.loading import BLOCK_SIZE, GPU_CONTEXT, GPU_MAX_SEQUENCES, GPU_TOKEN_BUDGET
    from nightmill.worker.runners.gpu.catalogue import check_spec, workspace_bytes
    from nightmill.worker.runners.gpu.memory import plan_memory
    from nightmill.worker.runners.gpu.sampling.slots import SlotTable

    check_spec(spec)
    slots = settings.max_sequences or GPU_MAX_SEQUENCES
    context = min(settings.context or GPU_CONTEXT, spec.context_length)
    budget = max(GPU_TOKEN_BUDGET, slots)
    workspace = workspace_bytes(
        spec, room.multiprocessors, max_context=context, max_tokens=budget, max_draws=slots
    )
    plan = plan_memory(
        spec,
        free=room.free,
        gpu_memory=settings.gpu_memory,
        slots=slots,
        context=context,
        max_tokens=budget,
        workspace=workspace + SlotTable.bytes(slots, spec.vocab),
    )
    return plan.kv_blocks * BLOCK_SIZE
