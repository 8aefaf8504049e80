"""API keys with names, rights and tiers, compared as hashes.

`NIGHTMILL_API_KEYS` has NAME=KEY or NAME:RIGHT=KEY, separated by commas; a key may be given as sha256:DIGEST,
so that it cannot be read there. With NAME:flex=KEY or NAME:RIGHT:flex=KEY, calls have the tier `flex` by
default. Entries with one name share their jobs and files, each with its own right: for example an old and a
new key of a program, or a read-only key. Without any key everybody may do everything, which is for loopback
only.
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
from nightmill.jobs.server.tiers import Tier

_ENTRY = re.compile(
    r"(?P<name>[A-Za-z0-9._-]{1,64})(?::(?P<right>(?!flex\b)[a-z]+))?(?P<flex>:flex)?=(?P<key>\S+)"
)
_HASHED = "sha256:"
_DIGEST = re.compile(rf"{_HASHED}([0-9a-f]{{64}})")
_SHORTEST_KEY = 16
_HEADERS = "Authorization: Bearer KEY, or X-Api-Key: KEY"


class Right(StrEnum):
    """The right of a key."""

    SUBMIT = "submit"  # submit jobs and files, and see one's own
    READ = "read"  # see all of them
    ADMIN = "admin"  # both, and change all of them


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request; `name` is None on a server without keys. `tier` is the default for its
    calls."""

    name: str | None
    right: Right
    tier: Tier = Tier.DEFAULT

    def sees(self, owner: str | None) -> bool:
        """Return True if it may see jobs and files of this owner."""
        return self.right is not Right.SUBMIT or owner == self.name

    @property
    def only(self) -> str | None:
        """The only owner whose jobs and files it may see; None: all owners."""
        return self.name if self.right is Right.SUBMIT else None

    def may_change(self, owner: str | None) -> bool:
        """Return True if it may change jobs, batches and files of this owner."""
        return self.right is Right.ADMIN or (self.right is not Right.READ and owner == self.name)

    def need_to_change(self, owner: str | None) -> None:
        """Raise HttpError unless it may change jobs and files of this owner."""
        if not self.may_change(owner):
            raise HttpError(403, "this key may only read", code="insufficient_rights")

    def need_to_submit(self) -> None:
        """Raise HttpError unless it may submit jobs."""
        if self.right is Right.READ:
            raise HttpError(403, "this key may only read", code="insufficient_rights")


ANYBODY = Caller(None, Right.ADMIN)


class ApiKeys:
    """All keys by digest."""

    def __init__(self, callers: dict[bytes, Caller]) -> None:
        self._callers = callers

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """Parse the setting; raises SettingsError, which shows no key."""
        callers: dict[bytes, Caller] = {}
        for number, entry in enumerate(filter(None, (one.strip() for one in (text or "").split(","))), 1):
            found = _ENTRY.fullmatch(entry)
            if found is None:
                raise _bad(number, "is not NAME=KEY, NAME:RIGHT=KEY or NAME:RIGHT:flex=KEY")
            right = found["right"] or Right.SUBMIT
            if right not in set(Right):
                raise _bad(number, f"has the right {right!r}; there are {', '.join(Right)}")
            digest = _DIGEST.fullmatch(found["key"].lower())
            if digest is None and found["key"].startswith(_HASHED):
                raise _bad(number, f"has {_HASHED} and not the 64 hexadecimal digits of a SHA-256 after it")
            if digest is None and len(found["key"]) < _SHORTEST_KEY:
                raise _bad(number, f"has a key of fewer than {_SHORTEST_KEY} characters; make a longer one")
            hashed = bytes.fromhex(digest[1]) if digest else hashlib.sha256(found["key"].encode()).digest()
            if hashed in callers:
                raise _bad(number, "has the key of another entry")
            callers[hashed] = Caller(
                found["name"], Right(right), Tier.FLEX if found["flex"] else Tier.DEFAULT
            )
        return cls(callers)

    def __bool__(self) -> bool:
        return bool(self._callers)

    def caller(self, request: Request) -> Caller:
        """Return the sender of a request; raises HttpError unless it has a valid key."""
        if not self._callers:
            return ANYBODY
        key = _key_of(request)
        found = self.find(key)
        if found is None:
            said = "this key is not known here" if key else f"give a key: {_HEADERS}"
            raise HttpError(401, said, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found[1]

    def find(self, key: str) -> tuple[bytes, Caller] | None:
        """Return digest and holder of a key from a header or form; None if it is unknown."""
        hashed = hashlib.sha256(key.encode("latin-1", "replace")).digest()
        found = None
        for digest, caller in self._callers.items():  # compare with all, in constant time
            if hmac.compare_digest(digest, hashed):
                found = digest, caller
        return found

    def holders(self) -> Iterator[tuple[bytes, Caller]]:
        """Yield all digests with their holders."""
        yield from self._callers.items()


def _key_of(request: Request) -> str:
    """Return the key of a request; X-Api-Key is used if there is no bearer token."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return (key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")).strip()


def _bad(number: int, said: str) -> SettingsError:
    return SettingsError(f"NIGHTMILL_API_KEYS: entry {number} {said}")
