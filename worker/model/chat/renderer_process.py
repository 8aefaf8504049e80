"""Renders a stranger's Jinja template in a process of its own, which may be killed at any moment.

A chat template is code that comes with a model file. Jinja's sandbox keeps it from Python's internals, but
not from looping, from filling memory, or from crashing the interpreter: that is what this process is for.
It has no environment, no files but the socket to its parent (as standard input and output), and little
memory and processor time. `worker.model.chat.renderer` starts it as a script and is the other end of the
socket; the package is not imported here, for that would take a second.

The parent sends frames (length, bytes): first the template with what goes with it, as JSON, then groups of
chats, one a line. A frame is read as a whole before it is answered, so the two never wait for each other.
Each line is answered by a kind, a length and a text; nothing that comes from here is ever unpickled.
"""

import contextlib
import json
import resource
import signal
import struct
import sys
from datetime import UTC, datetime
from typing import Any, BinaryIO, NoReturn

sys.path += sys.argv[1:]  # where Jinja is: site-packages are not searched, which saves time

import textwrap  # noqa: F401 - Jinja imports it late, when nothing can be imported any more

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = struct.Struct("<I")
ANSWER = struct.Struct("<cI")
TEXT, REFUSED, BROKEN = b"T", b"R", b"B"
EXHAUSTED = b"X"  # no memory was left, and this was the last answer
MAX_ERROR = 1000  # characters of an error's text: it is stored with the job


class RefusedError(TemplateError):
    """The template called raise_exception: it does not accept these messages."""


class Generation(Extension):
    """`{% generation %}`, with which training templates mark the answer; for us its body alone matters."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's name and type

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Clock:
    """The time that a chat was asked for: a prompt is the same whenever it is rendered."""

    def __init__(self) -> None:
        self.time = datetime.now(UTC)

    def strftime(self, layout: str) -> str:
        return self.time.strftime(layout)


CLOCK = Clock()


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja as Hugging Face sets it up: whitespace, `tojson`, functions."""
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation], cache_size=0
    )
    jinja.filters["tojson"] = to_json
    jinja.globals.pop("lipsum")
    jinja.globals |= {"raise_exception": refuse, "strftime_now": CLOCK.strftime}
    return jinja


def refuse(message: object) -> NoReturn:
    raise RefusedError(str(message))


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes for HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def warm_up() -> None:
    """Have Python and Jinja open the files that they open late: codecs, the time zone, what shows errors."""
    with contextlib.suppress(TemplateError):
        environment().from_string("{{ '\\n' }}{{ strftime_now('%c %Z') }}{{ absent.deeper }}").render()


def confine(memory: int) -> None:
    """Give up what a template does not need, for good."""
    for number in (signal.SIGINT, signal.SIGTERM):  # when to stop is the parent's to say
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 3,
        resource.RLIMIT_NPROC: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def allow(seconds: float) -> None:
    """Have the kernel kill this process after so much processor time from now on; 0: not at all.

    RLIMIT_CPU does the same in whole seconds, of which a shard of hostile chats would take one for each.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)


def failure(error: Exception) -> tuple[bytes, bytes]:
    """The answer that says what a template raised: it can provoke any error of the values it handles."""
    kind = BROKEN
    if isinstance(error, RefusedError):
        kind, text = REFUSED, str(error)
    elif isinstance(error, MemoryError):
        kind, text = EXHAUSTED, "it needs too much memory"
    elif isinstance(error, TemplateError | RecursionError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    return kind, text[:MAX_ERROR].encode("utf-8", "replace")


def read(source: BinaryIO) -> bytes:
    """The next frame; empty if the parent is gone."""
    head = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


def main() -> None:
    with open(0, "rb") as source, open(1, "wb") as sink:

        def answer(kind: bytes, data: bytes) -> None:
            sink.write(ANSWER.pack(kind, len(data)) + data)
            sink.flush()

        begin = json.loads(read(source))
        warm_up()
        confine(begin["memory"])
        allow(begin["compile_seconds"])
        try:
            template = environment().from_string(begin["template"])
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            answer(*failure(error))
            return
        answer(TEXT, b"")
        while frame := read(source):
            for line in frame.split(b"\n"):
                allow(begin["render_seconds"] + begin["seconds_per_byte"] * len(line))
                try:
                    asked = json.loads(line)
                    CLOCK.time = datetime.fromisoformat(asked["time"])
                    text = template.render(begin["variables"], **asked["chat"])
                    kind, data = TEXT, text.encode("utf-8", "surrogatepass")
                    if len(data) > begin["answer_bytes"] + 4 * len(line):
                        kind, data = BROKEN, f"it writes {len(data):,} bytes of text".encode()
                except Exception as error:  # noqa: BLE001 - as above
                    kind, data = failure(error)
                answer(kind, data)
                if kind == EXHAUSTED:  # what is left of the memory is in pieces
                    return
            allow(0)


if __name__ == "__main__":
    main()
