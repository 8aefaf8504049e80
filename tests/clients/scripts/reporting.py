"""Cases of a client, run in its own interpreter: nothing but the standard library is imported here.

A case is a function that asserts; `run_cases` runs each and writes a line of JSON about it.
"""

import asyncio
import inspect
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

URL = os.environ["CLIENTS_URL"]
BASE_URL = f"{URL}/v1"
MODEL = os.environ["CLIENTS_MODEL"]
KEY = os.environ["CLIENTS_KEY"]
FOLDER = os.environ["CLIENTS_FOLDER"]
MODEL_FOLDER = os.environ["CLIENTS_MODEL_FOLDER"]
CASE_SECONDS = 180

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
            "required": ["city"],
        },
    },
}
"""A function that models may call; its only argument is one of two cities, so that small models end it."""

_cases: list[Callable[[], Any]] = []


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register a case; its name is the function's. It may be a coroutine function."""
    _cases.append(function)
    return function


def run_cases() -> None:
    """Run every case, or those that CLIENTS_ONLY names, and report each."""
    only = os.environ.get("CLIENTS_ONLY", "").split()
    for function in _cases:
        if only and function.__name__ not in only:
            continue
        began = time.monotonic()
        error = _error_of(function)
        seconds = round(time.monotonic() - began, 1)
        _write({"case": function.__name__, "seconds": seconds, "error": error})
    _write({"end": True})


def _error_of(function: Callable[[], Any]) -> str:
    """What went wrong, in a line; empty if nothing did."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(CASE_SECONDS)
    try:
        outcome = function()
        if inspect.iscoroutine(outcome):
            asyncio.run(outcome)
    except Exception as error:
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)
        line = next(
            (
                f"line {frame.lineno}, {frame.line}"
                for frame in reversed(where)
                if frame.filename == sys.argv[0]
            ),
            "",
        )
        return re.sub(r"\s+", " ", f"{type(error).__name__}: {error} ({line})")[:1500]
    finally:
        signal.alarm(0)
    return ""


def _too_long(*_: object) -> None:
    raise TimeoutError(f"no end after {CASE_SECONDS} s")


def _write(report: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
