"""A hostile template costs its own chat an error, and nobody else anything."""

import json
import os
import resource
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.base.contract import unstorable
from nightmill.jobs.errors import ChatTemplateError, RunnerError
from nightmill.worker.model.chat import renderer as module
from nightmill.worker.model.chat.renderer import Limits, Renderer

pytestmark = pytest.mark.heavy

# Processor time decides, not the clock: so the outcome is the same on a busy machine.
LIMITS = Limits(memory=96 << 20, compile_seconds=0.4, render_seconds=0.1, answer_bytes=1 << 20)
GROWING = "{%% set ns = namespace(s='x') %%}{%% for a in range(60) %%}{%% set ns.s = %s %%}{%% endfor %%}"
PAIRS = "{% set ns = namespace(t=()) %}{% for a in range(60) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
# `n` is 1, so that nothing is computed when the template is compiled.
BOMBS = {
    "deep key": (
        "{% set ns = namespace(t=()) %}{% for _ in range(2) %}{% for _ in range(99999) %}"
        "{% set ns.t = (ns.t,) %}{% endfor %}{% endfor %}{{ {ns.t: 1} | length }}"
    ),
    "wide key": PAIRS + "{{ {ns.t: 1} }}",
    "unique": PAIRS + "{{ [ns.t, ns.t] | unique | list | length }}",
    "comparison": PAIRS + "{% set old = ns.t %}" + PAIRS + "{{ old == ns.t }}",
    "join": "{{ (['x' * (10000000 * n)] * 300) | join }}",
    "string": "{{ (['x' * (10000000 * n)] * 300) | string }}",
    "tojson": "{{ (['x' * (10000000 * n)] * 300) | tojson }}",
    "separators": "{{ ([1] * (1000 * n)) | tojson(separators=('x' * (10000000 * n), '')) }}",
    "indent of tojson": "{{ [[1]] | tojson(indent=1000000000 * n) }}",
    "indent": "{{ ('\n' * 100000) | indent(100000 * n, blank=true) }}",
    "wide format": "{{ '%1000000000d' % n }}",
    "many wide formats": "{{ ('%999d' * (1000000 * n)) % ((n,) * 1000000) }}",
    "braces": "{{ '{:>1000000000}'.format(n) }}",
    "sum": "{{ ([[0] * 30000 * n] * 30000) | sum(start=[]) | length }}",
    "tuple": "{{ ((n,) * 100000000) | length }}",
    "list": "{{ ([n] * 10000000000) | length }}",
    "number to bytes": "{{ (n).to_bytes(2000000000, 'big') | length }}",
    "bytes": "{{ 'x'.encode().ljust(1000000000 * n) | length }}",
    "more bytes": "{{ 'x'.encode().zfill(1000000000 * n) | length }}",
    "center": "{{ 'x'.center(10000000000 * n) }}",
    "filter": "{{ 'x' | center(10000000000 * n) }}",
    "power": "{{ 9 ** (n * 9 ** 9) }}",
    "clock": "{{ strftime_now('%c' * (100000000 * n)) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "doubling": GROWING % "ns.s + ns.s",
    "concatenation": GROWING % "ns.s ~ ns.s",
    "blocks": (
        "{% set ns = namespace(s='x') %}{% for a in range(60) %}{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}"
        "{% set ns.s = s %}{% endfor %}{{ ns.s }}"
    ),
    "method replace": GROWING % "ns.s.replace('x', 'xx')",
    "filter replace": GROWING % "ns.s | replace('x', 'xx')",
    "squares": (
        "{% set ns = namespace(i=3) %}{% for a in range(60) %}{% set ns.i = ns.i * ns.i %}{% endfor %}"
    ),
    "macros": ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"),
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "long text": "{{ 'x' * (2000000 * n) }}",
    "long error": "{{ raise_exception('x' * (10000000 * n)) }}",
    "unstorable error": "{{ raise_exception('\x00\ud800' * n) }}",
}
WAYS_OUT = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__'] }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment.step }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ lipsum() }}",
)


