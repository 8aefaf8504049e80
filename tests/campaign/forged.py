"""Messages that Nightmill never sent, as a stranger (or a bug) may push them into its Redis lists."""

import base64
import json
import random
from typing import Any

TASK = "nightmill.run_shard"


def messages(draw: random.Random, job_ids: list[str]) -> list[bytes]:
    """All of a fixed set, and some mutated from a sound one, in a random order."""
    forged = [
        b"not json", b'""', b"5", b"[]", b"null", b"{}", b"\xff\xfe", b"", b"[" * 5000,
        _message(headers={"id": {"a": 1}}),
        _message(headers={"id": None}),
        _message(headers={"task": "os.system"}),
        _message(headers={"task": None}),
        _message(headers={"lang": "py"}, keep=False),
        _message(headers={"eta": "yesterday"}),
        _message(headers={"expires": "x"}),
        _message(headers={"retries": "x"}),
        _message(headers={"timelimit": 7}),
        _message(body="%%% not base64 %%%"),
        _message(body=base64.b64encode(b"\x80pickle").decode()),
        _message(body=_encoded({"a": 1})),
        _message(body=_encoded([["0" * 32], {}, None])),
        _message(body=_encoded([[7], {}, {}])),
        _message(body=_encoded([[[1, None, {"a": 2}]], {}, {}])),
        _message(body=_encoded([[["\x00"]], {}, {}])),
        _message(body=_encoded([[["x" * 100_000]], {}, {}])),
        _message(body=_encoded([[job_ids], {}, {}])),
        _message(body=_encoded([[job_ids * 50], {}, {}])),
        _message(body=_encoded([[[]], {"job_ids": job_ids}, {}])),
        _message(properties={"delivery_tag": None}),
        _message(properties={"delivery_info": "x"}),
        _message(properties={"delivery_info": None}),
        _message(properties={"body_encoding": "rot13"}),
        _message(properties={"priority": "x"}),
        _message(envelope={"content-type": "application/x-python-serialize"}),
        _message(envelope={"content-encoding": "klingon"}),
        _message(envelope={"properties": None}),
        _message(envelope={"headers": None}),
        _message(envelope={"headers": [1]}),
    ]  # fmt: skip
    sound = _message(body=_encoded([[job_ids], {}, {}]))
    for _ in range(12):
        broken = bytearray(sound)
        for _ in range(draw.randrange(1, 6)):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        forged.append(bytes(broken))
    draw.shuffle(forged)
    return forged


def _encoded(body: Any) -> str:
    return base64.b64encode(json.dumps(body).encode()).decode()


def _message(
    *,
    headers: dict[str, Any] | None = None,
    properties: dict[str, Any] | None = None,
    envelope: dict[str, Any] | None = None,
    body: str | None = None,
    keep: bool = True,
) -> bytes:
    """A sound message of Celery's protocol 2, but for what is said."""
    usual = {"lang": "py", "task": TASK, "id": "f" * 32, "retries": 0, "eta": None, "expires": None,
             "timelimit": [None, None], "root_id": "f" * 32, "parent_id": None, "group": None}  # fmt: skip
    sound: dict[str, Any] = {
        "body": _encoded([[["0" * 32]], {}, {}]) if body is None else body,
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": (usual if keep else {}) | (headers or {}),
        "properties": {
            "correlation_id": "f" * 32, "delivery_mode": 2, "priority": 4, "body_encoding": "base64",
            "delivery_info": {"exchange": "", "routing_key": "nightmill"}, "delivery_tag": "t" * 32,
        } | (properties or {}),
    }  # fmt: skip
    return json.dumps(sound | (envelope or {})).encode()
