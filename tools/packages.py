"""Source packages on the index that pip uses, unpacked for the tests, with a checksum and never built."""

import hashlib
import io
import os
import re
import tarfile
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen


def download(project: str, package: str, sha256: str) -> bytes:
    """The package of a project; SystemExit if the index lacks it, or has another under its name."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + f"/{project}/"
    with urlopen(index, timeout=60) as page:
        links = re.findall(r'href="([^"]+)"', page.read().decode())
    link = next((link for link in links if f"/{package}" in link), None)
    if link is None:
        raise SystemExit(f"{index} has no {package}")
    with urlopen(urljoin(index, link), timeout=60) as answer:
        data: bytes = answer.read()
    if (digest := hashlib.sha256(data).hexdigest()) != sha256:
        raise SystemExit(f"{link} has the SHA-256 {digest}, not {sha256}")
    return data


def unpack(package: bytes, wanted: re.Pattern[str], folder: Path) -> int:
    """Write those files whose whole name matches, under the name of the first group; returns how many."""
    count = 0
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        for member in archive:
            if (found := wanted.fullmatch(member.name)) and (file := archive.extractfile(member)):
                path = folder / found[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.read())
                count += 1
    return count
