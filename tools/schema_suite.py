"""Fetches JSON Schema's own test suite, with which tests look for answers that are not of their schema.

It lies in the source package of jsonschema on PyPI (0.4 MB, MIT licence), which is unpacked, never built.
`python -m tools.schema_suite FOLDER`
"""

import re
import sys
from pathlib import Path

from tools.packages import download, unpack

PACKAGE = "jsonschema-4.26.0.tar.gz"
SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
WANTED = re.compile(r"[^/]+/json/tests/(draft[\w-]+/[\w/-]+\.json)")


def main(folder: Path) -> None:
    count = unpack(download("jsonschema", PACKAGE, SHA256), WANTED, folder)
    print(f"{count} files of JSON Schema's test suite are in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
