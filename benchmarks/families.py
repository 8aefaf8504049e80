"""Every family on the GPU: is it computed right, and how fast?

    python -m benchmarks.families [--only gemma3 phi3 ...] [--skip-speed] [--json families.json]

Agreement: random models with a few layers of a 0.5B's size, of all kinds that a family has, against the
reference runner (`agreement`). Speed: a model of each family in the size of Qwen2.5-0.5B does the
workload "uniform" of `benchmarks.engine` (256 prompts of 512 tokens, answers of 256), in turns with a Qwen2
on the same GPU; the ratio is of the medians. What a family fixes, such as heads of 256, it keeps: then it is
also compared with a Qwen2 that has such heads, whose keys and values are as many bytes.

Rows are clear if their best two logits are further apart than rounding moves them (`agreement.CLEAR`).
Bfloat16 has three bits less than half: there, that distance is 8 times, and the bar of the mean KL 64 times
as large.

Prints a table in Markdown. Each model runs in a process of its own: what one does cannot hurt the next. The
exit status is 1 if a model failed or missed a bar; what the kernels do not take is told, and is no failure.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.common.family_runs import COARSER, Row, check, race
from tests.support.agreement import MEAN_KL
from tests.support.apart import ApartError
from tests.support.family_models import families

OF_QWEN = 0.85  # the bar of speed


def main() -> None:
    """Both parts, the table, the verdict."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("--only", nargs="+", default=[], metavar="FAMILY")
    arguments.add_argument("--skip-speed", action="store_true")
    arguments.add_argument("--dtype", choices=("auto", "f16", "bf16"), default="auto")
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--folder", type=Path, help="for the files, up to 4 GB at once; they are removed")
    arguments.add_argument(
        "--reference",
        action="store_true",
        help="no GPU: the reference runner against itself, to try this out",
    )
    options = arguments.parse_args()
    models = families(options.only)
    began = time.monotonic()

    def progress(words: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {words}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(dir=options.folder, prefix="families-") as folder:
        rows = check(models, Path(folder), options.dtype, progress, reference=options.reference)
        failed = [row for row in rows if row.error]
        if not (options.skip_speed or options.reference):
            try:
                race(rows, Path(folder), options.dtype, progress)
            except ApartError as error:
                progress(f"no speed was measured: Qwen2 failed: {error}")
                failed = rows
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    sys.exit(bool(failed) or any(row.error or missed(row) for row in rows))


def missed(row: Row) -> list[str]:
    """The bars that a model misses."""
    found, words = row.agreement, []
    largest = MEAN_KL * COARSER[row.element or "f16"] ** 2  # it grows with the square of errors
    if found is not None and not found.mean_kl < largest:  # NaN too
        words.append(f"a mean KL of {found.mean_kl:.1e}, not under {largest:.1e}")
    if found is not None and found.same_clear != 1:
        words.append(
            f"another best token in {1 - found.same_clear:.2%} of the clear rows, "
            f"which are up to {found.largest_gap:.3f} apart"
        )
    if row.of_qwen is not None and row.of_qwen < OF_QWEN:
        words.append(f"{row.of_qwen:.0%} of Qwen2's speed, not {OF_QWEN:.0%}")
    return words


def table(rows: Sequence[Row]) -> str:
    """A line a model, then what was refused, failed or missed a bar."""
    lines = [
        "| model | in | entropy | mean KL | largest KL | same token | of clear rows | tokens/s | of Qwen2 "
        "| with its heads |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        found = row.agreement
        cells = ["-"] * 5
        if found is not None:
            kls = f"{found.mean_kl:.1e}", f"{found.largest_kl:.1e}"
            tokens = f"{found.same_top:.2%}", f"{found.same_clear:.2%} of {found.clear_rows}"
            cells = [f"{found.entropy:.1f}", *kls, *tokens]
        cells += ["" if row.rate is None else f"{row.rate:,.0f}"]
        cells += ["" if share is None else f"{share:.0%}" for share in (row.of_qwen, row.of_alike)]
        lines.append(f"| {row.model} | {row.element} | {' | '.join(cells)} |")
    for row in rows:
        told = [row.refused, row.error and f"failed: {row.error}", *missed(row)]
        lines += [f"\n{row.model}: {words}" for words in filter(None, told)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
