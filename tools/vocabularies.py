"""Fetches llama.cpp's vocabularies and chat templates, which tests of the tokenizer and of chats read.

They lie in the source package of llama-cpp-python on PyPI (76 MB, MIT licence): vocabularies as GGUF files
without weights, texts with the token ids expected of them, and chat templates as models' makers have written
them. The package is only unpacked, never built. `python -m tools.vocabularies FOLDER`
"""

import re
import sys
from pathlib import Path

from tools.packages import download, unpack

PACKAGE = "llama_cpp_python-0.3.36.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
WANTED = re.compile(r".*/vendor/llama\.cpp/models/((?:templates/)?[\w.-]+\.(?:gguf|inp|out|jinja))")


def main(folder: Path) -> None:
    unpack(download("llama-cpp-python", PACKAGE, SHA256), WANTED, folder)
    print(f"{len(list(folder.glob('*.gguf')))} vocabularies and their texts are in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
