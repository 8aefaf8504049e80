"""The Dockerfile and compose.yaml name extras, settings, volumes and services that there are."""

import json
import re
import shutil
import tomllib
import urllib.request
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder
from jsonschema.validators import validator_for

from nightmill.jobs.base.settings import PREFIX, Settings
from nightmill.jobs.commands.serve import serve
from nightmill.jobs.server.guards import OPEN_PATHS, is_loopback

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))


def test_compose_obeys_its_specification() -> None:
    schema = json.loads((files("check_jsonschema.builtin_schemas.vendor") / "compose-spec.json").read_text())
    assert [error.message for error in validator_for(schema)(schema).iter_errors(COMPOSE)] == []


def test_the_image_is_installed_with_extras_that_there_are_and_takes_models_by_name() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    chosen = re.findall(r"\bEXTRAS=([\w,]+)", DOCKERFILE)
    assert len(chosen) == 2
    for one in chosen:
        assert set(one.split(",")) <= extras.keys()
        assert {"hub", "server"} <= set(one.split(","))


def test_variables_of_the_containers_are_settings() -> None:
    given = [service.get("environment", {}) for service in COMPOSE["services"].values()]
    names = {name for environment in given for name in environment if name.startswith(PREFIX)}
    names |= set(re.findall(rf"\b({PREFIX}\w+)=", DOCKERFILE))
    assert {name.removeprefix(PREFIX).lower() for name in names} <= Settings.model_fields.keys()
    assert {"NIGHTMILL_MODEL", "NIGHTMILL_DATA_DIR"} <= names


def test_what_is_fetched_outlives_the_container() -> None:
    (cache,) = re.findall(r"XDG_CACHE_HOME=(\S+)", DOCKERFILE)
    assert cache in re.search(r"^VOLUME (.+)$", DOCKERFILE, re.MULTILINE)[1].split()  # type: ignore[index]
    assert re.search(rf"chown nightmill\b.* {cache}$", DOCKERFILE, re.MULTILINE)
    assert f"cache:{cache}" in COMPOSE["services"]["worker"]["volumes"]


def test_the_server_listens_where_its_health_is_asked_for_and_keeps_files_in_a_volume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = COMPOSE["services"]["server"]
    name, *arguments = server["command"]
    options = serve.make_context(name, arguments).params
    assert (
        name == serve.name
        and not is_loopback(options["host"])
        and "NIGHTMILL_API_KEYS" in server["environment"]
    )
    (published,) = server["ports"]
    assert published.endswith(f":{options['port']}") and published.startswith("127.0.0.1:")
    (data,) = re.findall(r"NIGHTMILL_DATA_DIR=(\S+)", DOCKERFILE)
    assert f"files:{data}" in server["volumes"]
    asked: list[str] = []
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: asked.append(url))
    kind, interpreter, flag, program = server["healthcheck"]["test"]
    assert (kind, interpreter, flag) == ("CMD", "python", "-c")
    exec(program)
    assert asked == [f"http://127.0.0.1:{options['port']}/health"] and "/health" in OPEN_PATHS


def test_the_server_reads_models_under_the_workers_paths() -> None:
    """For the tokens of their texts: docs/http.md."""
    mounted = [
        {path for volume in COMPOSE["services"][name]["volumes"] for path in [volume.removesuffix(":ro")]}
        for name in ("worker", "server")
    ]
    assert mounted[0] <= mounted[1]


def test_a_migration_waits_for_a_database_that_takes_connections() -> None:
    """The image first starts a server on a Unix socket, for its own set-up; others come by TCP."""
    services = COMPOSE["services"]
    assert "-h 127.0.0.1" in services["postgres"]["healthcheck"]["test"][1]
    assert services["migrate"]["restart"] == "on-failure"
    assert services["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"


def test_a_users_models_are_no_part_of_the_package(tmp_path: Path) -> None:
    """`models/` is where compose.yaml looks for them."""
    (tmp_path / "src/nightmill").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "src/nightmill/_models").symlink_to("../../models")
    for name in ("nightmill-demo.gguf", "big.gguf", "README.md"):
        (tmp_path / "models" / name).touch()
    packed = {Path(one.path).name for one in WheelBuilder(str(tmp_path)).recurse_included_files()}
    assert packed == {"nightmill-demo.gguf", "README.md"}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert [line for line in ignored if "models" in line] == ["!models/README.md", "!models/nightmill-demo.*"]


def test_services_use_volumes_and_services_that_there_are() -> None:
    for service in COMPOSE["services"].values():
        named = {volume.partition(":")[0] for volume in service.get("volumes", ())}
        assert {name for name in named if name.isidentifier()} <= COMPOSE["volumes"].keys()
        assert set(service.get("depends_on", ())) <= COMPOSE["services"].keys()
