"""Which element a model is computed in on a GPU: by its family, its file, or as asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.engine import build_engine, describe
from nightmill.worker.assembly.model import load_model, open_model
from nightmill.worker.engine.stats import EngineStats
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu import runner as cuda
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.element_choice import ElementChoice, choose_element
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from tests.support.family_cases import FILES, file_of
from tests.support.ggufs import write_model

Kind = GGMLQuantizationType


def chosen(file: GgufFile, dtype: str = "auto") -> ElementChoice:
    return choose_element(file, read_spec(file), dtype)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0, Kind.BF16], ids=lambda kind: kind.name)
def test_a_file_whose_matrices_are_bfloat16_is_computed_in_it_others_in_half(
    kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    found = chosen(GgufFile.open(write_model(tmp_path / "model.gguf", kind=kind)))
    assert str(found) == (
        "BF16 (as most of the file's weights are)" if kind is Kind.BF16 else "F16 (more precise than BF16)"
    )


def test_most_of_the_weights_count_and_not_a_table_beside_them(tmp_path: Path) -> None:
    """A quantised file may keep a matrix in BF16, and the other way round."""
    rows, width = read_spec(GgufFile.open(write_model(tmp_path / "any.gguf"))).vocab, 64
    table = np.zeros((rows, width), dtype=np.float32)
    brain = write_model(tmp_path / "brain.gguf", kind=Kind.BF16, tensors={"token_embd.weight": table})
    assert chosen(GgufFile.open(brain)).element is Element.BF16
    one_layer = write_model(
        tmp_path / "table.gguf", kind=Kind.BF16, layers=1, ffn=32, tensors={"token_embd.weight": table}
    )
    assert chosen(GgufFile.open(one_layer)).element is Element.F16


def test_a_family_that_overflows_half_is_computed_in_bfloat16_whatever_its_file_holds(tmp_path: Path) -> None:
    keys, spec = FILES["gemma3"]
    file = file_of(tmp_path, keys, spec)  # of F32
    assert str(chosen(file)) == "BF16 (gemma3 computes numbers beyond the range of F16)"
    for element in Element:
        assert str(chosen(file, element.value)) == f"{element.name} (as asked for)"


@pytest.mark.parametrize(("dtype", "element"), [("auto", Element.BF16), ("f16", Element.F16)])
def test_a_worker_gives_its_runner_the_element_and_says_which_and_why(
    dtype: str, element: Element, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "model.gguf", kind=Kind.BF16)
    settings = Settings.model_validate({"model": path, "gpu": 0, "dtype": dtype})
    given: dict[str, Any] = {}

    def noted(file: GgufFile, spec: Any, sizes: Any, **options: Any) -> None:
        given.update(options)
        raise InterruptedError

    monkeypatch.setattr(cuda, "CudaRunner", noted)
    with pytest.raises(InterruptedError):
        build_engine(settings, open_model(settings))
    assert given["precision"] == Precision(element, WeightsFormat.AUTO)
    model = load_model(settings)
    model.close()
    why = "as asked for" if dtype == "f16" else "as most of the file's weights are"
    nothing = EngineStats(**dict.fromkeys(EngineStats.__dataclass_fields__, 0))
    assert f"CUDA runner on GPU 0 in {element.name} ({why}), up to" in describe(settings, model, nothing)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"weights": "fp8", "kv": "fp8"},
            "reference runner (NumPy), weights in FP8, keys and values in FP8, up to",
        ),
        ({"weights": "file"}, "reference runner (NumPy), up to"),  # NumPy keeps floats, whatever the file has
    ],
)
def test_a_worker_without_a_gpu_says_what_numpy_rounds(
    asked: dict[str, str], said: str, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model.gguf")
    settings = Settings.model_validate({"model": path, "reference": True, **asked})
    model = load_model(settings)
    model.close()
    nothing = EngineStats(**dict.fromkeys(EngineStats.__dataclass_fields__, 0))
    assert said in describe(settings, model, nothing)
