"""What `benchmarks.families` runs: agreement of many models at once, and speed, one after the other."""

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from benchmarks.engine import WORKLOADS, play
from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.catalogue import check_spec
from nightmill.worker.runners.gpu.element_choice import choose_element
from nightmill.worker.runners.gpu.memory import RunnerSizes
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.runner import CudaRunner
from tests.support.agreement import CLEAR, CONTEXT, Agreement, agreement
from tests.support.apart import Apart, ApartError
from tests.support.driving import BLOCK, Cuda, HasLogits, Reference
from tests.support.family_models import MODELS, QWEN, FamilyModel, Heads, Size, full_size, small_size, write

__all__ = ["Checked", "Racer", "Row", "check", "race"]

UNIFORM = WORKLOADS["uniform"]
TURNS = 2  # of each model, after one that does not count
AT_ONCE = 6  # models held against the reference runner, which computes on the processor
AGREEMENT_S, LOAD_S, TURN_S = 300, 180, 60  # limits; the first compile kernels

COARSER = {"f16": 1, "bf16": 8}  # than half's are its last digits

Progress = Callable[[str], None]


@dataclass
class Row:
    """What is found out about a model; `refused` and `error` are sentences."""

    model: str
    family: str
    element: str = ""  # what the GPU computes it in
    agreement: Agreement | None = None
    rate: float | None = None  # output tokens per second
    of_qwen: float | None = None
    of_alike: float | None = None  # of a Qwen2 with the model's heads, where those are others
    refused: str = ""
    error: str = ""


