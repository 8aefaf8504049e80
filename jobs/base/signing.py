"""Webhook signatures as specified by Standard Webhooks: HMAC-SHA256 of id, time and body."""

import base64
import binascii
import hashlib
import hmac
import re

_PREFIX = "whsec_"
_LEAST, _MOST = 24, 64  # bytes, from the specification


def parse_secrets(text: str | None) -> tuple[bytes, ...]:
    """Parse keys written as whsec_BASE64 and separated by commas. Raises ValueError, which shows no key."""
    secrets = []
    for number, entry in enumerate(filter(None, re.split(r"[,\s]+", text or "")), 1):
        try:
            key = base64.b64decode(entry.removeprefix(_PREFIX), validate=True)
        except binascii.Error:
            key = b""
        if not entry.startswith(_PREFIX) or not _LEAST <= len(key) <= _MOST:
            raise ValueError(
                f"entry {number} is not {_PREFIX} and {_LEAST} to {_MOST} bytes in base64; make one by "
                f"echo {_PREFIX}$(openssl rand -base64 32)"
            )
        secrets.append(key)
    return tuple(secrets)


def headers(secrets: tuple[bytes, ...], message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the three headers, with one signature for each secret, so that receivers can rotate theirs."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    signatures = (base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in secrets)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }
