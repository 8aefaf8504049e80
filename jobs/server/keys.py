"""Who may do what: keys with names and rights, compared as hashes.

`NIGHTMILL_API_KEYS` has NAME=KEY or NAME:RIGHT=KEY, separated by commas; a key may be given as sha256:DIGEST,
so that nobody can read it there. Entries with one name share what they own, each with its own right: an old
and a new key of a program, say, or one more that may only read. Without any key everybody may do everything:
that is for loopback alone.
"""

import hashlib
import hmac
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from starlette.requests import Request

from nightmill.jobs.errors import SettingsError
from nightmill.jobs.server.errors import HttpError

_ENTRY = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64})(?::(?P<right>[a-z]+))?=(?P<key>\S+)")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_SHORTEST_KEY = 16


class Right(StrEnum):
    """What a key allows."""

    SUBMIT = "submit"  # hand in jobs and files, and see one's own
    READ = "read"  # see all of them
    ADMIN = "admin"  # both, and change all of them


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request; `name` is None where no keys are needed."""

    name: str | None
    right: Right

    def sees(self, owner: str | None) -> bool:
        """Whether a job or a file of this owner is there for it."""
        return self.right is not Right.SUBMIT or owner == self.name

    @property
    def only(self) -> str | None:
        """The owner whose jobs and files alone are there for it; None: everybody's."""
        return self.name if self.right is Right.SUBMIT else None

    def may_change(self, owner: str | None) -> bool:
        """Whether it may change a job, a batch or a file of this owner."""
        return self.right is Right.ADMIN or (self.right is not Right.READ and owner == self.name)

    def need_to_change(self, owner: str | None) -> None:
        """Raise HttpError unless it may change a job or a file of this owner."""
        if not self.may_change(owner):
            raise HttpError(403, "this key may only read", code="insufficient_rights")

    def need_to_submit(self) -> None:
        """Raise HttpError unless it may hand in jobs."""
        if self.right is Right.READ:
            raise HttpError(403, "this key may only read", code="insufficient_rights")


ANYBODY = Caller(None, Right.ADMIN)


class Keys:
    """All keys, by their digests."""

    def __init__(self, callers: dict[bytes, Caller]) -> None:
        self._callers = callers

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """What a setting says; raises SettingsError, which shows no key."""
        callers: dict[bytes, Caller] = {}
        for number, entry in enumerate(filter(None, (one.strip() for one in (text or "").split(","))), 1):
            found = _ENTRY.fullmatch(entry)
            if found is None:
                raise _bad(number, "is not NAME=KEY or NAME:RIGHT=KEY")
            right = found["right"] or Right.SUBMIT
            if right not in set(Right):
                raise _bad(number, f"has the right {right!r}; there are {', '.join(Right)}")
            digest = _DIGEST.fullmatch(found["key"])
            if digest is None and len(found["key"]) < _SHORTEST_KEY:
                raise _bad(number, f"has a key of fewer than {_SHORTEST_KEY} characters; make a longer one")
            hashed = bytes.fromhex(digest[1]) if digest else hashlib.sha256(found["key"].encode()).digest()
            if hashed in callers:
                raise _bad(number, "has the key of another entry")
            callers[hashed] = Caller(found["name"], Right(right))
        return cls(callers)

    def __bool__(self) -> bool:
        return bool(self._callers)

    def caller(self, request: Request) -> Caller:
        """Who sent a request; raises HttpError unless it has one of the keys."""
        if not self._callers:
            return ANYBODY
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        found = self.find(key.strip())
        if found is None or scheme.lower() != "bearer":
            said = "give a key: Authorization: Bearer KEY" if not key else "this key is not known here"
            raise HttpError(401, said, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found[1]

    def find(self, key: str) -> tuple[bytes, Caller] | None:
        """The digest and the holder of a key, as a header or a form has it; None if it is not known."""
        hashed = hashlib.sha256(key.encode("latin-1", "replace")).digest()
        found = None
        for digest, caller in self._callers.items():  # all of them, whichever it is
            if hmac.compare_digest(digest, hashed):
                found = digest, caller
        return found

    def holders(self) -> Iterator[tuple[bytes, Caller]]:
        """All digests, and whose they are."""
        yield from self._callers.items()


def _bad(number: int, said: str) -> SettingsError:
    return SettingsError(f"NIGHTMILL_API_KEYS: entry {number} {said}")
