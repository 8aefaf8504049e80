"""From a model's name to a file on this machine: what the Hub has, what the cache has, and their errors."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import (
    HfApi,
    cached_assets_path,
    constants,
    get_hf_file_metadata,
    get_token,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
from huggingface_hub.utils import logging as hub_logging

from nightmill.jobs.errors import ModelFetchError
from nightmill.worker.model.hub.cached import cached_files
from nightmill.worker.model.hub.choice import choose
from nightmill.worker.model.hub.names import FileUrl, HubName, parse_name
from nightmill.worker.model.hub.transfer import Progress, Report, Source, require_space, transfer

_SHA256 = re.compile("[0-9a-f]{64}")
_PLAIN = re.compile("[0-9A-Za-z_-]{1,128}")  # an identifier that becomes the name of a file here
_HEAD_REFUSED = (403, 405, 501)  # a signed URL for GET alone, a server without HEAD


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model's files on this machine, the first part of a split one first, and what a person should know."""

    files: tuple[Path, ...]
    note: str = ""


def fetch(text: str, report: Report) -> Fetched:
    """The model that `text` names, fetched unless it is in the cache.

    Asks the Hub for what is there now; where that fails, what the cache has does as well. Raises
    ModelFetchError with what to do about it.
    """
    hub_logging.set_verbosity_error()  # what it would print is said by `report` and by our errors
    name = parse_name(text, _hub_hosts())
    with _errors(name):
        if isinstance(name, FileUrl):
            return Fetched((_fetch_url(name, report),))
        return _fetch_from_hub(name, report)


