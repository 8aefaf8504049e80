"""A caller over HTTP that times every request, and judges every status, text and end of a stream."""

import json
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2

from tests.campaign.fleet import Fleet
from tests.campaign.ledger import Intent, Ledger
from tests.campaign.limits import http_limit
from tests.campaign.members import Member
from tests.campaign.report import Report
from tests.campaign.texts import SAMPLING, Answer, answer, begins

REFUSALS = frozenset({408, 429, 503, 504})
"""Statuses with which a sound request may be refused while something hangs or is away."""
LONGEST_SILENCE = 180.0  # of a server: longer than it is ever stopped, and any limit besides


class HttpCaller:
    """Requests to one of the servers each, over a connection of its own. Each thread has its own caller."""

    def __init__(self, fleet: Fleet, ledger: Ledger, report: Report, draw: random.Random) -> None:
        self.ledger = ledger
        self.report = report
        self.draw = draw
        self._fleet = fleet
        self._http = httpx2.Client(
            timeout=LONGEST_SILENCE, limits=httpx2.Limits(max_keepalive_connections=0), trust_env=False
        )

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def request(
        self, kind: str, method: str, path: str, *expected: int, **more: Any
    ) -> httpx2.Response | None:
        """The answer with status 200, 202 or an `expected` one; None where the request was refused."""
        server, url = self._address(path)
        with self._calling(server, f"{method} {path}", kind):
            process = server.process
            found = self._http.request(method, url, **more)
            server.answered(process)
            if self.accepts(f"{method} {path}", found, *expected):
                return found
        return None

    def accepts(self, what: str, found: httpx2.Response, *expected: int) -> bool:
        """Whether an answer is one. A status that no fault explains is a violation."""
        if found.status_code in (200, 202):
            return True
        if found.status_code in expected:
            return True
        if found.status_code in REFUSALS:
            self.report.count(f"requests refused with {found.status_code}")
        else:
            said = f"{what} was answered with {found.status_code}: {found.text[:300]}"
            self.report.violate("http-status", said)
        return False

    def whole(self, item: Mapping[str, Any]) -> None:
        """Wait for a completion, which is right or refused."""
        began = time.time()
        found = self.request("completion", "POST", "/v1/completions", 404, json=item | {"model": "bytes"})
        if found is None:
            self._has_left(began)
        if found is None or found.status_code == 404:  # pruned before it was read
            return
        choice = found.json()["choices"][0]
        self.judge_text("a completion", choice["text"], expected_of(item))
        self.report.count("completions over HTTP")

    def stream(self, item: Mapping[str, Any]) -> None:
        """Read a completion as it comes: in order, to its end, or to an error that is said."""
        server, url = self._address("/v1/completions")
        entered, process, began = time.time(), server.process, time.monotonic()
        read = _Read()
        with (
            self._calling(server, "a stream", "stream"),
            self._http.stream("POST", url, json=item | {"model": "bytes", "stream": True}) as found,
        ):
            if found.status_code == 200:
                read.all_of(found)
            else:
                found.read()
                self.accepts("a stream", found, 404)
        if read.end == "[DONE]":
            self.judge_text("a stream", read.text, expected_of(item))
            self.report.count("streams over HTTP")
            return
        self._has_left(entered)
        if not begins(expected_of(item).text, read.text):
            said = f"a stream broke off with {read.text!r}, which begins no answer"
            self.report.violate("wrong-text", said)
        elif read.text and not read.end and server.is_undisturbed(process, began - 1.0):
            self.report.violate("http-stream", "a stream ended without [DONE] and without an error")

    def _has_left(self, began: float) -> None:
        """A server cancels the job of a caller that it has lost."""
        self.ledger.intents.append(Intent("leave", "", began, time.time()))

    def judge_text(self, what: str, text: str, expected: Answer) -> None:
        """A text is the one that its seed draws."""
        if text != expected.text:
            self.report.violate("wrong-text", f"{what} over HTTP is {text!r}, not {expected.text!r}")

    def item(self) -> dict[str, Any]:
        """A random completion."""
        return http_item(self.draw)

    def _address(self, path: str) -> tuple[Member, str]:
        server = self.draw.choice(self._fleet.servers)
        return server, f"http://127.0.0.1:{server.port}{path}"

    @contextmanager
    def _calling(self, server: Member, what: str, kind: str) -> Iterator[None]:
        """Around a request. Who finds no server, or loses it, has met a fault; else it is a violation."""
        process, began = server.process, time.monotonic()
        try:
            with self.ledger.timing(f"{what} of {server.name}", http_limit(kind), server.name):
                yield
        except httpx2.TransportError as error:
            self.report.count("requests that met no server")
            if server.is_undisturbed(process, began - 1.0):
                self.report.violate("http-transport", f"{what}: {type(error).__name__}: {error}")
            time.sleep(0.2)


def http_item(draw: random.Random) -> dict[str, Any]:
    """A completion's body, without what names the model."""
    words = " ".join("".join(draw.choices("abcdefgh", k=draw.randrange(1, 8))) for _ in range(8))
    item = {"prompt": words, "seed": draw.randrange(1 << 53), "max_tokens": draw.choice((1, 8, 30, 120))}
    return item | {"ignore_eos": draw.random() < 0.3, "temperature": draw.choice((0.0, 0.7, 1.3))}


def expected_of(item: Mapping[str, Any]) -> Answer:
    """The answer to a body."""
    known = {name: item[name] for name in (*SAMPLING, "max_tokens", "ignore_eos") if name in item}
    return answer(item["prompt"], item["seed"], known)


class _Read:
    """What has come of a stream."""

    def __init__(self) -> None:
        self.text = ""
        self.end = ""  # [DONE], or `error` where one was said

    def all_of(self, found: httpx2.Response) -> None:
        """Read to the end, or to where the connection breaks."""
        for line in found.iter_lines():
            data = line.removeprefix("data: ")
            if data == line:  # a comment, an id, the end of an event
                continue
            if data == "[DONE]":
                self.end = data
            elif "error" in (event := json.loads(data)):
                self.end = "error"
            else:
                self.text += "".join(choice["text"] for choice in event["choices"])
