"""Secrets of URLs are shown nowhere: not in errors, not in representations, not in logs, not by `check`."""

import json
import logging
import traceback
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import settings as effort
from hypothesis import strategies as st
from sqlalchemy.exc import OperationalError

from nightmill.jobs.base.printable import PrintableRecords
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.base.urls import UNREADABLE, scrubbed, shown_url
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import NightmillError, SettingsError
from nightmill.jobs.messages.broker import Broker
from nightmill.jobs.sql.database import Database

SECRET = "S3C/RET"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6380/1", "redis://host:6380/1"),
        ("redis://:S3CRET@host/0", "redis://:***@host/0"),
        ("redis://user:S3CRET@[::1]:6379", "redis://user:***@[::1]:6379"),
        ("redis://S3CRET@host", "redis://***@host"),
        ("redis+socket://S3CRET@/run/redis.sock", "redis+socket://***@/run/redis.sock"),
        ("redis+socket:///run/redis.sock?virtual_host=2", "redis+socket:///run/redis.sock?virtual_host=2"),
        ("postgresql://user@host/db", "postgresql://user@host/db"),
        ("postgresql://user:S3C/R#E?T@host:5/db", UNREADABLE),
        (
            "postgresql://host/db?passwd=S3CRET&sslmode=require&S3CRET",
            "postgresql://host/db?***&sslmode=require&***",
        ),
        ("postgresql://h/db?options=-c%20x=S3CRET&host=/run/pg", "postgresql://h/db?***&host=/run/pg"),
        ("sqlite:////srv/a b@c#d.db", "sqlite:////srv/a b@c#d.db"),
        *((url, UNREADABLE) for url in ("redis://:S3C/RET@host", "redis://:S3C?RET@h", "redis://:S3C#RET@h")),
        *((url, UNREADABLE) for url in ("redis://:S3@CRET@host", "redis://:S3CRET", "redis://:1/S3CRET@h")),
        *((url, UNREADABLE) for url in ("postgresql://S3/C:RET@host/db", "postgresql://u:S3@CRET@host/db")),
        *(
            (url, UNREADABLE)
            for url in ("sqlite+pysqlcipher://:S3CRET@/a.db", "S3CRET", "", "://", "x://y:99999")
        ),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@pytest.mark.parametrize("mark", ["/", "?", "#", "@", "[", " ", "ü"])
def test_a_password_that_is_not_encoded_gets_one_line_with_the_remedy(mark: str) -> None:
    url = f"redis://:S3C{mark}RET@host:6379/0"
    result = CliRunner().invoke(main, ["list"], env={"NIGHTMILL_BROKER_URL": url})
    assert result.exit_code == 1
    assert result.output.startswith(
        "Error: NIGHTMILL_BROKER_URL: is not a URL; expected e.g. redis://:password@"
    )
    assert "percent-encoded, as / in %2F" in result.output
    assert result.output.count("\n") == 1
    assert "S3C" not in result.output and "RET" not in result.output


@pytest.mark.parametrize(
    ("name", "url", "message"),
    [
        ("DATABASE", "postgres://me:S3C@host/x", "begins with postgres://: write postgresql:// in its place"),
        (
            "DATABASE",
            "sqlite:///x.db?S3C=1",
            "may have nothing but cache, immutable, mode, nolock, timeout, uri",
        ),
        ("DATABASE", "postgresql+nothing://me:S3C@host/x", "names the driver 'nothing': write postgresql://"),
        ("DATABASE", "postgresql+asyncpg://me:S3C@host/x", "names the driver 'asyncpg': write postgresql://"),
        ("BROKER", "redis://S3C@host", "names a user and no password; expected e.g. redis://:password@"),
        ("BROKER", "redis://host/S3C", "must end with the number of a database, as in redis://"),
        (
            "BROKER",
            "redis://host/0?password=S3C",
            "may have settings after its ? only as rediss://, with TLS",
        ),
        ("BROKER", "rediss://host/0?ssl_bogus=S3C", "may have nothing but ssl_ca_certs, ssl_cert_reqs, "),
        (
            "BROKER",
            "rediss://host/0?ssl_cert_reqs=S3C",
            "has a ssl_cert_reqs that is not one of required, none",
        ),
        (
            "BROKER",
            "redis+socket:///run/r.sock?S3C=1",
            "may have nothing but virtual_host=NUMBER, the database",
        ),
    ],
)
def test_what_the_drivers_would_choke_on_is_refused_in_our_words(name: str, url: str, message: str) -> None:
    result = CliRunner().invoke(main, ["stats"], env={f"NIGHTMILL_{name}_URL": url})
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: NIGHTMILL_{name}_URL: {message}"), result.output
    assert "S3C" not in result.output