def says(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def choice(parts: dict[str, str]) -> str:
    """A template that does one of `parts` where the message is its name, and writes `fine` for `hello`."""
    arms = "".join(f"{{% if said == {name!r} %}}{part}{{% endif %}}" for name, part in parts.items())
    head = "{% set said = messages[0].content %}{% set n = messages | length %}"
    return head + "{% if said == 'hello' %}fine{% endif %}" + arms


@pytest.fixture
def start() -> Iterator[Callable[..., Renderer]]:
    started = []

    def started_with(source: str, limits: Limits = LIMITS) -> Renderer:
        started.append(Renderer(source, {}, limits, "model.gguf"))
        return started[-1]

    yield started_with
    for renderer in started:
        renderer.close()


@pytest.mark.parametrize("first", range(0, len(BOMBS), 7))
def test_hostile_chats_fail_alone_and_cost_this_process_nothing(
    first: int, start: Callable[..., Renderer]
) -> None:
    bombs = dict(list(BOMBS.items())[first : first + 7])  # a template of all of them takes long to compile
    renderer = start(choice(bombs))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answers = renderer.render_all([says(text) for name in bombs for text in (name, "hello")])
    assert [name for name, answer in zip(bombs, answers[::2], strict=True) if isinstance(answer, str)] == []
    assert answers[1::2] == ["fine"] * len(bombs)
    errors = [str(answer) for answer in answers[::2]]
    assert max(map(len, errors)) < 1200
    assert not any(map(unstorable, errors))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB


def test_template_that_crashes_python_is_named_as_that(start: Callable[..., Renderer]) -> None:
    renderer = start(choice({"bomb": BOMBS["deep key"]}), Limits(render_seconds=10))
    crashed, fine = renderer.render_all([says("bomb"), says("hello")])
    assert "the template crashes Python with these messages (SIGSEGV)" in str(crashed)
    assert fine == "fine"


def test_the_sandbox_has_no_way_out(start: Callable[..., Renderer]) -> None:
    # Jinja renders some forbidden attributes as undefined, that is as nothing, and refuses the others.
    ways = {f"way {number}": way for number, way in enumerate(WAYS_OUT)}
    answers = start(choice(ways)).render_all([says(name) for name in ways])
    assert [answer for answer in answers if isinstance(answer, str) and answer] == []


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**12 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ [0] * 10**8 }}",
        "{{ x }}" * 140_000,
        "{% for %}",
        "x" * (1 << 21),
        "{{ 'x' * (messages | length * 10**12) }}",
    ],
)
def test_template_that_cannot_work_is_refused_when_it_is_loaded(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"^model\.gguf: "):
        Renderer(source, {}, LIMITS, "model.gguf")


def test_what_jinja_does_late_needs_no_file(start: Callable[..., Renderer]) -> None:
    parts = {
        "filters": (
            "{{ 'a b' | wordwrap(1) }}{{ [2, 1] | sort | tojson(indent=1) }}{{ '<é>' | escape | title }}"
            "{{ 'a b' | urlize | wordcount }}{{ {'a': 1} | dictsort | pprint }}{{ 1.25 | round(1) }}"
            "{{ [{'a': 1}] | groupby('a') | map('first') | list }}{{ {'a': 1} | xmlattr }}"
        ),
        "methods": "{{ 'é'.encode('utf-8').decode('latin-1') }}{{ '%s'|format(1) }}{{ strftime_now('%Z') }}",
    }
    answers = start(choice(parts)).render_all([says(name) for name in parts])
    assert [str(answer) for answer in answers if isinstance(answer, ChatTemplateError)] == []


