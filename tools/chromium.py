"""Installs a headless Chromium without root, for the tests of pages: `python -m tools.chromium FOLDER`.

The npm package @sparticuz/chromium (70 MB, MIT licence) carries the browser itself, for Linux on x86-64, with
the libraries and fonts that a bare machine lacks. `npm pack` fetches it; of what is in it only the browser
is run. The files in it are compressed with Brotli, which Node.js reads.
"""

import base64
import hashlib
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@sparticuz/chromium@153.0.0"
SHA512 = "jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="
_UNPACK = "process.stdout.write(require('zlib').brotliDecompressSync(require('fs').readFileSync(0)))"
# What the machine has comes first: libraries of its own fit to each other.
_LAUNCHER = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
/sbin/ldconfig -p 2>/dev/null | grep -q libnss3.so || export LD_LIBRARY_PATH="$here/lib"
test -e /etc/fonts/fonts.conf || export FONTCONFIG_FILE="$here/fonts.conf"
exec "$here/headless-chromium" "$@"
"""
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}/fonts</dir><cachedir>{folder}/fonts-cache</cachedir></fontconfig>
"""


def fetch(folder: Path) -> tarfile.TarFile:
    """The package, held against its checksum; SystemExit with the reason if it cannot be had."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise SystemExit("npm and Node.js are not installed, which fetch and unpack it")
    done = subprocess.run(
        [npm, "pack", "--silent", "--pack-destination", str(folder), PACKAGE],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    found = list(folder.glob("*.tgz"))
    if done.returncode or len(found) != 1:
        raise SystemExit(f"npm does not get {PACKAGE}: {done.stderr.strip()[-500:]}")
    data = found[0].read_bytes()
    if (digest := base64.b64encode(hashlib.sha512(data).digest()).decode()) != SHA512:
        raise SystemExit(f"{PACKAGE} has the SHA-512 {digest}, not {SHA512}")
    return tarfile.open(fileobj=io.BytesIO(data))


def unpacked(package: tarfile.TarFile, name: str) -> bytes:
    """What a Brotli file of the package holds."""
    file = package.extractfile(f"package/bin/{name}.br")
    if file is None:
        raise SystemExit(f"{PACKAGE} has no bin/{name}.br")
    return subprocess.run(
        ["node", "-e", _UNPACK], input=file.read(), stdout=subprocess.PIPE, check=True
    ).stdout


def install(folder: Path) -> Path:
    """Put the browser into a folder, which is replaced; returns the path to start it by."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SystemExit(f"{PACKAGE} is for Linux on x86-64, not for {sys.platform} on {platform.machine()}")
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "chromium"
        made.mkdir()
        with fetch(Path(scratch)) as package:
            (made / "headless-chromium").write_bytes(unpacked(package, "chromium"))
            for archive in ("al2023.tar", "fonts.tar"):
                with tarfile.open(fileobj=io.BytesIO(unpacked(package, archive))) as files:
                    files.extractall(made, filter="data")
        (made / "fonts.conf").write_text(_FONTS.format(folder=folder))
        (made / "chromium").write_text(_LAUNCHER)
        for name in ("headless-chromium", "chromium"):
            (made / name).chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    path = folder / "chromium"
    print(subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.strip())
    return path


if __name__ == "__main__":
    install(Path(sys.argv[1]))
