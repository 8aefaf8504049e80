"""Names of models wherever a path is taken: pull, models, check, plan and the settings that a worker gets."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
from click.testing import CliRunner
from rich.console import Console

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.commands.main import main
from nightmill.jobs.commands.terminal import LiveLine, ProgressLine
from nightmill.jobs.errors import MissingExtraError
from nightmill.worker.assembly import fetching
from nightmill.worker.assembly.fetching import FetchProgress, with_model_file
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.model.hub.transfer import Progress
from tests.support.small_hub import SmallHub, serving
from tests.unit.formats.files import write_lines
from tests.unit.runners.recorded_cuda import RecordedDriver

pytestmark = pytest.mark.heavy

NAME = "hf:owner/demo:q8_0"


@pytest.fixture
def demo_hub(hub: SmallHub) -> SmallHub:
    """A Hub with a real model."""
    hub.repos["owner/demo"] = {"demo-Q8_0.gguf": demo_model().read_bytes(), "demo-Q4_0.gguf": b"no model"}
    return hub


@pytest.fixture
def env(tmp_path: Path, broker_url: str) -> dict[str, str]:
    """Of commands that run in this process, in which a Redis of their own would outlive the test."""
    return {"NIGHTMILL_DATA_DIR": str(tmp_path / "data"), "NIGHTMILL_BROKER_URL": broker_url}


def test_a_setting_may_be_a_path_or_a_name() -> None:
    def model(value: str) -> object:
        return Settings.from_env({"NIGHTMILL_MODEL": value}).model

    assert model("a/b.gguf") == Path("a/b.gguf")
    assert model("hf:o/r") == "hf:o/r"
    assert model("https://example.org//a.gguf") == "https://example.org//a.gguf"


def test_pull_prints_the_path_and_models_what_it_is(demo_hub: SmallHub, env: dict[str, str]) -> None:
    run = CliRunner().invoke
    assert "no model is in the cache" in run(main, ["models"], env=env).output
    pulled = run(main, ["pull", NAME, "--json"], env=env)
    assert pulled.exit_code == 0, pulled.output
    (path,) = json.loads(pulled.stdout)["files"]
    assert Path(path).read_bytes() == demo_model().read_bytes()
    assert run(main, ["pull", "hf:owner/demo:q4_0"], env=env).exit_code == 0

    listed = run(main, ["models", "--json"], env=env)
    broken, found = [json.loads(line) for line in listed.stdout.splitlines()]
    assert (found["name"], found["files"], found["size"]) == (
        "hf:owner/demo:Q8_0",
        [path],
        demo_model().stat().st_size,
    )
    assert (found["family"], found["context"], found["problem"]) == ("qwen2", 512, None)
    assert broken["name"] == "hf:owner/demo:Q4_0" and "is not a GGUF file" in broken["problem"]
    heading, first, second = run(main, ["models"], env=env).output.splitlines()
    assert heading.split() == ["model", "size", "family", "quantisation", "fits", "the", "GPU"]
    assert first.startswith("hf:owner/demo:Q4_0") and "no: is not a GGUF file" in first
    assert second.startswith("hf:owner/demo:Q8_0")


def test_what_a_hub_calls_its_files_does_not_steer_a_terminal(hub: SmallHub, env: dict[str, str]) -> None:
    hub.repos["owner/repo"] = {"see [x]\x1b[2J\u202e.gguf": b"no model"}
    for command in (["pull", "hf:owner/repo"], ["models"], ["check", "--model", "hf:owner/repo"]):
        done = CliRunner().invoke(main, command, env=env)
        assert "see [x]\\x1b[2J\\u202e.gguf" in done.output
        assert all(line.isprintable() for line in done.output.splitlines())


def test_check_and_plan_take_a_name(demo_hub: SmallHub, env: dict[str, str], tmp_path: Path) -> None:
    checked = CliRunner().invoke(main, ["check", "--model", NAME], env=env)
    assert "demo-Q8_0: qwen2" in checked.output
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "hello"}])
    planned = CliRunner().invoke(
        main, ["plan", str(path), "--model", NAME, "--no-measure", "--json"], env=env
    )
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["model"] == "demo-Q8_0"
    refused = CliRunner().invoke(main, ["plan", str(path), "--model", f"{NAME}_K", "--no-measure"], env=env)
    assert refused.exit_code == 1
    assert "owner/demo has no q8_0_K; there are Q8_0, Q4_0" in refused.output


def test_the_environment_of_the_hub_is_obeyed(tmp_path: Path) -> None:
    """In a process of its own, since huggingface_hub reads it once; with what a log gets."""
    with serving(SmallHub(repos={"o/r": {"m.gguf": b"content"}}, token="secret")) as hub:
        env = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": "secret",
        }

        def pull(**more: str) -> "subprocess.CompletedProcess[str]":
            command = [sys.executable, "-P", "-m", "nightmill", "pull", "hf:o/r"]
            return subprocess.run(command, env=env | more, capture_output=True, text=True, timeout=120)

        first = pull()
        assert first.returncode == 0, first.stderr
        assert Path(first.stdout.strip()).read_bytes() == b"content"
        assert first.stdout.startswith(str(tmp_path / "home" / "hub"))
        assert [line[9:] for line in first.stderr.splitlines()] == [
            "fetching hf:o/r: asking the Hub",
            "fetching o/r/m.gguf: 0 of 0 MB",
            "fetching o/r/m.gguf: 0 of 0 MB, checking its sha256",
        ]
        hub.asked.clear()
        assert pull(HF_HUB_OFFLINE="1").stdout == first.stdout
        assert not hub.asked
        assert "this token may not see it" in pull(HF_TOKEN="other", HF_HOME=str(tmp_path / "new")).stderr


def test_a_worker_gets_a_path_in_place_of_a_name(
    demo_hub: SmallHub, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = with_model_file(Settings(model=NAME))
    assert isinstance(settings.model, Path) and settings.model.name == "demo-Q8_0.gguf"
    assert with_model_file(settings) is settings
    assert "fetching owner/demo/demo-Q8_0.gguf: " in capsys.readouterr().err


def test_without_the_extra_a_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"hf:o/r needs huggingface_hub: pip install .*\[hub\]"):
        with_model_file(Settings(model="hf:o/r"))
    with_model_file(Settings(model="a.gguf"))


def test_a_log_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr(fetching.time, "monotonic", lambda: now[0])
    with FetchProgress() as progress:
        for second in range(100):
            now[0] += 1
            progress.show(Progress("o/r/m\x1b.gguf", second * 10**7, 10**9))
    said = [line[9:] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "fetching o/r/m\\x1b.gguf: 290 of 1,000 MB, 10.0 MB/s",
        "fetching o/r/m\\x1b.gguf: 590 of 1,000 MB, 10.0 MB/s",
        "fetching o/r/m\\x1b.gguf: 890 of 1,000 MB, 10.0 MB/s",
    ]


def test_a_terminal_gets_a_bar_and_no_lines() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=110)
    live = LiveLine(ProgressLine(name="model"), console=screen)
    with FetchProgress(live=live) as progress:
        progress.show(Progress("o/r/m.gguf", 5 * 10**8, 10**9))
    said = cast(io.StringIO, screen.file).getvalue()
    assert "o/r/m.gguf" in said and "500 of 1,000 MB" in said and "━" in said
    assert "fetching" not in said


@pytest.mark.parametrize(
    ("free", "tokens", "said"),
    [
        (
            16 << 30,
            2048 * 512,
            "yes: 0.0 GiB of weights in 16 bits, a cache of 1,048,576 tokens, for 2,048 sequences of ",
        ),
        (1 << 20, 0, "no: the model does not fit: weights 6,466,560 bytes"),
    ],
)
def test_a_model_fits_the_memory_that_the_gpu_has_free(
    demo_hub: SmallHub,
    env: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    tokens: int,
    said: str,
) -> None:
    driver = RecordedDriver((8, 0))
    driver.install(monkeypatch)
    monkeypatch.setattr(sys.modules["pycuda.driver"], "mem_get_info", lambda: (free, 24 << 30))
    with_model_file(Settings(model=NAME), show=False)
    (found,) = CliRunner().invoke(main, ["models", "--json"], env=env).stdout.splitlines()
    assert json.loads(found)["cache_tokens"] == tokens
    assert said in CliRunner().invoke(main, ["models", "--gpu", "0"], env=env).stdout
