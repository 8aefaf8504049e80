"""Runs the cases of a client in its own interpreter, and collects what they report."""

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients.catalogue import ClientLibrary
from tests.clients.environments import command_for, version_of
from tests.clients.service import KEY, Service
from tests.support.servers import clean_environment

SCRIPT_SECONDS = 1200


@dataclass(frozen=True)
class CaseResult:
    """How one case went with one model; `error` is empty if it passed."""

    case: str
    model: str
    error: str

    @property
    def passed(self) -> bool:
        """True if the client got what it asked for."""
        return not self.error


@dataclass(frozen=True)
class ClientResult:
    """All cases of one client, with all models."""

    client: ClientLibrary
    version: str
    cases: tuple[CaseResult, ...]

    @property
    def failed(self) -> tuple[CaseResult, ...]:
        """The cases that did not pass."""
        return tuple(case for case in self.cases if not case.passed)


def run_client(
    client: ClientLibrary, folder: Path, services: Sequence[Service], scratch: Path, only: Iterable[str] = ()
) -> ClientResult:
    """Run a client's script once for each server. `only` names cases; all without."""
    cases = [case for service in services for case in _run_script(client, folder, service, scratch, only)]
    return ClientResult(client, version_of(client, folder), tuple(cases))


def _run_script(
    client: ClientLibrary, folder: Path, service: Service, scratch: Path, only: Iterable[str]
) -> list[CaseResult]:
    home = scratch / f"{client.name}-{service.model}".replace(" ", "-")
    home.mkdir(parents=True)
    environment = clean_environment() | {
        "CLIENTS_URL": service.url,
        "CLIENTS_MODEL": service.model,
        "CLIENTS_KEY": KEY,
        "CLIENTS_FOLDER": str(home),  # with what a client may want to read, such as a tokenizer
        "CLIENTS_MODEL_FOLDER": str(service.folder),
        "CLIENTS_ONLY": " ".join(only),
        "HOME": str(home),  # caches and settings of a person stay outside
        "PYTHONDONTWRITEBYTECODE": "",
    }
    for name in ("PYTHONPATH", "VIRTUAL_ENV", *(name for name in os.environ if name.endswith("_API_KEY"))):
        environment.pop(name, None)
    log = home / "stderr.log"
    with log.open("w") as errors:
        done = subprocess.run(
            command_for(client, folder),
            cwd=home,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=SCRIPT_SECONDS,
            check=False,
        )
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    cases = [CaseResult(report["case"], service.model, report["error"]) for report in reports]
    if done.returncode or '{"end"' not in done.stdout or not cases:  # a script without cases has not passed
        last = log.read_text().strip().splitlines()[-1:]
        cases.append(CaseResult("the_script_itself", service.model, f"exit {done.returncode}: {last}"))
    return cases


def table(results: Sequence[ClientResult]) -> str:
    """A line for each client: version, cases, how many passed; below, what failed and how."""
    rows = [("client", "version", "cases", "passed")]
    rows += [
        (one.client.name, one.version, str(len(one.cases)), str(len(one.cases) - len(one.failed)))
        for one in results
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}"
        for row in rows
    ]
    lines += [
        f"FAILED {one.client.name}: {case.case} with {case.model}: {case.error}"
        for one in results
        for case in one.failed
    ]
    return "\n".join(lines)
