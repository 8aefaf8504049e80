"""A small Hub in place of the real one, with an empty cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from nightmill.worker.model.hub import transfer
from tests.support.small_hub import SmallHub, serving


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache."""
    for name in ("HF_HUB_CACHE", "HF_ASSETS_CACHE"):
        monkeypatch.setattr(constants, name, str(tmp_path / name))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "HF_HUB_CACHE"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    """A Hub with one repository of small files, on which nobody waits long."""
    monkeypatch.setattr(transfer, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(transfer, "_WAIT", 0.05)
    monkeypatch.setattr(transfer, "_CHUNK", 1000)
    files = {
        "README.md": b"about",
        "mmproj-F16.gguf": b"a vision tower",
        "model-Q8_0.gguf": bytes(range(256)) * 40,
        "model-Q4_K_M.gguf": bytes(reversed(range(256))) * 40,
    }
    with serving(SmallHub(repos={"owner/repo": files})) as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield found
