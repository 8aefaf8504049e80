"""Makes the pictures of docs/page.md: a night that is made up, and its pages in Chromium.

    python -m tools.pictures [--into docs/page] [--all]

With --all every page is drawn in light, dark and on a phone: what to look at after a change of the style.
Needs Chromium and the extra `dev`.
"""

import argparse
import math
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvicorn
from playwright.sync_api import Browser, sync_playwright
from sqlalchemy import insert

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.reply.batch_status import BatchRecord
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server.app import make_app
from nightmill.jobs.server.keys import ApiKeys
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.jobs import JOBS, chunked
from tests.browser.conftest import find_chromium
from tests.support.servers import free_port, wait_until

MODEL = "qwen2.5-7b-instruct-q4_k_m"
WORKERS = (("a" * 32, "mill-1", 4711, 61.0, 512.4, 5230.0), ("b" * 32, "mill-2", 902, 57.0, 488.9, 5105.5))
SIZES = {"wide": (1180, 800), "phone": (390, 780)}
PICTURES = (("night", "light", "wide"), ("batch", "dark", "wide"), ("night", "dark", "phone"))
TEXT = (
    "A kettle that knows when to stop: 1.7 litres, brushed steel, and a lid that opens with one hand. "
    "It boils four cups in under three minutes and keeps quiet about it."
)


def main() -> None:
    """Make up a night, and draw it."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--into", type=Path, default=Path("docs/page"))
    options.add_argument("--all", action="store_true", help="every page, in light, dark and on a phone")
    asked = options.parse_args()
    asked.into.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="nightmill-pictures-") as home:
        settings = Settings(data_dir=Path(home), broker_url="redis://127.0.0.1:1/0")
        with Client(settings) as client:
            client.database.migrate()
            paths = make_up(client)
            with served(client) as url, sync_playwright() as playwright:
                path = find_chromium()
                browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
                everything = [
                    (page, scheme, size) for page in paths for scheme in ("light", "dark") for size in SIZES
                ]
                for page, scheme, size in everything if asked.all else PICTURES:
                    file = asked.into / f"{page}-{scheme}-{size}.png"
                    draw(browser, url + paths[page], file, scheme, size, whole=asked.all)
                    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")
                browser.close()


def make_up(client: Client) -> dict[str, str]:
    """A table in the middle of a night; returns the path of each page."""
    chance, ids, now = random.Random(7), IdSource(), client.database.now()
    for worker, host, pid, celsius, watts, speed in WORKERS:
        claims = Claims(client.database, worker)
        claims.register(host, pid, MODEL, "NVIDIA H100 80GB HBM3")
        claims.beat(WorkerState.READY, stats=stats(celsius, watts, speed))
    evening = now - timedelta(hours=8, minutes=40)
    enter(client, "support-mails", 9_000, evening, timedelta(hours=3), chance, ids, done=1.0)
    live = enter(
        client,
        "product-descriptions",
        30_000,
        evening + timedelta(hours=3, minutes=10),
        timedelta(hours=5, minutes=30),
        chance,
        ids,
        done=0.82,
        deadline=now + timedelta(hours=3),
    )
    enter(
        client,
        "translations-fr",
        2_000,
        now,
        timedelta(0),
        chance,
        ids,
        done=0.0,
        begins=now + timedelta(hours=2),
    )
    return {
        "night": "/",
        "batch": "/batch?name=product-descriptions",
        "failed": "/batch?name=product-descriptions&state=failed",
        "job": f"/job?id={live}",
        "hand-in": "/hand-in",
        "try": "/try",
        "none": "/batch?name=nobody",
    }


def stats(celsius: float, watts: float, speed: float) -> dict[str, Any]:
    """What a busy worker says with its heartbeat."""
    return {
        "running": 1_021,
        "waiting": 43,
        "in_flight": 1_064,
        "pages": 65_536,
        "free_pages": 9_480,
        "steps": 812_400,
        "step_sequences": 801_000_000,
        "generated_tokens": 801_000_000,
        "tokens_per_second": speed,
        "temperature": celsius,
        "power": watts,
        "utilization": 0.98,
        "memory_used": 71 * 2**30,
        "memory": 80 * 2**30,
    }


def enter(
    client: Client,
    name: str,
    count: int,
    began: datetime,
    duration: timedelta,
    chance: random.Random,
    ids: IdSource,
    *,
    done: float,
    deadline: datetime | None = None,
    begins: datetime | None = None,
) -> str:
    """A batch of which a part is done; returns the id of one of its rows."""
    defaults = JobSpec.defaults(
        {"batch": name, "max_tokens": 600, "scheduled_at": begins, "deadline": deadline}
    )
    client.batches.store.enter(
        BatchRecord(name, MODEL, began, format="jsonl", row_count=count, scheduled_at=begins)
    )
    blank = dict.fromkeys(
        ("text", "stop_reason", "prompt_tokens", "completion_tokens", "error", "started_at", "finished_at")
    )
    rows: list[dict[str, Any]] = []
    over = int(count * done)
    for number in range(1, count + 1):
        prompt = f"Describe product {number} of our catalogue in two sentences, without superlatives."
        row = JobSpec.parse(prompt, defaults).row(ids.draw(), began, 3) | blank
        row |= {"row": number, "custom_id": f"sku-{40_000 + number}", "worker": None}
        if number <= over:
            place = number / over + 0.008 * math.sin(number / over * 40)
            ended = min(began + duration * min(max(place, 0.0), 1.0), began + duration)
            row |= {
                "state": "succeeded",
                "attempt": 1,
                "stop_reason": "eos",
                "text": TEXT,
                "prompt_tokens": 31,
                "completion_tokens": chance.randint(180, 600),
                "worker": WORKERS[number % 2][0],
                "started_at": ended - timedelta(seconds=14),
                "finished_at": ended,
            }
            if done < 1 and number % 1_900 == 7:
                said = "the prompt has 33,102 tokens, and the model's context holds 32,768"
                row |= {"state": "failed", "stop_reason": "error", "text": None, "error": said}
        elif done and number <= over + 2_000:
            row |= {"state": "running", "attempt": 1, "worker": WORKERS[number % 2][0], "started_at": began}
        rows.append(row)
    for group in chunked(iter(rows), 5_000):
        with client.database.write() as connection:
            connection.execute(insert(JOBS), group)
    return str(rows[0]["id"])


@contextmanager
def served(client: Client) -> Iterator[str]:
    """A server of that night."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(make_app(client, ApiKeys.parse(None)), port=port, log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


def draw(browser: Browser, url: str, file: Path, scheme: str, size: str, *, whole: bool) -> None:
    """One picture."""
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(url)
    page.screenshot(path=file, full_page=whole)
    context.close()


if __name__ == "__main__":
    main()
