"""Webhooks go where they may, once, signed, and in limited time."""

import socket
from ipaddress import ip_address
from typing import Any

import pytest

from nightmill.jobs.base import signing
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.base.targets import Target, parse_allowed
from nightmill.jobs.errors import SettingsError
from nightmill.jobs.webhooks import sending
from nightmill.jobs.webhooks.sending import NotDeliveredError, is_public, post
from tests.support.receiver import receiving

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def test_a_signature_is_that_of_the_specifications_example() -> None:
    body = b'{"test": 2432232314}'
    made = signing.headers(signing.parse_secrets(SECRET), "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert made == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    both = signing.parse_secrets(f"whsec_{'QUJD' * 8},{SECRET}")
    first, second = signing.headers(both, "m", 1, body)["webhook-signature"].split()
    assert first != second and second.startswith("v1,")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://hooks.example/",
        "https://user:password@hooks.example/",
        "https://hooks.example\\@evil.example/",
        "https://hooks.example#@evil.example/",
        "https://hooks.example/night/../admin",
        "https://hooks.example/night/%2e%2E/admin",
        "https://hooks.example/night/..%2Fadmin",
        *(
            f"https://hooks.example/night/{segment}/admin"
            for segment in (
                *(
                    "..;",
                    "..;x=y",
                    "%2e%2e;",
                    "..%3B",
                    "...",
                    "%2E.",
                    ".;x",
                    "%252e%252e",
                    "a%25",
                    "%5c..%5c",
                    "a%2Fb",
                ),
                *(
                    "%ef%bc%8e%ef%bc%8e",
                    "%e2%80%a5",
                    "%c0%ae%c0%ae",
                    "%u002e",
                    "%00",
                    "a%0d%0a",
                    "",
                    "%2e%2e%20",
                ),
            )
        ),
        "https://hooks.example//night/x",
        "https://hooks.example/night//",
        "https://hooks.example:99999/",
        "https://hooks.example/a b",
        "https://hooks.example/\r\nHost: evil",
        "https://höoks.example/",
        "https:///path",
        f"https://hooks.example/{'x' * 2000}",
    ],
)
def test_what_is_no_plain_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"^must "):
        Target.parse(url)


def test_a_list_allows_its_urls_and_what_is_below_them() -> None:
    entries = parse_allowed("https://Hooks.Example/night, http://[::1]:8080")

    def allowed(url: str) -> bool:
        return any(entry.allows(Target.parse(url)) for entry in entries)

    for url in (
        "https://hooks.example/night",
        "https://hooks.example:443/night/a?b=c",
        "https://hooks.example/night/a;v=1/.well-known/%C3%A9%20x/?back=%252e%252e//..",
        "http://[::1]:8080/x",
    ):
        assert allowed(url), url
    for url in (
        *("https://hooks.example/nightly", "https://hooks.example/", "http://hooks.example/night"),
        *("https://hooks.example:444/night", "https://hooks.example.evil/night", "http://[::1]/x"),
    ):
        assert not allowed(url), url
    for name, value, said in (
        ("URLS", "https://a.example,nonsense", "NIGHTMILL_WEBHOOK_URLS: .*entry 2 must be a URL"),
        ("URLS", "https://a.example/?x", "entry 1 must have no query"),
        ("SECRET", "whsec_c2hvcnQ=", "NIGHTMILL_WEBHOOK_SECRET: .*entry 1 is not whsec_ and 24 to 64 bytes"),
    ):
        with pytest.raises(SettingsError, match=said) as refused:
            Settings.from_env({f"NIGHTMILL_WEBHOOK_{name}": value})
        assert "c2hvcnQ" not in str(refused.value)
    assert SECRET not in repr(Settings(webhook_secret=SECRET))
    assert Settings(webhook_secret=SECRET).scrubbed(f"bad {SECRET}") == "bad ***"


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *((one, True) for one in ("93.184.216.34", "2606:2800:220:1::1946", "64:ff9b::5db8:d822")),
        *((one, False) for one in ("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254")),
        *((one, False) for one in ("0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255", "240.0.0.1")),
        *((one, False) for one in ("::", "::1", "fe80::1", "fc00::1", "fec0::1", "ff02::1")),
        # What stands for an address of the fourth version: mapped, NAT64, 6to4, Teredo.
        *((one, False) for one in ("::ffff:127.0.0.1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::")),
        ("2001:0:4136:e378:8000:63bf:80ff:fffe", False),
        *((one, False) for one in ("192.88.99.1", "192.0.0.200", "3fff::1", "3fff:fff::1", "5f00::1")),
        *((one, False) for one in ("64:ff9b:1::1", "100:0:0:1::1", "2001:db8::1", "198.51.100.1")),
    ],
)  # fmt: skip
def test_only_addresses_of_the_internet_are_public(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) is public


def test_a_post_goes_to_one_address_and_follows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        target = Target.parse(f"{receiver.url}/night?of=november")
        with pytest.raises(NotDeliveredError, match="not public"):
            post(target, {}, b"x")
        assert receiver.received == []
        receiver.statuses = [302]
        assert post(target, {"webhook-id": "m"}, b"{}", private=True) == 302
        ((path, headers, body),) = receiver.received
        assert (path, body, headers["webhook-id"]) == ("/night?of=november", b"{}", "m")
        assert headers["host"] == target.authority

        # A name that is public when it is looked at, and this machine when it is called.
        asked: list[str] = []
        resolve = socket.getaddrinfo

        def rebinding(host: str, *rest: Any, **more: Any) -> Any:
            asked.append(host)
            return resolve("93.184.216.34" if len(asked) == 1 else "127.0.0.1", *rest, **more)

        connected: list[str] = []

        def connect(address: tuple[str, int], *_: Any) -> socket.socket:
            connected.append(address[0])
            raise ConnectionRefusedError(111, "Connection refused")

        monkeypatch.setattr(socket, "getaddrinfo", rebinding)
        monkeypatch.setattr(socket, "create_connection", connect)
        with pytest.raises(NotDeliveredError, match=r"^connection refused$"):
            post(Target.parse(f"http://rebinding.example:{target.port}/"), {}, b"x")
        assert (asked, connected) == (["rebinding.example"], ["93.184.216.34"])


def test_who_answers_byte_by_byte_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "SECONDS", 0.2)
    with receiving() as receiver:
        receiver.dripping.set()
        with pytest.raises(NotDeliveredError, match="no answer within"):  # it would drip for ever
            post(Target.parse(receiver.url), {}, b"x", private=True)
