"""docs/architecture.md says what the code is: its import rules and its rooms."""

import re

from tools.import_rules import PAGE, ROOT, part_of, rules

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_import_rules_of_the_contracts() -> None:
    assert part_of(TEXT) == rules(), "run: python -m tools.import_rules"


def test_every_room_has_a_line_and_every_line_a_room() -> None:
    table = re.findall(r"^\| (`[^|]*) \|", TEXT, re.M)
    named = {name.rstrip("/") for cell in table for name in re.findall(r"`([\w/]+/)`", cell)}
    assert {name for name in named if not (ROOT / name).is_dir()} == set()
    rooms = {
        str(path.parent.relative_to(ROOT))
        for top in ("jobs", "worker")
        for path in ROOT.glob(f"{top}/*/*.py")
    }
    assert rooms - named == set()


def test_a_parameter_of_sampling_is_named_in_six_files() -> None:
    """`top_p` as an example: all else follows from the field, its type, its definition and its kernels."""
    files = (
        path
        for top in ("jobs", "worker", "cuda")
        for path in (ROOT / top).rglob("*.*")
        if path.suffix in {".py", ".cu", ".cuh"}
    )
    assert {str(path.relative_to(ROOT)) for path in files if "top_p" in path.read_text()} == {
        "jobs/request/fields.py",
        "jobs/request/parameters.py",
        "worker/runners/sampling.py",
        "cuda/sampling/sampling.cuh",
        "cuda/sampling/sample_filtered.cu",
        "cuda/sampling/sample_reference.cu",
    }
