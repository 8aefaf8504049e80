"""Fetches llama.cpp's vocabularies and chat templates, which tests of the tokenizer and of chats read.

They lie in the source package of llama-cpp-python on PyPI (76 MB, MIT licence): vocabularies as GGUF files
without weights, texts with the token ids expected of them, and chat templates as models' makers have written
them. The package is only unpacked, never built. `python -m tools.vocabularies FOLDER`
"""

import hashlib
import io
import os
import re
import sys
import tarfile
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

PACKAGE = "llama_cpp_python-0.3.36.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
WANTED = re.compile(r".*/vendor/llama\.cpp/models/((?:templates/)?[\w.-]+\.(?:gguf|inp|out|jinja))")


def download() -> bytes:
    """The package, from the index that pip uses."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/llama-cpp-python/"
    with urlopen(index, timeout=60) as page:
        links = re.findall(r'href="([^"]+)"', page.read().decode())
    link = next((link for link in links if f"/{PACKAGE}" in link), None)
    if link is None:
        raise SystemExit(f"{index} has no {PACKAGE}")
    with urlopen(urljoin(index, link), timeout=60) as answer:
        data: bytes = answer.read()
    if (digest := hashlib.sha256(data).hexdigest()) != SHA256:
        raise SystemExit(f"{link} has the SHA-256 {digest}, not {SHA256}")
    return data


def main(folder: Path) -> None:
    (folder / "templates").mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(download())) as archive:
        for member in archive:
            if (found := WANTED.fullmatch(member.name)) and (file := archive.extractfile(member)):
                (folder / found[1]).write_bytes(file.read())
    print(f"{len(list(folder.glob('*.gguf')))} vocabularies and their texts are in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
