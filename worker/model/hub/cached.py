"""Models of the Hub on this machine: read from the cache that all programs share; no server is asked."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from nightmill.jobs.errors import ModelFetchError
from nightmill.worker.model.hub.choice import choose, is_model, parts_of, quant_of
from nightmill.worker.model.hub.names import HubName

_REPO = "models--"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache."""

    name: str
    """The name that `--model` takes for it."""
    files: tuple[Path, ...]
    """Its parts, in order."""

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(file.stat().st_size for file in self.files)


def cached_files(repo: str, revision: str) -> dict[str, Path]:
    """GGUF files of a repository by their names: of `revision`, and what only older downloads have."""
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")
    reference = folder / "refs" / revision
    current = reference.read_text().strip() if reference.is_file() else revision
    snapshots = sorted(
        (snapshot for snapshot in folder.glob("snapshots/*") if snapshot.is_dir()),
        key=lambda snapshot: (snapshot.name == current, snapshot.stat().st_mtime),
        reverse=True,
    )
    found: dict[str, Path] = {}
    for snapshot in snapshots:
        for path in sorted(snapshot.rglob("*.gguf")):
            if path.is_file():  # not a link to what was removed
                found.setdefault(path.relative_to(snapshot).as_posix(), path)
    return found


def cached_models() -> Iterator[CachedModel]:
    """Whole models, by name; those that came from a URL last, by their paths."""
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob(f"{_REPO}*")):
        repo = folder.name.removeprefix(_REPO).replace("--", "/")
        files = cached_files(repo, "main")
        whole: dict[str, tuple[str, ...]] = {}
        for file in sorted(filter(is_model, files)):
            with suppress(ModelFetchError):  # not all of its parts are here yet
                whole[file] = parts_of(file, files)
        known = [part for parts in whole.values() for part in parts]
        for file, parts in whole.items():
            yield CachedModel(_shortest_name(repo, file, known), tuple(files[part] for part in parts))
    for path in sorted(Path(constants.HF_ASSETS_CACHE).glob("nightmill/urls/*/*.gguf")):
        yield CachedModel(str(path), (path,))


def _shortest_name(repo: str, file: str, files: list[str]) -> str:
    quant = quant_of(file)
    by_quant = HubName(repo, quant)
    if quant is not None and choose(by_quant, files)[0] == file:
        return str(by_quant)
    return str(HubName(repo, file=file))
