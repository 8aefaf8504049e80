"""The command: plans, runs the parts one after the other, prints the table. Exits with 1 on any violation."""

import argparse
import itertools
import signal
import sys
from collections.abc import Callable
from functools import partial

from tests.campaign import file_night, model_files, night, template_files
from tests.campaign.plan import describe, make_plan
from tests.campaign.report import Report

Part = Callable[[int, float, Report], None]

# With each part's share of the time.
PARTS: dict[str, tuple[float, Part]] = {
    "postgresql": (0.35, partial(night.run, "postgresql")),
    "sqlite": (0.25, partial(night.run, "sqlite")),
    "run": (0.15, file_night.run),
    "models": (0.12, model_files.run),
    "templates": (0.13, template_files.run),
}

NEXT_SEED = 1_000_000  # between those of two turns of a long campaign


def main() -> int:
    """Run a campaign."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=1, help="names the campaign; the same seed plans the same"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together (default: 8)")
    for what in ("kills", "hangs"):
        said = f"repeat all parts, each time with another plan, until there were so many {what}"
        parser.add_argument(f"--{what}", type=int, default=0, help=said)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument(
        "--without", nargs="+", default=[], help="faults to leave out, to find who is to blame"
    )
    parser.add_argument("--plan", action="store_true", help="print what would be done, and when")
    options = parser.parse_args()
    whole = sum(PARTS[name][0] for name in options.only)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended on the way out
    report = Report(options.seed, frozenset(options.without))
    for turn in itertools.count():
        _run_parts(options, options.seed + turn * NEXT_SEED, whole, report)
        if options.plan or (report.kills >= options.kills and report.hangs >= options.hangs):
            break
    if options.plan:
        return 0
    print(report.summary())
    return 1 if report.violations else 0


def _run_parts(options: argparse.Namespace, seed: int, whole: float, report: Report) -> None:
    """Each part once, in its share of the time."""
    for name in options.only:
        share, run = PARTS[name]
        seconds = options.minutes * 60 * share / whole
        if options.plan:
            if name in ("postgresql", "sqlite"):
                print(f"{name}, {seconds:.0f} s:")
                print(describe(make_plan(seed, name, night.fault_seconds(seconds), night.WORKERS)))
            continue
        report.part, report.step, report.seed = name, "the beginning", seed
        run(seed, seconds, report)


if __name__ == "__main__":
    sys.exit(main())
