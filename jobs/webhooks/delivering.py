"""Delivery of webhooks: any worker, server or `nightmill run` with the secret delivers for all batches.

A message reports the end of a batch and its status. An unreachable receiver delays its own messages, and
others' by one attempt at a time.
"""

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from threading import Event, Thread
from typing import Any

from nightmill.jobs.base import signing
from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.base.targets import Target, parse_allowed
from nightmill.jobs.batches.batches import Batches
from nightmill.jobs.errors import BatchNotFoundError, DatabaseError, InvalidParameterError
from nightmill.jobs.reply.batch_status import status_values
from nightmill.jobs.sql.files import FILE_PREFIX
from nightmill.jobs.sql.http_batches import BATCH_PREFIX, HttpBatchStore
from nightmill.jobs.sql.webhooks import Webhook, WebhookStore
from nightmill.jobs.webhooks import sending

log = logging.getLogger("nightmill.webhooks")

PAUSES = tuple(
    timedelta(seconds=seconds)
    for seconds in (5, 30, 120, 600, 1800, 3600, *(3 * 3600,) * 3, *(6 * 3600,) * 2, 12 * 3600)
)
"""Pauses after failed attempts; after the last one the webhook is given up, a day and a half after the
first."""
LOOK_SECONDS = 2.0
_LEASE = timedelta(seconds=60)  # longer than an attempt takes
_AT_ONCE = 20  # webhooks per round
_GONE = 410


def check_allowed(settings: Settings, url: object) -> str:
    """Return the URL if it is an allowed webhook. Raises InvalidParameterError for the field `webhook`."""
    if not isinstance(url, str):
        raise InvalidParameterError("webhook: must be a URL as a text", field="webhook")
    try:
        target = Target.parse(url)
    except ValueError as error:
        raise InvalidParameterError(f"webhook: {error}", field="webhook") from None
    if not _is_allowed(settings, target):
        raise InvalidParameterError(
            "webhook: is not below one of the URLs that NIGHTMILL_WEBHOOK_URLS allows", field="webhook"
        )
    return url


class Courier:
    """Delivers due webhooks."""

    def __init__(self, batches: Batches, settings: Settings) -> None:
        self._batches = batches
        self._settings = settings
        self._secrets = signing.parse_secrets(settings.webhook_secret)
        self._http_batches = HttpBatchStore(batches.store.database)
        self._webhooks = WebhookStore(batches.store.database)
        self._over = Event()

    def __bool__(self) -> bool:
        """Return True if it can deliver: there is a secret and an allowed URL."""
        return bool(self._secrets and self._settings.webhook_urls)

    def webhook_of(self, url: object) -> Callable[[str], object]:
        """Return a function that registers a webhook for a batch, given the batch's name; None: of none.

        Raises InvalidParameterError unless the URL is allowed.
        """
        if url is None:
            return lambda name: None
        allowed = check_allowed(self._settings, url)
        return lambda name: self._webhooks.add(name, allowed)

    def start(self) -> None:
        """Poll on a background thread, if it can deliver anything."""
        if self:
            Thread(target=self._run, name="webhooks", daemon=True).start()

    def stop(self) -> None:
        """Begin no further delivery. One under way is not awaited: if it is cut off, another process repeats
        it."""
        self._over.set()

    def look(self, batch: str | None = None) -> None:
        """Deliver the due webhooks of one batch, or of all."""
        if not self:
            return
        away: set[str] = set()  # hosts that did not answer in this round
        for webhook in self._webhooks.due(_AT_ONCE, batch):
            host = webhook.url.partition("://")[2].partition("/")[0]
            if self._over.is_set():
                return
            if host in away:
                self._webhooks.postpone(webhook, PAUSES[0])
            elif self._webhooks.take(webhook, _LEASE) and not self._deliver(webhook):
                away.add(host)

    def _run(self) -> None:
        complaint = ""
        while not self._over.is_set():
            try:
                self.look()
                complaint = ""
            except Exception as error:
                if not self._over.is_set() and str(error) != complaint:  # once, not in every round
                    complaint = str(error)
                    expected = isinstance(error, DatabaseError)
                    log.warning("webhooks wait: %s", error, exc_info=not expected)
            self._over.wait(LOOK_SECONDS)

    def _deliver(self, webhook: Webhook) -> bool:
        """Make an attempt; returns False if the host did not answer."""
        try:
            status = self._send(webhook)
        except (sending.NotDeliveredError, ValueError) as error:
            status, why = 0, str(error)
        else:
            if 200 <= status < 300:
                self._webhooks.delivered(webhook)
                log.info("batch %s: its webhook was delivered", webhook.batch)
                return True
            why = f"it was answered with status {status}"
        again = webhook.attempts < len(PAUSES) and status != _GONE
        self._webhooks.failed(webhook, why, PAUSES[webhook.attempts] if again else None)
        then = "tried again" if again else "given up"
        log.warning("batch %s: its webhook was not delivered, and is %s: %s", webhook.batch, then, why)
        return status != 0

    def _send(self, webhook: Webhook) -> int:
        target = Target.parse(webhook.url)
        if not _is_allowed(self._settings, target):  # not any more, or not by this process
            raise sending.NotDeliveredError("NIGHTMILL_WEBHOOK_URLS does not allow its URL here")
        body = json.dumps(self._message(webhook.batch), default=_plain).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "nightmill"}
        headers |= signing.headers(self._secrets, f"msg_{webhook.id}", int(time.time()), body)
        return sending.post(target, headers, body, private=self._settings.webhook_private)

    def _message(self, name: str) -> JsonObject:
        """Return the message about an ended batch."""
        data: JsonObject = {"name": name}
        with suppress(BatchNotFoundError):  # no row of its file could be entered
            data |= status_values(self._batches.get(name).status())
        over_http = None
        if name.startswith(BATCH_PREFIX):
            over_http = self._http_batches.get(name.removeprefix(BATCH_PREFIX))
        if over_http is not None:
            data.pop("source", None)  # a path of the server
            data |= {
                "id": over_http.batch,
                "status": str(over_http.status),
                "output_file": over_http.output_file and FILE_PREFIX + over_http.output_file,
                "error_file": over_http.error_file and FILE_PREFIX + over_http.error_file,
            }
        return {"type": "batch.ended", "timestamp": datetime.now(UTC).isoformat(), "data": data}


def _is_allowed(settings: Settings, target: Target) -> bool:
    return any(entry.allows(target) for entry in parse_allowed(settings.webhook_urls))


def _plain(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