# Long and odd enough that no word of a message contains one by chance.
secrets = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_categories=["Cc", "Zs", "Cf"]))
secrets = secrets.map(lambda text: f"zQ7{text[:20]}wX")
URLS = (
    ("broker_url", "redis://:{}@127.0.0.1:1/0"),
    ("broker_url", "redis://{}@127.0.0.1:1/0"),
    ("broker_url", "redis://user:{}@127.0.0.1:1/0"),
    ("broker_url", "redis+socket://:{}@/nowhere.sock"),
    ("broker_url", "redis+socket:///nowhere.sock?password={}"),
    ("broker_url", "redis://127.0.0.1:1/0?password={}"),
    ("database_url", "postgresql://me:{}@127.0.0.1:1/x"),
    ("database_url", "postgresql://127.0.0.1:1/x?password={}"),
    ("database_url", "postgresql://127.0.0.1:1/x?options={}&sslpassword={}"),
    ("database_url", "postgresql://127.0.0.1:1/x?{}=1"),
)


@effort(max_examples=60)
@given(secrets, st.sampled_from(URLS), st.booleans())
@example("zQ7@wX", ("database_url", "postgresql://127.0.0.1:1/x?password={}"), False)
def test_no_secret_is_in_any_message(secret: str, where: tuple[str, str], encoded: bool) -> None:
    field, pattern = where
    written = quote(secret, safe="") if encoded else secret
    said = [shown_url(pattern.replace("{}", written))]
    try:
        settings = Settings.from_env({f"NIGHTMILL_{field.upper()}": pattern.replace("{}", written)})
    except SettingsError as error:
        said += traceback.format_exception(error)
    else:
        said += [repr(settings), str(settings), settings.safe_broker_url, settings.safe_database_url]
        database = Database(settings)
        # What drivers may say, each in its own way of quoting.
        for foreign in (
            secret,
            written,
            f"cannot connect to {getattr(settings, field)}: no",
            f"a {secret!r} b",
        ):
            said.append(settings.scrubbed(foreign))
            said.append(str(database._mapped(OperationalError("x", None, Exception(foreign)))))
            try:
                with Broker(settings).mapped_errors():
                    raise ConnectionError(foreign)
            except NightmillError as error:
                said.append(str(error))
            record = logging.LogRecord("x", 40, "x", 1, "tried %s", (foreign,), None)
            PrintableRecords(settings.scrubbed).filter(record)
            said.append(record.getMessage())
    for text in said:
        assert secret not in text and written not in text


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("BROKER", "redis://:S3%2FCRET@127.0.0.1:1/0"),
        ("BROKER", "redis+socket://:S3%2FCRET@/nowhere/redis.sock"),
        ("DATABASE", "postgresql://me:S3%2FCRET@127.0.0.1:1/x"),
        ("DATABASE", "postgresql://127.0.0.1:1/x?passwd=S3%2FCRET"),
        ("DATABASE", "postgresql://127.0.0.1:1/x?connect_timeout=1&sslkey=S3%2FCRET"),
    ],
)
def test_check_and_real_drivers_give_no_secret_away(name: str, url: str) -> None:
    elsewhere = {
        "NIGHTMILL_BROKER_URL": "redis://127.0.0.1:1/0"
    }  # or an embedded Redis would be left running
    result = CliRunner().invoke(main, ["check", "--json"], env=elsewhere | {f"NIGHTMILL_{name}_URL": url})
    assert result.exit_code == 1
    findings = {item["part"]: item for item in json.loads(result.stdout)}
    assert findings[name.lower()]["ok"] is False
    assert "S3/CRET" not in result.output
    assert "S3%2FCRET" not in result.output


def test_a_short_secret_is_hidden_where_it_is_a_word() -> None:
    url = "redis://:pw@host/0"
    assert scrubbed("no pw in spwan", url) == "no *** in spwan"
