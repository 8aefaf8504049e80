"""`nightmill plan` on the bundled model: exit codes, JSON, and the workers it counts on."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import RunnerError
from nightmill.jobs.sql.claims import Claims
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.plan import live_workers
from nightmill.worker.runners.gpu.device.known_cards import KNOWN_CARDS
from tests.support.servers import Clock
from tests.unit.formats.files import chat, write_lines

pytestmark = pytest.mark.heavy

Plan = Callable[..., Result]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Runs `nightmill plan ARGUMENTS` with the bundled model on the reference runner."""

    def invoke(*arguments: str) -> Result:
        env = {"NIGHTMILL_DATA_DIR": str(tmp_path / "data"), "NIGHTMILL_MODEL": str(demo_model())}
        return CliRunner().invoke(main, ["plan", *arguments, "--reference"], env=env)

    return invoke


def haiku(count: int, **body: object) -> list[object]:
    """Rows that the bundled model answers."""
    return [
        chat(
            f"r{n}",
            messages=[{"role": "user", "content": f"Write a haiku about rain that contains the word w{n}"}],
            max_tokens=24,
            **body,
        )
        for n in range(count)
    ]


def test_good_rows_that_fit_end_with_zero(plan: Plan, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", haiku(40))
    done = plan(str(path), "--deadline", "8h", "--max-sequences", "8", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["rows"], told["good"], told["bad"]) == (40, 40, [])
    assert told["model"] == "nightmill-demo"
    assert told["prompt_tokens"] > 40 * 10
    assert 40 < told["output_tokens"] <= told["output_tokens_at_most"] == 40 * 24
    assert told["estimate"]["fits"] is True
    assert told["estimate"]["rows_at_once"] == 8
    assert told["estimate"]["seconds"] > 0


def test_bad_rows_end_with_three(plan: Plan, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [*haiku(3), chat("bad", best_of=2), b"{"])
    done = plan(str(path), "--no-measure")
    assert done.exit_code == 3, done.output
    assert "5 rows (openai), 3 good, 2 bad" in done.output
    assert "line 4 'bad': body.best_of: 2 is more than n" in done.output
    assert "line 5: is not JSON" in done.output
    assert "no estimate" in done.output


def test_a_row_that_no_context_of_this_model_holds_gets_no_advice_to_make_it_longer(
    plan: Plan, tmp_path: Path
) -> None:
    long = chat("long", messages=[{"role": "user", "content": "rain and snow " * 2000}])
    path = write_lines(tmp_path / "in.jsonl", [long])
    for measuring in (["--no-measure"], []):
        done = plan(str(path), "--context", "64", *measuring, "--json")
        (bad,) = json.loads(done.stdout)["bad"]
        assert "shorten it, the model itself was made for " in bad["message"]
        assert "--context" not in bad["message"]


def test_too_few_rows_for_an_estimate_are_said_to_be(plan: Plan, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", haiku(1))
    done = plan(str(path), "--deadline", "8h")
    assert done.exit_code == 0, done.output
    assert "no estimate: too few rows to measure a speed with" in done.output


def test_rows_that_do_not_fit_end_with_four(plan: Plan, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [*haiku(40), b"{"])
    done = plan(str(path), "--at", "2031-01-01T01:00Z", "--deadline", "2031-01-01T01:00:00.001Z")
    assert done.exit_code == 4, done.output
    assert "DOES NOT FIT" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.jsonl"], "none.jsonl: there is no such file"),
        (["{}", "--deadline", "six"], "--deadline: 'six' is not a time"),
        (["{}", "--deadline", "6h", "--no-measure"], "leave out --no-measure"),
        (["{}", "--max-tokens", "0"], "max_tokens: "),
        (["{}", "--model", "none.gguf"], "none.gguf"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_one(
    plan: Plan, tmp_path: Path, arguments: list[str], said: str
) -> None:
    path = str(write_lines(tmp_path / "in.jsonl", haiku(1)))
    done = plan(*(argument.replace("{}", path) for argument in arguments))
    assert done.exit_code == 1
    assert said in done.output
    assert len(done.output.strip().splitlines()) == 1
    assert "Traceback" not in done.output


def test_rows_over_the_context_are_bad(plan: Plan, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "in.jsonl",
        [*haiku(1), chat("long", messages=[{"role": "user", "content": "word " * 600}])],
    )
    done = plan(str(path), "--no-measure", "--json")
    (bad,) = json.loads(done.stdout)["bad"]
    assert (bad["line"], bad["custom_id"], bad["code"]) == (2, "long", "over_context")
    assert "this worker's context holds 512" in bad["message"]


def test_workers_that_serve_the_model_and_live_are_counted(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    clock = Clock()
    with Client(settings, clock=clock) as client:
        assert live_workers(client, "demo") == 1
        for name, model in (("a", "demo"), ("b", "demo"), ("c", "other")):
            Claims(client.database, name * 32).register("host", 1, model, None)
        assert live_workers(client, "demo") == 2
        clock.advance(settings.stale_seconds + 1)
        assert live_workers(client, "demo") == 1


def test_without_a_database_one_worker_is_assumed(tmp_path: Path) -> None:
    url = "postgresql://nobody@127.0.0.1:1/none"
    with Client(Settings(data_dir=tmp_path, database_url=url)) as client:
        assert live_workers(client, "demo") == 1


def test_where_the_runner_fails_the_way_around_it_is_named(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RunnerError("no memory is left")

    monkeypatch.setattr("nightmill.worker.assembly.engine.build_engine", fail)
    done = plan(str(write_lines(tmp_path / "in.jsonl", haiku(1))))
    assert done.exit_code == 1
    assert "the speed cannot be measured (--no-measure plans without): no memory is left" in done.output


def test_a_card_that_is_not_there_is_planned_for_and_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    path = str(write_lines(tmp_path / "in.jsonl", haiku(1)))
    env = {"NIGHTMILL_DATA_DIR": str(tmp_path / "data"), "NIGHTMILL_MODEL": str(demo_model())}

    def planned(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["plan", path, "--pretend", *arguments], env=env)

    told = {key: json.loads(planned(key, "--no-measure", "--json").stdout) for key in ("rtx4060", "h200")}
    assert [told[key]["card"] for key in told] == [KNOWN_CARDS[key].name for key in told]
    small, large = (told[key]["memory"] for key in told)
    assert small["rate"] < large["rate"] and small["workspace"] < large["workspace"]
    assert "memory         of NVIDIA L4: 0.0" in planned("l4", "--no-measure").output
    measured = planned("l4")
    assert measured.exit_code == 1 and "no GPU that could be taken for NVIDIA L4" in measured.output
    assert "nightmill plan --no-measure" in measured.output
    refused = planned("rtx3090", "--no-measure", "--weights", "fp8")
    assert refused.exit_code == 1 and "NVIDIA GeForce RTX 3090: FP8 weights need" in refused.output
    with_numpy = planned("l4", "--no-measure", "--reference", "--json")
    assert json.loads(with_numpy.stdout)["card"] is None, "which is asked for by name"


def test_without_a_model_rows_are_checked_all_the_same(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "in.jsonl", [chat("a", model="m"), chat("a"), {"custom_id": "b", "prompt": "p"}]
    )
    env = {"NIGHTMILL_DATA_DIR": str(tmp_path / "data")}
    done = CliRunner().invoke(main, ["plan", str(path)], env=env)
    assert done.exit_code == 3, done.output
    assert "3 rows (openai), 1 good, 2 bad" in done.stdout
    assert "line 2 'a': custom_id: 'a' is also that of row 1" in done.stdout
    assert "line 3 'b': prompt: is a key of plain rows" in done.stdout
    assert "note: 1 row ask for model 'm'" in done.stdout and "give --model FILE" in done.stdout
    as_json = json.loads(CliRunner().invoke(main, ["plan", str(path), "--json"], env=env).stdout)
    assert (as_json["model"], as_json["good"], [row["line"] for row in as_json["bad"]]) == (None, 1, [2, 3])
    good = write_lines(tmp_path / "good.jsonl", [chat("a")])
    assert CliRunner().invoke(main, ["plan", str(good)], env=env).exit_code == 0
    late = CliRunner().invoke(main, ["plan", str(good), "--deadline", "8h"], env=env)
    assert late.exit_code == 1 and "give --model FILE" in late.stderr


def test_of_several_models_in_turn_the_loads_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "model": model} for model in ["big", "one", "big", "far"]] + [{"prompt": "any"}]
    path = write_lines(tmp_path / "in.jsonl", rows)
    models = "one.gguf,big=two.gguf,three.gguf"
    done = CliRunner().invoke(main, ["plan", str(path), "--models", models])
    assert done.exit_code == 0, done.output
    assert "loads          2: one for 2 rows, big for 2 rows\n" in done.stdout
    assert "note: 1 row ask for model 'far', which is not in the list" in done.stdout
    told = json.loads(CliRunner().invoke(main, ["plan", str(path), "--models", models, "--json"]).stdout)
    assert (told["loads"], told["rows_for_other_models"]) == ({"one": 2, "big": 2}, {"far": 1})
    write_lines(path, [{"prompt": "any"}])
    told = json.loads(CliRunner().invoke(main, ["plan", str(path), "--models", models, "--json"]).stdout)
    assert told["loads"] == {"one": 1}
