"""A supervisor of workers: starts, restarts, one log, one page of metrics, and the end of all."""

import io
import json
import signal
import sys
import threading
from collections.abc import Callable

import pytest

from nightmill.worker.commands import supervising
from nightmill.worker.commands.supervising import (
    Each,
    MergedMetrics,
    Supervisor,
    commands_of,
    commands_of_models,
)
from tests.support.servers import wait_until

# A worker's stand-in: says its name, and ends as its first argument says once it is told to, or by itself.
WORKER = """
import signal, sys, time
how, name = sys.argv[1:3]
print("hello of", name, flush=True)
if how == "fails":
    sys.exit(7)
if how == "done":
    sys.exit(0)
ends = {signal.SIGTERM: 0, signal.SIGQUIT: 3}
def end(number, frame):
    if number == signal.SIGTERM and how == "slow":
        return print("draining", flush=True)
    if how == "deaf":
        return
    sys.exit(ends[number])
for number in ends:
    signal.signal(number, end)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def worker(how: str, name: str) -> list[str]:
    return [sys.executable, "-c", WORKER, how, name]


class Running:
    """A supervisor on a thread, and its log."""

    def __init__(
        self,
        commands: dict[str, list[str]],
        end_seconds: float = 30.0,
        *,
        as_json: bool = False,
        each: Each = Each.GPU,
    ) -> None:
        self.output = io.BytesIO()
        self.supervisor = Supervisor(commands, end_seconds, as_json=as_json, output=self.output, each=each)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.code = self.supervisor.run()

    @property
    def said(self) -> str:
        return self.output.getvalue().decode()

    def ends(self) -> int | None:
        self._thread.join(240)
        return self.code


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(supervising, "_LONGEST_PAUSE", 0.02)


def test_workers_share_a_log_and_drain_together() -> None:
    running = Running({"0": worker("runs", "a"), "1": worker("runs", "b")})
    wait_until(lambda: running.said.count("ready") == 2)
    assert "[GPU 0] hello of a\n" in running.said and "[GPU 1] hello of b\n" in running.said
    running.supervisor.tell(signal.SIGTERM)
    assert running.ends() == 0


def test_who_fails_is_started_again_and_given_up_in_the_end() -> None:
    running = Running({"0": worker("fails", "a"), "1": worker("runs", "b"), "2": worker("done", "c")})
    wait_until(lambda: running.said.count("hello of a") == 8)
    wait_until(lambda: "ready" in running.said)
    running.supervisor.tell(signal.SIGINT)
    assert running.ends() == 7
    assert running.said.count("hello of b") == running.said.count("hello of c") == 1


@pytest.mark.parametrize(("how", "code"), [("slow", 3), ("deaf", -signal.SIGKILL)])
def test_a_second_signal_ends_at_once_and_who_is_deaf_is_killed(how: str, code: int) -> None:
    running = Running({"0": worker(how, "a")}, end_seconds=30.0 if how == "slow" else 0.3)
    wait_until(lambda: "ready" in running.said)
    running.supervisor.tell(signal.SIGTERM)
    if how == "slow":
        wait_until(lambda: "draining" in running.said)
        assert running.code is None
        running.supervisor.tell(signal.SIGTERM)
    assert running.ends() == code


def test_workers_of_models_are_called_by_these() -> None:
    script = 'print(\'{"message": "ready"}\\nno JSON\')'
    running = Running({"small": [sys.executable, "-c", script]}, as_json=True, each=Each.MODEL)
    assert running.ends() == 0
    first, second = running.said.splitlines()
    assert json.loads(first) == {"model": "small", "message": "ready"} and second == "[small] no JSON"


def test_lines_of_json_say_whose_they_are() -> None:
    script = 'print(\'{"message": "ready", "gpu": "forged"}\\nno JSON\')'
    running = Running({"3": [sys.executable, "-c", script]}, as_json=True)
    assert running.ends() == 0
    first, second = running.said.splitlines()
    assert json.loads(first)["message"] == "ready" and second == "[GPU 3] no JSON"


def test_metrics_of_all_workers_are_one_page() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    page: Callable[[int], str] = (
        '# HELP steps_total Steps.\n# TYPE steps_total counter\nsteps_total{{model="m"}} {0}.0\n'
        "# HELP free Pages.\n# TYPE free gauge\nfree {0}.0\n".format
    )
    registry = CollectorRegistry()
    registry.register(MergedMetrics(lambda: {"0": page(5), "1": page(7)}))  # type: ignore[arg-type]
    lines = generate_latest(registry).decode().splitlines()
    assert lines.count("# TYPE steps_total counter") == lines.count("# TYPE free gauge") == 1
    assert {line for line in lines if not line.startswith("#")} == {
        'steps_total{gpu="0",model="m"} 5.0', 'steps_total{gpu="1",model="m"} 7.0',
        'free{gpu="0"} 5.0', 'free{gpu="1"} 7.0',
    }  # fmt: skip
    (free,) = (
        one for one in MergedMetrics(lambda: {"m": page(5)}, Each.MODEL).collect() if one.name == "free"
    )
    assert [sample.labels for sample in free.samples] == [{"model": "m"}]


def test_each_worker_has_its_gpu_and_its_port() -> None:
    command = ["python", "nightmill", "worker", "--gpu", "all", "--metrics-port=9464", "--metrics-host", "h"]
    made = commands_of(command, [0, 2], 9464)
    assert list(made) == ["0", "2"]
    rest = ["python", "nightmill", "worker"]
    assert made["0"] == [*rest, "--gpu", "0", "--metrics-port", "9465", "--metrics-host", "127.0.0.1"]
    assert made["2"] == [*rest, "--gpu", "2", "--metrics-port", "9466", "--metrics-host", "127.0.0.1"]
    assert commands_of(command[:5], [1], None) == {"1": [*rest, "--gpu", "1"]}


def test_each_model_has_its_worker_with_its_memory_and_its_port() -> None:
    command = [
        "python",
        "nightmill",
        "worker",
        "--models",
        "a.gguf,b=b.gguf",
        "--together",
        "--gpu-memory=0.9",
    ]
    rest = ["python", "nightmill", "worker", "--together"]
    models, group = {"a": "a.gguf", "b": "b.gguf"}, {"--group": "g", "--ledger": "9"}
    made = commands_of_models(command, models, {"a": 5_000_000, "b": 7_000_000}, group, 9464)
    shared, metrics = ["--group", "g", "--ledger", "9"], ["--metrics-host", "127.0.0.1"]
    assert made == {
        "a": [*rest, "--models", "a=a.gguf", "--turn", "a", *shared, "--metrics-port", "9465", *metrics,
              "--gpu-memory", "5000000"],
        "b": [*rest, "--models", "b=b.gguf", "--turn", "b", *shared, "--metrics-port", "9466", *metrics,
              "--gpu-memory", "7000000"],
    }  # fmt: skip
    made = commands_of_models(command[:5], models, {}, group, None)  # without a GPU
    assert made["b"] == [*rest[:3], "--models", "b=b.gguf", "--turn", "b", *shared]