class Checked:
    """A model file, read; `reference`: the reference runner computes it too, in the place of the GPU."""

    def __init__(self, path: Path, dtype: str, reference: bool) -> None:
        self._file = GgufFile.open(path)
        self._spec = read_spec(self._file)
        self._element = choose_element(self._file, self._spec, dtype).element
        self._reference = reference

    def element(self) -> str:
        """What the GPU computes it in."""
        return self._element.value

    def refusal(self) -> str:
        """Why the kernels do not take it, if so."""
        try:
            check_spec(self._spec)
        except RunnerError as error:
            return str(error)
        return ""

    def agreement(self) -> Agreement:
        """With the reference runner."""
        with threadpool_limits(max(1, (os.cpu_count() or 1) // AT_ONCE)):  # of BLAS: others compute too
            clear = CLEAR * COARSER[self._element.value]
            return agreement(self._runner, self._file, self._spec, clear=clear)

    def _runner(self, file: GgufFile, spec: ModelSpec) -> HasLogits:
        pages = CONTEXT // BLOCK
        if self._reference:
            return Reference(file, spec, kv_pages=pages, page_size=BLOCK, slots=1)
        return Cuda(
            file, spec, slots=1, kv_pages=pages, max_tokens=CONTEXT, max_draws=CONTEXT, context=CONTEXT,
            precision=Precision(self._element), tune=False, report=lambda line: None,
        )  # fmt: skip

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


class Racer:
    """A model on the GPU that does the workload again and again; has done it once when it is made."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._file = GgufFile.open(path)
        spec, context = read_spec(self._file), UNIFORM.context + 1
        self._runner = CudaRunner(
            self._file,
            spec,
            RunnerSizes(
                slots=UNIFORM.slots,
                context=context,
                depth=3,
                max_tokens=UNIFORM.token_budget,
                kv_pages=UNIFORM.slots * -(-context // BLOCK),
            ),
            precision=Precision(choose_element(self._file, spec, dtype).element),
            report=lambda line: None,
        )
        self.rate(0)

    def ready(self) -> None:
        """It is, once it is made."""

    def rate(self, seed: int) -> float:
        """Output tokens per second."""
        turn = play(UNIFORM, self._runner, seed, slots=UNIFORM.slots, token_budget=UNIFORM.token_budget)
        return turn.rate

    def close(self) -> None:
        """Let go of the GPU."""
        self._runner.close()
        self._file.close()


def check(
    models: Mapping[str, FamilyModel], folder: Path, dtype: str, progress: Progress,
    *, reference: bool = False, size: Callable[[str], Size] = small_size,
) -> list[Row]:  # fmt: skip
    """Hold all models against the reference runner, or this against itself: a row each, in their order.

    Those that are computed in bfloat16 by default are also computed in half, which shows faults eight times
    smaller; these have no numbers beyond its range.
    """

    def row_of(number: int, name: str, model: FamilyModel, dtype: str) -> Row:
        row = Row(name, model.family)
        path = write(folder / f"small-{number}.gguf", model, size(model.family), dtype)
        try:
            with Apart(Checked, path, dtype, reference) as checked:
                row.element = checked.call("element", limit_s=AGREEMENT_S)
                row.refused = "" if reference else checked.call("refusal", limit_s=AGREEMENT_S)
                if not row.refused:
                    row.agreement = checked.call("agreement", limit_s=AGREEMENT_S)
        except ApartError as error:
            row.error = str(error)
        path.unlink()
        progress(f"{name}: {row.refused or row.error or row.agreement}")
        return row

    both = [
        (name, model, own)
        for name, model in models.items()
        for own in (("auto", "f16") if dtype == "auto" and model.like.overflows_half else (dtype,))
    ]
    numbered = [(number, *one) for number, one in enumerate(both)]
    rows = [row_of(*one) for one in numbered[:1]]  # alone: it compiles what most have in common
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return rows + list(pool.map(lambda one: row_of(*one), numbered[1:]))


def race(
    rows: Sequence[Row], folder: Path, dtype: str, progress: Progress,
    *, racer: Callable[[Path, str], Any] = Racer, size: Callable[[str], Size] = full_size,
) -> None:  # fmt: skip
    """Measure a model of each family that the kernels take, the first of its rows, in turns with a Qwen2.

    racer  what makes a Racer, or what stands in for one
    """
    taken = [row for row in rows if not row.refused]
    first = {row.family: row for row in reversed(taken)}
    entered = [row for row in taken if row is first[row.family]]
    models = [MODELS[name] for name in (QWEN, *(row.model for row in entered))]
    files = _written(models, folder, dtype, size)
    with Apart(racer, next(files), dtype) as qwen:
        qwen.call("ready", limit_s=LOAD_S)  # it is made by its first call: now, while nothing else runs
        for row, path in zip(entered, files, strict=True):
            try:
                with Apart(racer, path, dtype) as own:
                    own.call("ready", limit_s=LOAD_S)
                    rates = [
                        [one.call("rate", seed, limit_s=TURN_S) for one in (qwen, own)]
                        for seed in range(1, 1 + TURNS)
                    ]
                theirs, row.rate = map(statistics.median, zip(*rates, strict=True))
                row.of_qwen = row.rate / theirs
                progress(f"{row.model}: {row.rate:,.0f} tokens/s; Qwen2 {theirs:,.0f}")
            except ApartError as error:
                row.error = "; ".join(filter(None, (row.error, str(error))))
                progress(f"{row.model}: {error}")
    _race_alike([row for row in entered if row.rate is not None], folder, dtype, progress, racer, size)


def _race_alike(
    rows: Sequence[Row], folder: Path, dtype: str, progress: Progress,
    racer: Callable[[Path, str], Any], size: Callable[[str], Size],
) -> None:  # fmt: skip
    """Measure Qwen2s with the heads of these models: attention costs them the same, all else tells."""
    qwen = MODELS[QWEN]
    by_heads: dict[Heads, list[Row]] = {}
    for row in rows:
        by_heads.setdefault(size(row.family).heads, []).append(row)
    by_heads.pop(size(qwen.family).heads, None)
    for heads, alike in by_heads.items():
        path = write(folder / "alike.gguf", qwen, replace(size(qwen.family), heads=heads), dtype)
        try:
            with Apart(racer, path, dtype) as other:
                other.call("ready", limit_s=LOAD_S)
                turns = [other.call("rate", seed, limit_s=TURN_S) for seed in range(1, 1 + TURNS)]
            rate = statistics.median(turns)
        except ApartError as error:
            progress(f"a Qwen2 with {heads}: {error}")
            continue
        finally:
            path.unlink()
        progress(f"a Qwen2 with {heads}: {rate:,.0f} tokens/s")
        for row in alike:
            row.of_alike = (row.rate or 0.0) / rate


def _written(
    models: Sequence[FamilyModel], folder: Path, dtype: str, size: Callable[[str], Size]
) -> Iterator[Path]:
    """Files of these models, each removed when the next is asked for; that is written in the meantime."""

    def written(number: int) -> Path:
        model = models[number]
        return write(folder / f"{number}.gguf", model, size(model.family), dtype)

    with ThreadPoolExecutor(1) as writer:
        ahead = writer.submit(written, 0)
        for number in range(len(models)):
            path = ahead.result()
            if number + 1 < len(models):
                ahead = writer.submit(written, number + 1)
            yield path
            path.unlink()  # whoever has it open keeps it
