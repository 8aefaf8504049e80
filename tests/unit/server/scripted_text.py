"""A server whose worker answers one text to everything, as a model would that thinks and calls tools."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nightmill.jobs.base.contract import CallFormat, Markup
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from tests.unit.engine import by_definition
from tests.unit.server.conftest import KEYS, Server, Slow, listening, working
from tests.unit.worker import bench as worker_bench
from tests.unit.worker.bench import PROMPT, Bench, stop

TEXT = (
    "<think>\nIs it raining?\n</think>\n\nI'll look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"place": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "news", "arguments": {}}\n</tool_call>'
)
SEED = len(PROMPT)
"""With this seed the worker answers TEXT from its beginning."""


@contextmanager
def talking_server(settings: Settings, monkeypatch: pytest.MonkeyPatch, text: str = TEXT) -> Iterator[Server]:
    """In pieces of some bytes; calls are read where tools were given."""
    said = text.encode()
    size = -(-len(said) // by_definition.EOS)
    pieces = [said[start : start + size] for start in range(0, len(said), size)]
    script = [*range(len(pieces)), by_definition.EOS]
    for module in (by_definition, worker_bench):
        monkeypatch.setattr(module, "PIECES", [*pieces, *[b"?"] * (by_definition.VOCAB - len(pieces))])
    with Client(settings) as client:
        bench = Bench(client, Slow(script=script))
        monkeypatch.setattr(
            bench.prompting,
            "markup",
            lambda claim, ids: Markup(
                None if claim.rendering is None else CallFormat.HERMES, ("<think>", "</think>")
            ),
        )
        try:
            with listening(client, KEYS) as port, working(client, bench):
                yield Server(client, bench, port)
        finally:
            stop(bench)
