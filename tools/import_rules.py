"""Writes into docs/architecture.md what may import what: the contracts of import-linter in pyproject.toml.

    python -m tools.import_rules

A test fails if the page says something else than the contracts that `make check` holds the code against.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- written by python -m tools.import_rules -->\n", "<!-- end -->\n"


def main() -> None:
    """Rewrite the page's part between the two comments."""
    page = PAGE.read_text(encoding="utf-8")
    written = page.replace(BEGIN + part_of(page) + END, BEGIN + rules() + END)
    PAGE.write_text(written, encoding="utf-8")


def part_of(page: str) -> str:
    """The part of the page that this module writes; raises SystemExit if it has no place there."""
    if (found := re.search(f"{BEGIN}(.*?){END}", page, re.S)) is None:
        raise SystemExit(f"{PAGE} has no lines {BEGIN.strip()} and {END.strip()}")
    return found[1]


def rules() -> str:
    """Every contract in Markdown: floors as lists from top to bottom, what is forbidden as a table."""
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = configuration["tool"]["importlinter"]["contracts"]
    lines = [line for contract in contracts if contract["type"] == "layers" for line in _floors(contract)]
    lines += ["| rule | who | never imports |", "| --- | --- | --- |"]
    lines += [_forbidden(contract) for contract in contracts if contract["type"] == "forbidden"]
    if unknown := {contract["type"] for contract in contracts} - {"layers", "forbidden"}:
        raise SystemExit(f"contracts of the type {', '.join(sorted(unknown))} cannot be written down yet")
    return "\n".join(["", *lines, "", ""])


def _floors(contract: dict[str, Any]) -> list[str]:
    within = " and ".join(f"`{_short(name)}`" for name in contract.get("containers", []))
    lines = [f"**{contract['name']}**{within and f', in {within}'}:", "", "```text"]
    lines += [*map(_short, contract["layers"]), "```", ""]
    if exceptions := contract.get("ignore_imports"):
        lines += [f"Except for {', '.join(f'`{_short(exception)}`' for exception in exceptions)}.", ""]
    return lines


def _forbidden(contract: dict[str, Any]) -> str:
    who, whom = (
        ", ".join(f"`{_short(name)}`" for name in contract[side])
        for side in ("source_modules", "forbidden_modules")
    )
    directly = ", directly" if contract.get("allow_indirect_imports") else ""
    return f"| {contract['name']} | {who} | {whom}{directly} |"


def _short(names: str) -> str:
    return names.replace("nightmill.", "")


if __name__ == "__main__":
    main()
