"""Environments of client libraries, below `.venv/clients`: made once, and again when their ranges change."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.clients.catalogue import ENVIRONMENTS, NODE_ENVIRONMENTS, ClientLibrary
from tests.support.pages import ROOT

CLIENTS_FOLDER = ROOT / ".venv" / "clients"
SCRIPTS = Path(__file__).parent / "scripts"
_STAMP = "installed-requirements.txt"
_INSTALL_SECONDS = 900
# The index either answers soon or is not there: nobody waits for minutes to learn that.
_PIP = ("--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "15")


class NotInstalledError(Exception):
    """A client library cannot be installed here; the message ends with the installer's own words."""


def environment_folder(name: str, *, install: bool = True) -> Path:
    """Return the folder of an environment, with its packages in it; NotInstalledError if that cannot be.

    install  make it if it is not there, which takes minutes
    """
    folder = CLIENTS_FOLDER / name
    wanted = "\n".join((ENVIRONMENTS | NODE_ENVIRONMENTS)[name])
    stamp = folder / _STAMP
    if not stamp.exists() or stamp.read_text() != wanted:
        if not install:
            raise NotInstalledError(f"{folder} is not there: `make clients` makes it")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        install = _install_node if name in NODE_ENVIRONMENTS else _install_python
        install(folder, wanted.split("\n"))
        stamp.write_text(wanted)
    return folder


def _install_python(folder: Path, requirements: list[str]) -> None:
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = str(folder / "bin" / "python")
    _run([sys.executable, "-m", "pip", "--python", python, "install", *_PIP, *requirements])


def _install_node(folder: Path, requirements: list[str]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstalledError("npm is not there")
    _run([npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", *requirements])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False, env=_environment()
        )
    except subprocess.TimeoutExpired as error:
        raise NotInstalledError(f"{' '.join(command)}: no end after {_INSTALL_SECONDS} s") from error
    if done.returncode:
        raise NotInstalledError(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-2000:]}")


def _environment() -> dict[str, str]:
    """Without what would lead the interpreter of another environment back into ours."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def command_for(client: ClientLibrary, folder: Path) -> list[str]:
    """The command that runs a client's cases in its own interpreter."""
    script = SCRIPTS / client.script
    if not client.needs_node:
        return [str(folder / "bin" / "python"), str(script)]
    # Node.js looks for packages beside the script that imports them.
    beside = folder / script.name
    shutil.copy(script, beside)
    return ["node", str(beside)]


def version_of(client: ClientLibrary, folder: Path) -> str:
    """The installed version of the library."""
    if client.needs_node:
        package = json.loads((folder / "node_modules" / client.distribution / "package.json").read_text())
        return str(package["version"])
    program = f"from importlib.metadata import version; print(version({client.distribution!r}))"
    command = [str(folder / "bin" / "python"), "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
