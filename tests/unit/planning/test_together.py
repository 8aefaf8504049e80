"""Models on one GPU at once: what each needs and gets, what would fit, and what commands say of it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import RunnerError, SettingsError
from nightmill.worker.assembly.forecast import CARDS, GIB, card_of
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.assembly.together import ENGINE_BYTES, Fit, Planned, share_out
from nightmill.worker.runners.gpu.device.known_cards import KNOWN_CARDS
from nightmill.worker.runners.gpu.memory import allowed
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.service.turns.turning import named_models
from tests.support.ggufs import write_model
from tests.unit.worker.test_recommended_models import AUTO, in_q8_0

CARD = CARDS[1]  # 24 GB


def fitted(*sizes: str, **changes: object) -> Fit:
    models = {size: Planned(in_q8_0(size), AUTO) for size in sizes}
    return share_out(models, CARD, Settings().model_copy(update=changes))


def test_two_models_share_a_card_so_that_their_caches_grow_alike() -> None:
    fit = fitted("1.5B", "7B")
    assert fit.fits and fit.would_fit == ("1.5B", "7B")
    budget = allowed(CARD.free, 0.9) - ENGINE_BYTES
    assert fit.budget == budget >= sum(share.bytes for share in fit.shares.values()) > budget - GIB // 64
    needs = {name: (need or 0) / GIB for name, need in fit.needs.items()}
    # 1.6 and 7.5 GiB of weights as in the file, 0.9 and 1.75 of cache for 32,768 tokens, and workspace.
    assert needs == pytest.approx({"1.5B": 3.1, "7B": 10.4}, abs=0.1)
    small, large = (fit.shares[name].forecast for name in ("1.5B", "7B"))
    assert {small.weights_in, large.weights_in} == {"file"}
    assert small.cache_tokens == pytest.approx(large.cache_tokens, rel=0.03)
    assert small.sequences[32_768] == large.sequences[32_768] == 3


def test_what_does_not_fit_is_refused_with_figures_and_with_what_would() -> None:
    fit = fitted("1.5B", "7B", "14B")
    assert not fit.fits and fit.needs["14B"] is None
    assert fit.refusal == (
        "--together: the models do not fit a card of 24 GB, 22.8 GiB free at once: "
        "1.5B needs 3.1 GiB, 7B needs 10.4 GiB, 14B needs more than 18.5 GiB, "
        "and --gpu-memory 0.9 leaves 18.5 GiB for 3 engines. 1.5B and 7B would fit together (13.6 GiB). "
        "Name fewer models; leave out --together, so that they are loaded in turn; or lower --context or "
        "--max-sequences"
    )
    alone = fitted("1.5B", "7B", context=2048, gpu_memory=4 * GIB)
    assert alone.would_fit == ("1.5B",) and "1.5B alone would fit" in alone.refusal
    assert "None of them fits alone" in fitted("7B", gpu_memory=GIB).refusal


def test_what_no_card_would_take_is_said_as_it_is() -> None:
    with pytest.raises(SettingsError, match="--context 40000 is more than the 32768 tokens"):
        fitted("1.5B", context=40_000)
    rounded, ampere = Precision(weights=WeightsFormat.FP8), card_of(KNOWN_CARDS["rtx3090"])
    with pytest.raises(RunnerError, match=r"^7B: .*FP8"):
        share_out({"7B": Planned(in_q8_0("7B"), rounded)}, ampere, Settings())


def test_check_and_plan_say_before_the_night_whether_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTMILL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("NIGHTMILL_PRETEND_DEVICE", "rtx4060")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "model": "demo"}\n{"prompt": "b", "model": "other"}\n')
    models = ["--models", f"demo={demo_model()},{write_model(tmp_path / 'other.gguf')}", "--together"]
    memory = ["--gpu-memory", "1500MB"]
    done = CliRunner().invoke(main, ["plan", str(rows), *models, *memory, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    (fit,) = told["together"]
    assert (
        fit["fits"] and set(fit["shares"]) == {"demo", "other"} and told["loads"] == {"demo": 1, "other": 1}
    )
    assert sum(share["bytes"] for share in fit["shares"].values()) <= 1_500_000_000 - ENGINE_BYTES
    refused = CliRunner().invoke(main, ["plan", str(rows), *models, "--gpu-memory", "1100MB"])
    assert refused.exit_code == 1 and "together       --together: the models do not fit" in refused.stdout
    found = CliRunner().invoke(main, ["check", *models, "--json"])
    (finding,) = (one for one in json.loads(found.stdout) if one["part"] == "together")
    assert finding["ok"] and finding["fits"] and "all fit NVIDIA GeForce RTX 4060" in finding["found"]
    for command in (["check", *models[:2]], ["check", models[2]], ["plan", str(rows), models[2]]):
        assert CliRunner().invoke(main, command).exit_code == 1, command


def test_names_of_models_are_those_of_their_files() -> None:
    assert named_models(Settings(models="a=x.gguf,b=y.gguf")) == {"a": "x.gguf", "b": "y.gguf"}
