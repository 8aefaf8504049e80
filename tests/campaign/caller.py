"""A caller of Nightmill's client that writes down every answer, and judges every error."""

import random
import string
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import BrokerError, DatabaseError, DatabaseUnreachableError, NightmillError
from tests.campaign.ledger import Ledger, Promise
from tests.campaign.limits import client_limit
from tests.campaign.report import Report
from tests.campaign.texts import SAMPLING, answer
from tests.campaign.world import World

warnings.filterwarnings("ignore", message=".*kept in the database")


class Caller:
    """One client, one source of random requests. Each thread has its own."""

    def __init__(self, world: World, ledger: Ledger, report: Report, draw: random.Random) -> None:
        self.client = Client(world.settings)
        self.ledger = ledger
        self.report = report
        self.draw = draw
        self._world = world

    def close(self) -> None:
        """Close its connections."""
        self.client.close()

    @contextmanager
    def calling(self, what: str, *expected: type[Exception]) -> Iterator[None]:
        """Around one call, which is timed, and its errors judged: see `judging`."""
        with self.judging(what, *expected), self.ledger.timing(what, client_limit(what)):
            yield

    @contextmanager
    def judging(self, what: str, *expected: type[Exception]) -> Iterator[None]:
        """`expected` errors are answers; that the database is away is one while it may be."""
        try:
            yield
        except expected:
            self.report.count("calls refused")
        except (DatabaseUnreachableError, BrokerError) as error:
            self.report.count("calls that met an outage")
            if isinstance(error, DatabaseError) and not self._world.troubled:
                self.report.violate("unreachable", f"{what}: {error}")
            if "deadlock" in str(error) or "autocommit" in str(error):
                self.report.violate("deadlock", f"{what}: {error}")
            time.sleep(0.2)
        except NightmillError as error:
            self.report.violate("call-failed", f"{what}: {type(error).__name__}: {error}")
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
            self.report.violate("traceback", f"{what}: {type(error).__name__} at {where}: {error}"[:500])

    # -- requests ----------------------------------------------------------------------------------

    def request(self) -> dict[str, Any]:
        """A random prompt or chat, with parameters and a seed: an item of `enqueue_many`."""
        draw = self.draw
        item: dict[str, Any] = {"seed": draw.randrange(1 << 62), "max_tokens": draw.choice((1, 8, 30, 120))}
        text = self.words(draw.randrange(1, 30))
        if draw.random() < 0.3:
            item["messages"] = [{"role": "user", "content": text}]
        else:
            item["prompt"] = text
        if draw.random() < 0.5:
            item |= {"temperature": draw.choice((0.0, 0.7, 1.3)), "top_k": draw.choice((0, 5, 40))}
        if draw.random() < 0.3:
            item |= {"top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
        if draw.random() < 0.3:
            item["stop"] = draw.sample(("a", "Q", "xy", "e ", "~", "zz"), draw.randrange(1, 3))
        if draw.random() < 0.05:
            item["n"] = draw.randrange(2, 5)  # answers, of which the first is in the row
        item["ignore_eos"] = draw.random() < 0.3
        return item | {"priority": draw.randrange(10)}

    def words(self, count: int) -> str:
        """Words of small letters: no poison begins like that."""
        letters = string.ascii_lowercase
        return " ".join(
            "".join(self.draw.choices(letters, k=self.draw.randrange(1, 8))) for _ in range(count)
        )

    def promise(self, job_id: str, item: Mapping[str, Any], **more: Any) -> Promise:
        """What an accepted innocent request must give."""
        known = {name: item[name] for name in (*SAMPLING, "max_tokens", "stop", "ignore_eos") if name in item}
        prompt = item["prompt"] if "prompt" in item else item["messages"]
        return Promise(job_id, answer(prompt, item["seed"], known), **more)

    def enqueue(
        self, items: Sequence[Mapping[str, Any]], guilty: Sequence[bool] = (), **more: Any
    ) -> list[str]:
        """Hand requests over, and write down what was acknowledged; empty where the call failed."""
        ids: list[str] = []
        with self.calling("enqueue_many"):
            ids = list(self.client.enqueue_many(items, **more))
            accused = [*guilty, *[False] * len(items)]
            self.ledger.promised(
                *(
                    Promise(job_id, guilty=True)
                    if accused[index]
                    else self.promise(job_id, items[index], batch=more.get("batch"))
                    for index, job_id in enumerate(ids)
                )
            )
            self.report.count("jobs acknowledged", len(ids))
        return ids
