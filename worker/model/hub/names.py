"""Names of models to fetch: `hf:OWNER/REPO[:QUANT]`, `hf:OWNER/REPO/FILE.gguf`, or a URL."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from nightmill.jobs.errors import ModelFetchError

REVISION: Final = "main"
GRAMMAR: Final = "hf:OWNER/REPO, hf:OWNER/REPO:QUANT, hf:OWNER/REPO/FILE.gguf or https://HOST/FILE.gguf"

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"hf:(?P<repo>{_WORD}/{_WORD})(?::(?P<quant>[A-Za-z0-9._-]+)|/(?P<file>.+\.gguf))?")
_PAGE = re.compile(
    rf"/(?P<repo>{_WORD}/{_WORD})(?:/(?:resolve|blob)/(?P<revision>[^/]+)/(?P<file>.+\.gguf))?/?"
)


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the Hub: the file that is named, or the one of this quantisation, or the usual one."""

    repo: str
    quant: str | None = None
    file: str | None = None
    revision: str = REVISION

    def __str__(self) -> str:
        if self.file is not None:
            return f"hf:{self.repo}/{self.file}"
        return f"hf:{self.repo}" + (f":{self.quant}" if self.quant else "")


@dataclass(frozen=True, slots=True)
class FileUrl:
    """A file anywhere."""

    url: str

    @property
    def file(self) -> str:
        """The name of the file on this machine: made from the URL, always with the ending .gguf."""
        name = re.sub(r"[^\w.+@=-]", "-", unquote(urlsplit(self.url).path).rpartition("/")[2]).lstrip(".")
        return f"{name.removesuffix('.gguf')[:150] or 'model'}.gguf"

    def __str__(self) -> str:
        """The URL without what may be secret: user, password and parameters."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def parse_name(text: str, hub_hosts: Collection[str]) -> HubName | FileUrl:
    """Parse a model's name; a URL on one of `hub_hosts` (host, or host:port) is a name on the Hub.

    Raises ModelFetchError, with what is understood, for anything else.
    """
    if text.startswith(("https://", "http://")):
        return _of_url(text, hub_hosts)
    match = _NAME.fullmatch(text)
    if match is None or ".." in text:
        raise ModelFetchError(f"{text!r} does not name a model: write {GRAMMAR}")
    return HubName(match["repo"], match["quant"], match["file"])


def _of_url(text: str, hub_hosts: Collection[str]) -> HubName | FileUrl:
    try:
        parts = urlsplit(text)
        host = parts.netloc.rpartition("@")[2].lower()
    except ValueError:
        host = ""
    if not host:
        raise ModelFetchError(f"the URL of the model cannot be parsed: write {GRAMMAR}")
    page = _PAGE.fullmatch(unquote(parts.path)) if host in hub_hosts else None
    if page is None or (page["file"] is None and page["repo"].endswith(".gguf")):
        return FileUrl(text)
    return HubName(page["repo"], file=page["file"], revision=page["revision"] or REVISION)
