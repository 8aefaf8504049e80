"""Barriers in `cuda/`: beside each stands why nobody comes in another's place; in tests waits have limits.

What is required is the comment `BARRIER name, name: ...`; whether its argument holds is for readers.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nightmill.worker.runners.gpu.device.compiler import included_files, kernel_directory

HELPERS = ("hopper.cuh", "waits.cuh")  # where barriers are instructions
CALL = re.compile(
    r"\b(barrier_init|barrier_expect|barrier_arrive|barrier_arrive_there|barrier_arrive_after_copies|barrier_wait|barrier_wait_for_cluster"
    r"|named_wait|named_arrive)\((?:address_in\()?([\w.]+)"
)
INSTRUCTION = re.compile(r"\b(mbarrier\.\w+|bar\.\w+|barrier\.(?:cta|cluster)\.\w+)")
ARGUMENT = re.compile(r"// BARRIER ([\w, ]+): ((?:.*\n\s*//(?! BARRIER ))*.*)")
FILES = sorted(kernel_directory().rglob("*.cu*"))
SPIN = re.compile(
    r"\bwhile \([^)]*(?:volatile|atomic|__ldcg|__ldcv|shared)|ld\.(?:acquire|relaxed|volatile)|atomicCAS"
)
LEAST_WORDS = 12


def code_of(text: str) -> str:
    """Without comments."""
    return re.sub(r"//.*", "", text)


def barriers_used(text: str) -> set[str]:
    """The names of barriers that a file sets up, arrives at or waits for."""
    return {name for _, name in CALL.findall(code_of(text))}


def arguments(text: str) -> Iterator[tuple[str, str]]:
    """Names of barriers, and what is said of them."""
    for names, said in ARGUMENT.findall(text):
        for name in names.split(", "):
            yield name, " ".join(re.sub(r"\s*//", "", said).split())


def unargued(path: Path) -> set[str]:
    """Barriers of which nothing is said in their file, or for those of an object where that is declared."""
    text = path.read_text()
    here = {name for name, _ in arguments(text)}
    included = {name for other in included_files(path).values() for name, _ in arguments(other.decode())}
    if path.name in HELPERS:
        return set()
    return {
        name
        for name in barriers_used(text)
        if (name.rpartition(".")[2] not in included if "." in name else name not in here)
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_beside_every_barrier_stands_why_nobody_comes_in_anothers_place(path: Path) -> None:
    assert unargued(path) == set()
    for name, said in arguments(path.read_text()):
        assert len(said.split()) >= LEAST_WORDS, f"{name}: {said}"
        assert re.search(r"\barrives?\b", said) and re.search(r"\bwaits?\b", said), f"{name}: {said}"


def test_a_barrier_without_an_argument_is_found(tmp_path: Path) -> None:
    path = tmp_path / "new.cu"
    path.write_text("    barrier_wait(full + 8 * stage, 0);  // BARRIER said: not this one\n")
    assert unargued(path) == {"full"}
    path.write_text("    // BARRIER full: one thread arrives\n    barrier_wait(full + 8 * stage, 0);\n")
    assert unargued(path) == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_only_helpers_that_have_a_limit_wait(path: Path) -> None:
    """No instruction of a barrier, and no loop on memory that others write, stands anywhere else."""
    if path.name not in HELPERS:
        code = code_of(path.read_text())
        assert INSTRUCTION.findall(code) == []
        assert SPIN.findall(code) == []


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".cu"], ids=lambda path: path.name)
def test_kernels_with_waits_say_their_name_to_the_build_that_limits_them(path: Path) -> None:
    texts = {name: text.decode() for name, text in included_files(path).items()}
    if any(barriers_used(text) for name, text in texts.items() if name.name not in HELPERS):
        code = code_of(path.read_text())
        assert code.count("KERNEL_BEGINS();") == code.count("__global__ void") > 0
