"""The command that installs an optional part of Nightmill into the running installation.

A clone, a wheel and an index need different commands. pip and uv record where a package came from
(`direct_url.json`, PEP 610).
"""

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["pip_install"]

_NAME = "nightmill"


def pip_install(extra: str) -> str:
    """Return the command that installs an extra, such as `pip install -e '/srv/nightmill[server]'` for a
    clone."""
    origin = _origin()
    url = origin.get("url", "")
    path = unquote(urlsplit(url).path) if url.startswith("file:") else None
    if path is not None:  # a clone, an unpacked archive or a wheel on this machine
        editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
        return f"pip install {editable}{shlex.quote(f'{path}[{extra}]')}"
    if url:
        scheme = origin["vcs_info"]["vcs"] + "+" if "vcs_info" in origin else ""
        return f"pip install {shlex.quote(f'{_NAME}[{extra}] @ {scheme}{url}')}"
    return f"pip install {shlex.quote(f'{_NAME}[{extra}]')}"


def _origin() -> dict[str, Any]:
    """Read where this installation came from; empty if from an index, or if nothing is recorded."""
    try:
        noted = distribution(_NAME).read_text("direct_url.json")
    except PackageNotFoundError:  # run from a folder on the path, never installed
        return {}
    return dict(json.loads(noted)) if noted else {}