def _fetch_from_hub(name: HubName, report: Report) -> Fetched:
    report(Progress(str(name), 0, None, "asking the Hub"))
    wanted: tuple[str, ...] = ()
    try:
        info = HfApi().model_info(name.repo, revision=name.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        wanted = choose(name, [sibling.rfilename for sibling in info.siblings or ()])
        found = [_look_up(name, file) for file in wanted]
        missing = [(one.source, one.partial) for one in found if not one.here]
        require_space(str(name), missing, Path(constants.HF_HUB_CACHE))
        return Fetched(tuple(_fetch_file(name, one, report) for one in found))
    except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
        return _from_cache(name, wanted, error)


def _from_cache(name: HubName, wanted: tuple[str, ...], error: Exception) -> Fetched:
    """Return files fetched earlier, after `error`: those `wanted`, or what `name` means among all cached.

    Raises `error` if they are not in the cache.
    """
    files = cached_files(name.repo, name.revision)
    offline = isinstance(error, OfflineModeIsEnabled)
    try:
        wanted = wanted or choose(name, sorted(files))
    except ModelFetchError:
        if files and offline:  # this was asked of the cache, which has others
            raise
    if not wanted or not files.keys() >= set(wanted):
        raise error
    note = "" if offline else f"{_said(name, error)}. The copy in the cache is used"
    return Fetched(tuple(files[file] for file in wanted), note)


@dataclass(frozen=True, slots=True)
class _HubFile:
    """A file of a repository, and where its content goes."""

    file: str
    source: Source
    blob: Path
    lock: Path
    known: bool  # the cache has it under its name

    @property
    def partial(self) -> Path:
        return self.blob.with_name(f"{self.blob.name}.incomplete")

    @property
    def here(self) -> bool:
        return self.known or self.blob.exists()


def _look_up(name: HubName, file: str) -> _HubFile:
    url = hf_hub_url(name.repo, file, revision=name.revision)
    metadata = get_hf_file_metadata(url)
    commit, etag = metadata.commit_hash or "", metadata.etag or ""
    if not (_PLAIN.fullmatch(commit) and _PLAIN.fullmatch(etag)):
        raise FileMetadataError
    folder = repo_folder_name(repo_id=name.repo, repo_type="model")
    cache = Path(constants.HF_HUB_CACHE)
    sha256 = etag if _SHA256.fullmatch(etag) else None
    return _HubFile(
        file,
        Source(url, f"{name.repo}/{file}", metadata.size, sha256, build_hf_headers()),
        blob=cache / folder / "blobs" / etag,
        lock=cache / ".locks" / folder / f"{etag}.lock",
        known=isinstance(try_to_load_from_cache(name.repo, file, revision=commit), str),
    )


def _fetch_file(name: HubName, wanted: _HubFile, report: Report) -> Path:
    if not wanted.here:
        transfer(wanted.source, wanted.blob, partial=wanted.partial, lock=wanted.lock, report=report)
    # The content is there: this enters it in the cache under its name, for all programs that use the cache.
    return Path(hf_hub_download(name.repo, wanted.file, revision=name.revision))


def _fetch_url(name: FileUrl, report: Report) -> Path:
    """A file of an unknown server: kept under its URL, and not asked for again."""
    key = hashlib.sha256(name.url.encode()).hexdigest()[:32]
    assets = constants.HF_ASSETS_CACHE
    folder = cached_assets_path("nightmill", namespace="urls", subfolder=key, assets_dir=assets)
    target = folder / name.file
    if target.exists():
        return target
    report(Progress(str(name), 0, None, "asking the server"))
    response = get_session().head(name.url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    if response.status_code not in _HEAD_REFUSED:
        hf_raise_for_status(response)
    linked = [one.headers.get("X-Linked-Etag", "").strip('"') for one in (*response.history, response)]
    length = response.headers.get("Content-Length", "") if response.is_success else ""
    version = response.headers.get("ETag", "") if response.is_success else ""
    partial = folder / f"{hashlib.sha256(f'{version} {length}'.encode()).hexdigest()[:16]}.incomplete"
    if not version:  # nothing says that the rest would be of the same file
        partial.unlink(missing_ok=True)
    transfer(
        Source(
            name.url,
            str(name),
            int(length) if length.isdecimal() and int(length) else None,
            next(filter(_SHA256.fullmatch, linked), None),
        ),
        target,
        partial=partial,
        lock=folder / ".lock",
        report=report,
    )
    return target


def _hub_hosts() -> frozenset[str]:
    return constants.HF_URL_HOSTS | {urlsplit(constants.ENDPOINT).netloc.lower()}


@contextmanager
def _errors(name: HubName | FileUrl) -> Iterator[None]:
    try:
        yield
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
        raise ModelFetchError(f"{name}: {_said(name, error)}") from error


def _said(name: HubName | FileUrl, error: Exception) -> str:
    """Say what went wrong, and what to do about it."""
    server = constants.ENDPOINT if isinstance(name, HubName) else urlsplit(str(name)).netloc
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, OfflineModeIsEnabled):
        return "it is not in the cache, and HF_HUB_OFFLINE forbids fetching it: unset that to fetch it"
    if isinstance(error, HfHubHTTPError):
        return _refusal(name, server, error)
    if isinstance(error, httpx2.TransportError):
        why = type(error).__name__ if not str(error) else str(error)
        return (
            f"{server} cannot be reached ({why}): look at the network and the proxy (HTTPS_PROXY), or set "
            "HF_ENDPOINT to a mirror of the Hub"
        )
    if isinstance(error, OSError) and error.errno is not None:
        return (
            f"the cache in {constants.HF_HOME} cannot be used: {error.strerror}. Set HF_HOME to another one"
        )
    return (
        f"{server} does not answer as a Hub does ({type(error).__name__}): look at HF_ENDPOINT and the proxy"
    )


def _refusal(name: HubName | FileUrl, server: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if isinstance(name, HubName):
        token = get_token() is not None
        account = "the account of this token" if token else "your account, and set HF_TOKEN to a token of it"
        if isinstance(error, GatedRepoError):
            return f"it is gated ({status}): accept its terms at {server}/{name.repo} with {account}"
        if isinstance(error, RepositoryNotFoundError) or status == 404 or (status == 401 and not token):
            private = "this token may not see it" if token else "it is private: for that, set HF_TOKEN"
            return f"{server} has no {name.repo} ({status}); look at the spelling. Or {private}"
        if status == 401:
            return f"{server} does not accept the token (401): set HF_TOKEN to one that is valid, or unset it"
        if status == 403:
            return f"{server} forbids it (403): " + (
                "the token in HF_TOKEN lacks the permission to read it"
                if token
                else "set HF_TOKEN to a token"
            )
    if status == 404:
        return "there is no such file (404): look at the spelling"
    if status in (401, 403):
        return (
            f"{server} does not give it to everybody ({status}): fetch it yourself and give the file's path"
        )
    if status == 429:
        seconds = error.response.headers.get("Retry-After", "")
        later = f"in {seconds} s" if seconds.isdecimal() else "in some minutes"
        more = "" if get_token() else "; with HF_TOKEN set, more requests are allowed"
        return f"{server} has had too many requests from here (429): try again {later}{more}"
    if status >= 500:
        return f"{server} has trouble of its own ({status}): try again later, what has been fetched is kept"
    return f"{server} refuses it ({status})"
