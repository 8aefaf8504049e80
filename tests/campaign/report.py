"""What a campaign counts and finds; safe to use from several threads."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable

from tests.campaign.oracle import Violation
from tests.campaign.plan import HANGS, KILLS

SHOWN = 12  # violations of one kind that are printed in full


class Report:
    """Counts, violations with the step that came before them, and a line of progress."""

    def __init__(self, seed: int, without: frozenset[str] = frozenset()) -> None:
        self.seed = seed
        self.without = without  # faults that are left out of the plan
        self.part = ""
        self.step = "begin"  # the last action carried out
        self.counts: Counter[str] = Counter()
        self.violations: list[tuple[str, str, Violation]] = []  # part, step, what
        self._seen: set[Violation] = set()
        self._lock = threading.Lock()
        self._planned: set[str] = set()  # lines of the table that a campaign should have
        self._began = time.monotonic()
        self._shown_at = 0.0

    def count(self, what: str, number: int = 1) -> None:
        """Add to a line of the table."""
        with self._lock:
            self.counts[f"{self.part}: {what}"] += number

    def highest(self, what: str, number: int) -> None:
        """Keep the highest number in a line of the table."""
        with self._lock:
            self.counts[f"{self.part}: {what}"] = max(number, self.counts[f"{self.part}: {what}"])

    def planned(self, names: Iterable[str]) -> None:
        """Faults that this part has; which of them were never carried out is said at the end."""
        self._planned |= {f"{self.part}: fault {name}" for name in names}

    @property
    def kills(self) -> int:
        """Faults so far that ended a process, or its connections."""
        return self._sum(KILLS)

    @property
    def hangs(self) -> int:
        """Faults so far after which something stood still."""
        return self._sum(HANGS)

    def _sum(self, names: Iterable[str]) -> int:
        wanted = {f"fault {name}" for name in names}
        with self._lock:
            return sum(number for line, number in self.counts.items() if line.partition(": ")[2] in wanted)

    def violate(self, kind: str, said: str) -> None:
        """A rule was broken; the same words are kept once."""
        self.add(Violation(kind, said))

    def add(self, violation: Violation) -> None:
        """As `violate`."""
        with self._lock:
            if violation not in self._seen:
                self._seen.add(violation)
                self.violations.append((self.part, self.step, violation))
                alike = sum(other.kind == violation.kind for _, _, other in self.violations)
                if alike <= SHOWN:
                    print(f"\nVIOLATION [{self.part}, after {self.step}] {violation.kind}: {violation.said}")

    def progress(self, said: str, *, every: float = 5.0) -> None:
        """One line now and then; the latest in place where a person looks on."""
        now = time.monotonic()
        if now - self._shown_at < every:
            return
        self._shown_at = now
        line = f"{now - self._began:6.0f} s  {self.part}: {said}; {len(self.violations)} violations"
        print(f"\r\x1b[K{line}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n")
        sys.stdout.flush()

    def summary(self) -> str:
        """The table at the end."""
        lines = ["", f"Campaign of seed {self.seed}, {time.monotonic() - self._began:.0f} s", ""]
        width = max((len(name) for name in self.counts), default=0)
        lines += [f"  {name:{width}}  {number:>8,}" for name, number in sorted(self.counts.items())]
        never = sorted(line for line in self._planned if not self.counts[line])
        lines += ["", f"  kills {self.kills:,}, hangs {self.hangs:,}"]
        lines += [f"  never reached: {', '.join(never).replace('fault ', '')}"] if never else []
        lines += ["", f"  violations{'':{max(0, width - 10)}}  {len(self.violations):>8,}"]
        kinds = Counter((part, violation.kind) for part, _, violation in self.violations)
        for (part, kind), number in kinds.most_common():
            first = next((s, v) for p, s, v in self.violations if (p, v.kind) == (part, kind))
            lines.append(f"    {number:5} x {part} {kind}, first after {first[0]}: {first[1].said[:300]}")
        if kinds:
            parts = " ".join(dict.fromkeys(part for part, _ in kinds))
            lines.append(f"  To repeat: python -m tests.campaign --seed {self.seed} --only {parts}")
        return "\n".join(lines)
