"""The handle on a process that compiles grammars to see whether they can be: starts it, asks it, ends it."""

import json
import re
import threading
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Final

import llguidance
from llguidance import LLParserLimits

from nightmill.jobs.base.contract import Constrained, ConstraintKind
from nightmill.jobs.errors import ConstraintError, RunnerError
from nightmill.worker.confined import TRIES, ConfinedProcess, LostError, Words
from nightmill.worker.grammar.gbnf import GbnfError
from nightmill.worker.grammar.source import complete, lark_of, lark_of_schema
from nightmill.worker.grammar.thoughts import lark_behind, of_answer

PROGRAM: Final = Path(__file__).with_name("checker_process.py")
_LONGEST: Final = 500  # characters of what the parser says
_LONGEST_ANSWER: Final = 8 << 20  # bytes; a converted grammar is a little longer than it was


@dataclass(frozen=True, kw_only=True)
class ParserLimits:
    """Limits of llguidance for compiling a grammar and for each mask; its own defaults if none is set here.

    A mask that needs more fails its row. Fuel for a step is some 15 ms, and so are its items: so much a row
    may delay a step. With the default of 50,000 items one of 600 grammars that nobody means well took 100 ms.
    A schema of 150 optional properties needs 5,000 to 10,000 (152,000 tokens, one core of an AMD EPYC).
    """

    max_items_in_row: int = 2_000
    initial_lexer_fuel: int = 1_000_000
    step_lexer_fuel: int = 200_000
    step_max_items: int = 20_000
    max_lexer_states: int = 50_000  # of 1 to 2 KB: all rows of a grammar share them
    max_grammar_size: int = 500_000
    precompute_large_lexemes: bool = False  # it would make compiling a matter of the vocabulary
    verbose_errors: bool = False

    def build(self) -> LLParserLimits:
        """Build the limits as llguidance takes them."""
        return LLParserLimits(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class CheckerLimits:
    """Limits on compiling a grammar. A usual schema takes a millisecond; the process itself has 60 MB."""

    memory: int = 1 << 30  # bytes of address space
    seconds: float = 10.0  # of processor time
    wall_seconds: float = 20.0  # for an answer, beside four times the processor time that it may take
    parser: ParserLimits = field(default_factory=ParserLimits)


class UncheckedError(ConstraintError):
    """Nobody knows whether the grammar was to blame: who asks for it again may have more luck."""


class Checker:
    """A process of its own, started when it is first asked; one thread asks at a time."""

    def __init__(self, limits: CheckerLimits) -> None:
        self._limits = limits
        self._child: _Child | None = None
        self._closed = False
        self._closing = threading.Lock()

    def check(self, asked: Constrained) -> str:
        """The grammar as it can be compiled.

        Raises ConstraintError, which says why it cannot, UncheckedError if that is not known, and RunnerError
        if the process cannot be started.
        """
        alone, end = of_answer(asked)
        return lark_behind(asked, self.check(alone)) if end else self._check(asked)

    def _check(self, asked: Constrained) -> str:
        try:
            lark = lark_of(asked, lambda schema: self._can_open(asked, schema))
        except GbnfError as error:
            raise ConstraintError(f"{_named(asked)}: {error}") from error
        except (
            ValueError,
            TypeError,
            KeyError,
            RecursionError,
        ) as error:  # a row that no client of ours has written
            raise ConstraintError(f"{_named(asked)}: cannot be read: {error}") from error
        said = self._answer(asked, {"lark": lark, "options": complete("")})
        if "lark" in said:
            return said["lark"]
        own = asked.kind is ConstraintKind.GRAMMAR and lark == asked.text
        raise ConstraintError(f"{_named(asked)}: {_plain(said.get('refused', ''), asked.kind, own)}")

    def close(self) -> None:
        """End the process, whatever it does; it is not started again. It also ends when this one does."""
        with self._closing:
            self._closed = True
            if self._child is not None:
                self._child.process.kill()

    def _can_open(self, asked: Constrained, schema: dict[str, Any]) -> bool:
        return "lark" in self._answer(
            asked,
            {"lark": lark_of_schema(schema), "after": "{", "next": '"', "options": complete("")},
        )

    def _answer(self, asked: Constrained, question: dict[str, Any]) -> dict[str, str]:
        """Ask the process, again if it is lost. Raises ConstraintError and UncheckedError."""
        frame = json.dumps(question).encode()
        for last in (*[False] * (TRIES - 1), True):
            try:
                return self._ask(frame)
            except LostError as lost:
                self._drop()
                if lost.convicts:
                    raise ConstraintError(f"{_named(asked)}: {lost}; simplify it") from lost
                if last:
                    raise UncheckedError(f"{_named(asked)}: {lost}; retry the job, or simplify it") from lost
        raise AssertionError("the last try returns or raises")

    def _ask(self, question: bytes) -> dict[str, str]:
        limits = self._limits
        with self._closing:
            if self._closed:
                raise RunnerError("the engine ends")
            child = self._child = self._child or _Child(limits)
        frame = child.ask(question, limits.wall_seconds + 4 * limits.seconds)
        try:
            answer: dict[str, str] = json.loads(frame)
        except ValueError as error:
            raise LostError("the process that checks grammars is damaged", convicts=True) from error
        return answer

    def _drop(self) -> None:
        with self._closing:
            if self._child is not None:
                self._child.close()
                self._child = None


class _Child:
    """The process and our end of its pipe."""

    def __init__(self, limits: CheckerLimits) -> None:
        """Start it; raises RunnerError if that fails."""
        words = Words(
            process="the process that checks grammars",
            slow=f"takes more than {limits.seconds:g} s of processor time to compile",
            crashed="is too much for the parser ({signal}: its stack or memory ends)",
        )
        try:
            self._connection, theirs = Pipe()
        except OSError as error:  # no job's fault, as when this process has too many files open
            raise ConfinedProcess.not_started(words, error) from error
        number = theirs.fileno()
        try:  # no standard streams: what the parser may print is not an answer
            self.process = ConfinedProcess(
                PROGRAM, [llguidance], words, arguments=[str(number)], pass_fds=[number]
            )
        except RunnerError:
            self._connection.close()
            raise
        finally:
            theirs.close()
        begin = {
            "memory": limits.memory, "seconds": limits.seconds, "parser": asdict(limits.parser)
        }  # fmt: skip
        try:
            self._send(json.dumps(begin).encode())
        except LostError:
            self.close()
            raise

    def ask(self, question: bytes, seconds: float) -> bytes:
        """The answer; raises LostError if there is none."""
        self._send(question)
        try:
            if not self._connection.poll(seconds):
                raise LostError(f"it does not compile within {seconds:g} s")
            return self._connection.recv_bytes(_LONGEST_ANSWER)
        except (OSError, EOFError) as error:
            raise self.process.lost() from error

    def close(self) -> None:
        self._connection.close()
        self.process.kill()

    def _send(self, frame: bytes) -> None:
        # It fits into the pipe, or is read at once: the process has answered everything before.
        try:
            self._connection.send_bytes(frame)
        except OSError as error:
            raise self.process.lost() from error


def _named(asked: Constrained) -> str:
    """Return the row's name for its constraint: `tools` for calls, else the constraint's kind."""
    return "tools" if asked.kind is ConstraintKind.CALLS else str(asked.kind)


_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")
_COERCE = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"  # which is not a row's to enable
_EXCERPT = re.compile(r"\n\s*\d+ \| .*|<backtrace>.*|<non-verbose/>.*", re.DOTALL)


def _plain(error: str, kind: ConstraintKind, own: bool) -> str:
    """Put the parser's error on one line; only of a grammar that is the row's `own` it keeps the places."""
    said = _EXCERPT.sub("", error)
    if not own:
        said = _PLACE.sub("", said)
    if kind is ConstraintKind.REGEX and "\nerror: " in said:
        said = said.rpartition("\nerror: ")[2]
    if "pecial token" in said or "Token range" in said:
        said = "names tokens of the model, with which no answer is spelt; write the text that is meant"
    if "NoExtensionBias" in said:
        said = "no answer can obey it"
    said = said.replace(_COERCE, "write anyOf, or cases that exclude each other")
    said = " ".join(said.split()).removesuffix(":")
    return said[:_LONGEST] or "cannot be compiled"