def test_process_holds_nothing_but_its_socket(
    start: Callable[..., Renderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTMILL_DATABASE_URL", "postgresql://user:secret@host/db")
    with Path(__file__).open() as inherited:
        os.set_inheritable(inherited.fileno(), True)
        renderer = start("fine")
    process = Path(f"/proc/{renderer.pid}")
    assert set((process / "environ").read_bytes().split(b"\0")) <= {
        b"",
        f"TZ={os.environ.get('TZ')}".encode(),
    }
    opened = {int(path.name): str(path.readlink()) for path in (process / "fd").iterdir()}
    assert opened.keys() == {0, 1, 2}
    assert opened[0] == opened[1]
    assert opened[0].startswith("socket:")
    assert opened[2] == "/dev/null"
    assert os.getsid(renderer.pid or 0) == renderer.pid
    for limit, value in {
        resource.RLIMIT_AS: LIMITS.memory, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 3, resource.RLIMIT_NPROC: 0,
    }.items():  # fmt: skip
        assert resource.prlimit(renderer.pid or 0, limit) == (value, value)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_process_ends_when_its_parent_is_killed() -> None:
    script = """
        import time
        from nightmill.worker.model.chat.renderer import Limits, Renderer
        renderer = Renderer("fine", {}, Limits(), "model.gguf")
        print(renderer.pid, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        parent.kill()
    give_up_at = time.monotonic() + 60
    while not gone(pid) and time.monotonic() < give_up_at:
        time.sleep(0.01)
    assert gone(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_process_that_something_else_ended_or_stopped_is_replaced(
    number: signal.Signals, start: Callable[..., Renderer]
) -> None:
    renderer = start("fine", Limits(wall_seconds=1.0, render_seconds=0.15))
    assert renderer.pid is not None
    os.kill(renderer.pid, number)
    assert renderer.render_all([says("hello")] * 3) == ["fine"] * 3


def test_process_that_cannot_be_started_is_no_chats_fault(
    start: Callable[..., Renderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = start("fine")
    renderer.close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nonexistent/python")
        with pytest.raises(RunnerError, match="that renders chat templates cannot be started"):
            renderer.render_all([says("hello")])
    assert renderer.render_all([says("hello")]) == ["fine"]


def test_process_ignores_the_signals_that_tell_a_worker_to_stop(start: Callable[..., Renderer]) -> None:
    renderer = start("fine")
    pid = renderer.pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    assert renderer.render_all([says("hello")]) == ["fine"]
    assert renderer.pid == pid


def test_chats_of_one_thread_wait_for_one_hostile_chat_of_another_at_most(
    start: Callable[..., Renderer],
) -> None:
    renderer = start(choice({"bomb": BOMBS["loops"]}))
    hostile: list[str | ChatTemplateError] = []
    thread = threading.Thread(
        target=lambda: hostile.extend(renderer.render_all([says("bomb")] * 12 + [says("hello")]))
    )
    first = renderer.pid
    thread.start()
    while renderer.pid == first:  # the first of them has cost its process
        time.sleep(0.001)
    assert renderer.render_all([says("hello")] * 64) == ["fine"] * 64
    assert thread.is_alive()
    thread.join()
    assert [isinstance(answer, ChatTemplateError) for answer in hostile] == [True] * 12 + [False]


def test_threads_may_share_a_renderer(start: Callable[..., Renderer]) -> None:
    renderer = start("{{ messages[0].content }}")
    answers: dict[int, list[str | ChatTemplateError]] = {}

    def ask(number: int) -> None:
        answers[number] = renderer.render_all([says(f"{number}-{part}") for part in range(50)])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: [f"{number}-{part}" for part in range(50)] for number in range(8)}


@pytest.mark.parametrize("count", [3, 3_000])
def test_messages_of_any_size_arrive_whole(count: int, start: Callable[..., Renderer]) -> None:
    text = "é🦙\n\u2028\ud800" * count
    answers = start("{{ messages[0].content }}").render_all([says(text)] * 40)
    assert answers == [text] * 40


def test_messages_that_are_no_json_fail_alone(start: Callable[..., Renderer]) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    answers = start("fine").render_all([says("a"), {"messages": nested}, {"messages": {1j}}, says("b")])
    assert [isinstance(answer, ChatTemplateError) for answer in answers] == [False, True, True, False]


@pytest.mark.parametrize(
    "answer",
    [
        struct.pack("<cI", b"T", 2**32 - 1),
        struct.pack("<cI", b"T", 2) + b"\xff\xff",
        struct.pack("<cI", b"?", 3) + b"\x00\xff\xff",
        b"T",
    ],
)
def test_process_that_was_taken_over_can_only_fail_its_chats(
    answer: bytes, start: Callable[..., Renderer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a template could have its process say, were it to break out of Jinja's sandbox."""
    program = tmp_path / "taken_over.py"
    program.write_text(
        "import os, struct\n"
        "def read(): return os.read(0, struct.unpack('<I', os.read(0, 4))[0])\n"
        "for text in (b'', b'fine'):\n"
        "    read(); os.write(1, struct.pack('<cI', b'T', len(text)) + text)\n"
        f"read(); os.write(1, {answer!r})\n"
    )
    monkeypatch.setattr(module, "PROGRAM", program)
    (said,) = start("fine").render_all([says("hello")])
    assert isinstance(said, ChatTemplateError)
    assert unstorable(str(said)) is None


def test_the_first_frame_holds_the_template_and_its_limits_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "echo.py"
    program.write_text(
        "import os, struct\n"
        "frame = os.read(0, struct.unpack('<I', os.read(0, 4))[0])\n"
        "os.write(1, struct.pack('<cI', b'B', len(frame)) + frame)\n"
    )
    monkeypatch.setattr(module, "PROGRAM", program)
    with pytest.raises(ChatTemplateError) as caught:
        Renderer("source", {"bos_token": "<s>"}, LIMITS, "model.gguf")
    told = json.loads(str(caught.value).removeprefix("model.gguf: "))
    assert told.keys() == {"template", "variables", *asdict(LIMITS)}
