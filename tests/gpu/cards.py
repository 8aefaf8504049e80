"""Runs tests of a GPU as other cards, part by part: `python -m tests.gpu.cards --card rtx3090 states`.

Needs a Hopper GPU, which is taken for each card in turn. Each part has a minute (`--seconds`); what passed
before it was cut counts. The output of tests that failed is shown; at the end comes a table. Exit code 1 if
a test failed, if a part has none, or if it was cut before any had ended. `--collect` counts the tests of
each part, and needs no GPU.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CARDS", "PARTS", "TestedPart", "main"]

CARDS = ("rtx3090", "a100", "rtx4090", "rtx5090")
_ROOT = Path(__file__).parents[2]
_OUTCOME = re.compile(r"^(tests/\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
_COLLECTED = re.compile(r"^tests/\S.*?::.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TestedPart:
    """Some test files, and which of their tests (`pytest -k`)."""

    name: str
    files: tuple[str, ...]
    chosen: str = ""

    @property
    def arguments(self) -> list[str]:
        """What pytest is given."""
        chosen = ["-k", self.chosen] if self.chosen else []
        return [*(f"tests/gpu/{name}.py" for name in self.files), *chosen]


# Of the sizes that models have; the bits of what is cut or in company, of one size.
_LARGE_DELTA = "delta and (9B or 80B or lengths or cut or again or beside or other or follows or repeat)"
_LARGE_MAMBA = "mamba and (Nemotron or Granite or lengths or cut or again or other or follows or repeat)"

PARTS = (
    TestedPart("products", ("test_mma",)),
    TestedPart("packed", ("test_packed",)),
    TestedPart("few-rows", ("test_few_rows",)),
    TestedPart("decode", ("test_kernels_attention",)),
    TestedPart("prompts", ("test_kernels_prefill",), "ragged or chunks or deep"),
    TestedPart("fp8-pages", ("test_kv_fp8",)),
    TestedPart("delta", ("test_states_kernels",), f"{_LARGE_DELTA} and not bf16 and not 96"),
    TestedPart("mamba", ("test_states_kernels",), f"{_LARGE_MAMBA} and not bf16 and not 256"),
    TestedPart("convolution", ("test_states_kernels",), "short and not mamba and not delta"),
    TestedPart("state-models", ("test_states_runner",)),
    TestedPart("experts", ("test_experts_kernels",), "(rows or sizes or number or logits) and not bf16"),
    TestedPart("packed-experts", ("test_experts_kernels",), "Q4_K or Q6_K or Q8_0 or MXFP4"),
    TestedPart("expert-models", ("test_experts_runner",)),
    TestedPart("latents", ("test_kernels_latent",)),
    TestedPart("gemma4", ("test_gemma4",)),
    TestedPart("windows", ("test_page_kinds", "test_sharing")),
    TestedPart("families", ("test_families",)),
    TestedPart("model", ("test_runner",)),
    TestedPart("real-model", ("test_real_model",)),
    TestedPart("embeddings", ("test_embeddings", "test_kernels_pooling")),
    TestedPart("workers", ("test_worker", "test_states_worker")),
)
"""Whatever a card computes by other kernels than Hopper, and whole workers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts on the cards."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.cards", description=__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--card", action="append", choices=CARDS, help="only this card; may be repeated")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each part and card")
    parser.add_argument("--collect", action="store_true", help="only count the tests of each part")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.parts) - set(names)):
        parser.error(f"no part is called {', '.join(unknown)}: {', '.join(names)}")
    rows, failed = [], 0
    parts = [part for part in PARTS if not options.parts or part.name in options.parts]
    if options.collect:
        counts = {part.name: collected(part) for part in parts}
        print("\n".join(f"{name:14} {count:5} tests" for name, count in counts.items()))
        return int(0 in counts.values())
    for part in parts:
        for card in options.card or CARDS:
            counts, note, seconds = run_part(part, card, options.seconds)
            failed += counts["FAILED"] + counts["ERROR"] + (note == "failed" or not any(counts.values()))
            rows.append(
                f"{part.name:14} {card:8} {counts['PASSED']:5} passed {counts['FAILED'] + counts['ERROR']:4} "
                f"failed {counts['SKIPPED']:4} skipped {seconds:6.1f} s  {note}"
            )
            print(rows[-1], flush=True)
    print("\n" + "\n".join(rows))
    return min(failed, 1)


def run_part(part: TestedPart, card: str, most: float) -> tuple[dict[str, int], str, float]:
    """Numbers of tests by outcome, a word where it was no ordinary end, and seconds."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short",
         *part.arguments],
        cwd=_ROOT, env=os.environ | {"NIGHTMILL_PRETEND_DEVICE": card}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    note = ""
    try:
        output, _ = process.communicate(timeout=most)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=10.0)
        note = f"cut after {most:.0f} s"
    counts = outcomes(output)
    if counts["FAILED"] + counts["ERROR"] or (not note and process.returncode):
        print(output[-6000:], flush=True)
        note = note or ("" if counts["FAILED"] + counts["ERROR"] else "failed")
    return counts, note, time.monotonic() - began


def collected(part: TestedPart) -> int:
    """Count the tests of a part, without running them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"NIGHTMILL_PRETEND_DEVICE": CARDS[0]}
    done = subprocess.run(
        [*command, "-p", "no:xdist", *part.arguments],
        cwd=_ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return len(_COLLECTED.findall(done.stdout)) if done.returncode == 0 else 0


def outcomes(output: str) -> dict[str, int]:
    """Count the tests by outcome in what `pytest -v` prints."""
    found = dict.fromkeys(("PASSED", "FAILED", "ERROR", "SKIPPED"), 0)
    for _, outcome in _OUTCOME.findall(output):
        found[outcome] += 1
    return found


if __name__ == "__main__":
    raise SystemExit(main())
