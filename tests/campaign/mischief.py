"""Hostile and contradictory work, handed over beside a night: poison, strange rows, and changes of mind."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import redis

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.errors import InvalidRequestError, InvalidTransitionError, JobNotFoundError
from nightmill.jobs.sql.prune import Prune
from tests.campaign import forged, hostile
from tests.campaign.caller import Caller
from tests.campaign.ledger import Ledger, Promise
from tests.campaign.limits import client_limit
from tests.campaign.model import HOSTILE_CHATS
from tests.campaign.plan import Action
from tests.campaign.report import Report
from tests.campaign.worker import NAN, POISONS
from tests.campaign.world import OTHER_MODEL, World

LONGEST_WORK = 240.0  # of several calls, each of which may meet a hang: no work goes on for longer
KEPT_SECONDS = 4.0  # prune deletes what ended before that


class Mischief:
    """A method for each kind of action. Each runs on a thread of its own, since a server may stand still."""

    def __init__(self, world: World, ledger: Ledger, report: Report) -> None:
        self._world = world
        self._ledger = ledger
        self._report = report
        self._threads: list[tuple[str, threading.Thread]] = []

    def wait(self) -> None:
        """Until what was begun on threads has come to its end."""
        for what, thread in self._threads:
            thread.join(LONGEST_WORK)
            if thread.is_alive():
                self._report.violate("call-hangs", f"{what} has not returned for {LONGEST_WORK:.0f} s")

    def _poison(self, caller: Caller) -> None:
        """One row of a shard ends the process that runs it, each time."""
        items = [caller.request() | {"priority": 5} for _ in range(12)]
        place = caller.draw.randrange(len(items))
        start = caller.draw.choice([*sorted(POISONS), NAN]).decode()
        items[place] = {
            "prompt": f"{start} {caller.words(2)}",
            "seed": 1,
            "max_tokens": 60,
            "priority": 5,
        }
        items[place]["ignore_eos"] = True
        caller.enqueue(items, [index == place for index in range(len(items))])

    def _hostile_chat(self, caller: Caller) -> None:
        """Chats that the model's template refuses, cannot render, or renders for ever."""
        items = [caller.request() | {"priority": 5} for _ in range(8)]
        for index, start in enumerate(caller.draw.sample(HOSTILE_CHATS, 2)):
            items[3 * index] = {"messages": [{"role": "user", "content": start}], "seed": 1}
        caller.enqueue(items, [index in (0, 3) for index in range(len(items))])

    def _hostile_request(self, caller: Caller) -> None:
        """Parameters, prompts and names at and past their limits."""
        for _ in range(10):
            request, fails = hostile.request(caller.draw)
            prompt = request.pop("prompt")
            with caller.calling(f"enqueue with {sorted(request)}", InvalidRequestError):
                job_id = caller.client.enqueue(prompt, **request)
                # Which of them fail is told by name elsewhere: here each is to end, and to harm nobody.
                self._ledger.promised(Promise(job_id, guilty=True) if fails else _free(job_id))

    def _unreadable(self, caller: Caller) -> None:
        """A row that no worker understands, in the middle of a shard."""
        items = [caller.request() | {"priority": 5} for _ in range(9)]
        later = {"scheduled_at": timedelta(seconds=1.5)}
        ids = caller.enqueue(items, **later)
        if not ids:
            return
        values = hostile.rewritten(caller.draw, sqlite=self._world.database == "sqlite")
        cast = "" if self._world.database == "sqlite" else "CAST(:{0} AS json)"
        columns = ", ".join(
            f"{name} = "
            + (
                cast.format(name)
                if cast and name in ("params", "messages", "rendering") and value
                else f":{name}"
            )
            for name, value in values.items()
        )
        self._ledger.promised(_free(ids[4]))  # what is not understood may fail or be half understood
        query = f"UPDATE jobs SET {columns} WHERE id = :job_id AND state = 'queued'"
        self._world.sql(query, values | {"job_id": ids[4]})

    def forged_messages(self, action: Action) -> None:
        self._begin(action, self._forge)

    def _forge(self, caller: Caller) -> None:
        """Messages pushed into the lists that workers read, of several priorities."""
        draw = caller.draw
        ids = list(self._ledger.promises)[-5:]
        try:
            with self._world.redis.client() as client:
                for message in forged.messages(draw, ids):
                    name = draw.choice(("nightmill", "nightmill\x06\x163", "nightmill.bytes\x06\x169"))
                    client.lpush(name, message)
                    self._report.count("forged messages")
        except redis.exceptions.RedisError:
            self._report.count("faults that met another")

    def poison(self, action: Action) -> None:
        self._begin(action, self._poison)

    def hostile_chat(self, action: Action) -> None:
        self._begin(action, self._hostile_chat)

    def hostile_request(self, action: Action) -> None:
        self._begin(action, self._hostile_request)

    def unreadable(self, action: Action) -> None:
        self._begin(action, self._unreadable)

    def forking_client(self, action: Action) -> None:
        self._begin(action, self._fork)

    def batch_games(self, action: Action) -> None:
        self._begin(action, self._play_with_a_batch)

    def chain_games(self, action: Action) -> None:
        self._begin(action, self._play_with_a_chain)

    def prune(self, action: Action) -> None:
        for _ in range(2):  # two at once: somebody has two cron lines
            self._begin(action, self._prune)

    def cancel_and_retry(self, action: Action) -> None:
        self._begin(action, self._change_minds)

    # -- on threads --------------------------------------------------------------------------------

    def _begin(self, action: Action, work: Callable[[Caller], None]) -> None:
        def run() -> None:
            with self._caller(action) as caller, caller.judging(action.name):
                work(caller)

        thread = threading.Thread(target=run, name=action.name, daemon=True)
        self._threads.append((str(action), thread))
        thread.start()

    @contextmanager
    def _caller(self, action: Action) -> Iterator[Caller]:
        caller = Caller(self._world, self._ledger, self._report, random.Random(action.number))
        try:
            yield caller
        finally:
            caller.close()

    def sleep(self, action: Action) -> None:
        self._begin(action, self._pause)

    def wake(self, action: Action) -> None:
        self._begin(action, self._resume)

    def _pause(self, caller: Caller) -> None:
        """One worker, or all of them, end their engine and sleep, in the middle of their work."""
        with caller.calling("pause workers", InvalidRequestError):
            ready = [one.id for one in caller.client.workers() if one.state is WorkerState.READY]
            chosen = ready if caller.draw.random() < 0.3 else ready[:1]
            self._report.count("workers told to sleep", len(caller.client.worker_store.pause(chosen)))

    def _resume(self, caller: Caller) -> None:
        with caller.calling("resume workers", InvalidRequestError):
            caller.client.worker_store.pause(paused=False)

    def _fork(self, caller: Caller) -> None:
        command = [sys.executable, "-m", "tests.campaign.forking", str(caller.draw.randrange(1, 1 << 30))]
        with self._ledger.timing("fork", client_limit("fork")):
            done = subprocess.run(
                command,
                env=self._world.environment,
                capture_output=True,
                text=True,
                timeout=LONGEST_WORK,
                check=False,
            )
        for line in done.stdout.splitlines():
            said = json.loads(line)
            if "id" in said:
                self._ledger.promised(caller.promise(said["id"], said["item"]))
                self._report.count("jobs acknowledged")
            elif "broken" in said or not self._world.troubled:
                self._report.violate("fork", next(iter(said.values())))
        if done.returncode:
            self._report.violate("fork", f"ended with {done.returncode}: {done.stderr[-300:]}")

    def _change_minds(self, caller: Caller) -> None:
        known = list(self._ledger.promises)
        expected = (InvalidTransitionError, JobNotFoundError)
        for job_id in caller.draw.sample(known, min(len(known), 8)):
            with caller.calling("cancel", *expected), self._ledger.intending("cancel", job_id):
                caller.client.cancel(job_id)
            with caller.calling("retry", *expected), self._ledger.intending("retry", job_id):
                caller.client.retry(job_id)

    def _play_with_a_batch(self, caller: Caller) -> None:
        draw, client, name = caller.draw, caller.client, f"games-{caller.draw.randrange(1 << 40)}"
        items = [caller.request() for _ in range(draw.randrange(5, 60))]
        for item in items:
            item.pop("priority")
        expected = (InvalidTransitionError, InvalidRequestError, LookupError)
        with self._ledger.timing("submit_batch", client_limit("submit_batch")):
            which = OTHER_MODEL if draw.random() < 0.2 else None
            batch = client.submit_batch(items, name=name, model=which)
        rows = self._world.sql('SELECT "row", id FROM jobs WHERE batch = :name', {"name": name})
        self._ledger.promised(*(caller.promise(job_id, items[row - 1], batch=name) for row, job_id in rows))
        if len(rows) != len(items):
            self._report.violate("lost", f"batch {name} of {len(items)} rows has {len(rows)}")
        self._report.count("jobs acknowledged", len(rows))
        time.sleep(draw.uniform(0.0, 5.0))
        for _ in range(draw.randrange(3)):
            with caller.calling("cancel batch", *expected), self._ledger.intending("cancel", name):
                batch.cancel()
            time.sleep(draw.uniform(0.0, 1.0))
            with caller.calling("retry batch", *expected), self._ledger.intending("retry", name) as intent:
                intent.done = batch.retry_failed()
        with caller.calling("enqueue into a file's batch", *expected):
            late = {"prompt": "x", "seed": 5, "max_tokens": 3}
            self._ledger.promised(caller.promise(client.enqueue(**late, batch=name), late, batch=name))
        if draw.random() < 0.7:
            give_up_at = time.monotonic() + 40
            while time.monotonic() < give_up_at:
                with self._ledger.timing("status", client_limit("status")):
                    state = batch.status().state
                if state.final:
                    break
                time.sleep(0.2)
            self._delete_beside_retry(caller, name, expected)

    def _play_with_a_chain(self, caller: Caller) -> None:
        """Rows that follow rows that follow rows, and somebody who changes his mind about some of them."""
        draw, client, name = caller.draw, caller.client, f"chain-{caller.draw.randrange(1 << 40)}"
        items = [
            {"prompt": caller.words(3), "seed": draw.randrange(1 << 62), "max_tokens": 20}
            for _ in range(draw.randrange(5, 30))
        ]
        poison = draw.randrange(len(items)) if draw.random() < 0.3 else -1
        if poison >= 0:
            start = draw.choice(sorted(POISONS)).decode()
            items[poison] |= {"prompt": f"{start} {caller.words(1)}", "ignore_eos": True}
            self._report.count("poisons of chains")
        seeds = {"b": draw.randrange(1 << 62), "c": draw.randrange(1 << 62)}
        models = {letter: OTHER_MODEL if draw.random() < 0.2 else None for letter in "abc"}
        batches = [client.submit_batch(items, name=name, model=models["a"])]
        expected = (InvalidTransitionError, InvalidRequestError, LookupError)
        promised = [caller.promise(str(row), item, batch=name) for row, item in enumerate(items)]
        chats: list[list[dict[str, str]]] = []
        self._promise_rows(name, promised, poison)
        for letter, template in (("b", "Rate {{ prior.text }}"), ("c", "{{ prior.messages }}Why?")):
            after, batch = batches[-1].name, f"{name}-{letter}"
            if draw.random() < 0.5:
                time.sleep(draw.uniform(0.0, 2.0))
            with caller.calling("submit_batch", *expected):
                settings = {"seed": seeds[letter], "max_tokens": 20, "model": models[letter]}
                batches.append(client.submit_batch(after=after, template=template, name=batch, **settings))
                texts = [one.answer.text if one.answer else "" for one in promised]
                if chats:
                    answers = [{"role": "assistant", "content": said} for said in texts]
                    why = {"role": "user", "content": "Why?"}
                    chats = [[*chat, said, why] for chat, said in zip(chats, answers, strict=True)]
                else:
                    chats = [[{"role": "user", "content": f"Rate {said}"}] for said in texts]
                promised = [
                    caller.promise(str(row), {"messages": chat, **settings}, batch=batch)  # of any model
                    for row, chat in enumerate(chats)
                ]
                self._promise_rows(batch, promised, poison)
            if batches[-1].name != batch:
                return  # it was refused, or met an outage
        for _ in range(draw.randrange(3)):
            which = draw.choice(batches)
            with caller.calling("cancel batch", *expected), self._ledger.intending("cancel", which.name):
                which.cancel()
            time.sleep(draw.uniform(0.0, 1.0))
            which = draw.choice([which, *batches])
            with caller.calling("retry batch", *expected), self._ledger.intending("retry", which.name):
                which.retry_failed()
            if poison >= 0 and which.name == name:
                self._report.count("poisons of chains")  # it has its attempts again
        if draw.random() < 0.3:
            self._delete_beside_retry(caller, draw.choice(batches).name, expected)

    def _promise_rows(self, name: str, promised: list[Promise], poison: int) -> None:
        """Write down what each row must give; whatever follows a poison can only fail."""
        rows = self._world.sql('SELECT "row", id FROM jobs WHERE batch = :name', {"name": name})
        made = [
            replace(promised[row - 1], job_id=job_id)
            if row - 1 != poison
            else Promise(job_id, guilty=True, batch=name)
            for row, job_id in rows
        ]
        self._ledger.promised(*made)
        self._report.count("jobs acknowledged", len(made))
        self._report.count("rows of chains", len(made))

    def _delete_beside_retry(self, caller: Caller, name: str, expected: tuple[type[Exception], ...]) -> None:
        with self._ledger.timing("get_batch", client_limit("get_batch")):
            batch = caller.client.get_batch(name)

        def retry() -> None:
            with caller.calling("retry batch", *expected), self._ledger.intending("retry", name) as intent:
                intent.done = batch.retry_failed()

        beside = threading.Thread(target=retry)
        if caller.draw.random() < 0.5:
            beside.start()
        with caller.calling("delete batch", *expected), self._ledger.intending("delete", name) as intent:
            intent.done = batch.delete()
        if beside.ident is not None:
            beside.join()

    def _prune(self, caller: Caller) -> None:
        with caller.calling("prune"):  # as one call, which is timed as several
            store = caller.client.batches.store
            cutoff = store.database.now() - timedelta(seconds=KEPT_SECONDS)
            with self._ledger.intending("prune", str(cutoff.timestamp())):
                for _ in Prune(store, cutoff).run():
                    pass


def _free(job_id: str) -> Promise:
    """A job that is to end, however it does."""
    return Promise(job_id, answer=None, guilty=False, free=True)
