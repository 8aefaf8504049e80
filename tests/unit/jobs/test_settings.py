"""Settings come from NIGHTMILL_* variables; what is unknown or impossible is refused by name."""

from pathlib import Path

import pytest

from nightmill.jobs.base.settings import Settings, default_data_dir
from nightmill.jobs.errors import SettingsError

SECRET = "hunter2"


def test_without_variables_everything_is_embedded_in_the_users_data_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data/of/user")
    settings = Settings.from_env({})
    assert settings.embedded_broker
    assert settings.embedded_database
    assert settings.data_dir == Path("/data/of/user/nightmill")
    assert str(settings.resolved_database_url) == "sqlite:////data/of/user/nightmill/nightmill.db"
    assert settings.safe_broker_url == "embedded Redis in /data/of/user/nightmill"


def test_without_an_xdg_directory_data_is_below_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_data_dir() == Path("/home/someone/.local/share/nightmill")


def test_every_field_is_read_from_its_variable_and_empty_ones_count_as_absent() -> None:
    settings = Settings.from_env(
        {
            "NIGHTMILL_DATA_DIR": "/srv/nightmill",
            "NIGHTMILL_SHARD_SIZE": "16",
            "NIGHTMILL_REFERENCE": "true",
            "NIGHTMILL_DRAIN_SECONDS": "2.5",
            "NIGHTMILL_MODEL": "/models/m.gguf",
            "NIGHTMILL_BROKER_URL": "",
            "NIGHTMILL_TEST_REDIS_URL": "redis://somewhere",
            "PATH": "/bin",
        }
    )
    assert settings.data_dir == Path("/srv/nightmill")
    assert (settings.shard_size, settings.reference, settings.drain_seconds) == (16, True, 2.5)
    assert settings.model == Path("/models/m.gguf")
    assert settings.embedded_broker


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"NIGHTMILL_DATABSE_URL": "x"},
            "NIGHTMILL_DATABSE_URL is not a setting of Nightmill. Did you mean NIGHTMILL_DATABASE_URL?",
        ),
        (
            {"NIGHTMILL_broker_url": "x"},
            "NIGHTMILL_broker_url is not a setting of Nightmill. Did you mean NIGHTMILL_BROKER_URL?",
        ),
        (
            {"NIGHTMILL_XYZZY": "x"},
            "NIGHTMILL_XYZZY is not a setting of Nightmill. Known are NIGHTMILL_DATA_DIR, "
            "NIGHTMILL_DATABASE_URL, ",
        ),
        (
            {"NIGHTMILL_DATABASE_URL": "mysql://localhost/x"},
            "NIGHTMILL_DATABASE_URL: names 'mysql'; Nightmill speaks sqlite and postgresql",
        ),
        (
            {"NIGHTMILL_DATABASE_URL": "nowhere"},
            "NIGHTMILL_DATABASE_URL: is not a database URL; expected e.g. postgresql+psycopg://",
        ),
        (
            {"NIGHTMILL_BROKER_URL": "amqp://localhost"},
            "NIGHTMILL_BROKER_URL: must start with redis://, rediss:// or redis+socket://",
        ),
        (
            {"NIGHTMILL_BROKER_URL": f"redis://:{SECRET}@host:port/0"},
            "NIGHTMILL_BROKER_URL: is not a URL; expected e.g. redis://",
        ),
        (
            {"NIGHTMILL_SHARD_SIZE": "0"},
            "NIGHTMILL_SHARD_SIZE: must be at least 1",
        ),
        ({"NIGHTMILL_SHARD_SIZE": "many"}, "NIGHTMILL_SHARD_SIZE: must be a whole number"),
        ({"NIGHTMILL_REFERENCE": "perhaps"}, "NIGHTMILL_REFERENCE: must be true or false"),
        (
            {"NIGHTMILL_RESEND_SECONDS": "inf"},
            "NIGHTMILL_RESEND_SECONDS: must be at most 31536000 (got 'inf')",
        ),
        ({"NIGHTMILL_SAVE_SECONDS": "nan"}, "NIGHTMILL_SAVE_SECONDS: must be "),
    ],
)
def test_bad_variables_are_refused_by_name(environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env(environ)
    assert str(caught.value).startswith(message)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://user:{SECRET}@host/db",
        f"postgresql+psycopg://user@host/db?password={SECRET}",
    ],
)
def test_the_database_password_is_shown_nowhere(url: str) -> None:
    settings = Settings(database_url=url)
    for shown in (repr(settings), str(settings), settings.safe_database_url, f"{settings}"):
        assert SECRET not in shown
    assert settings.resolved_database_url.drivername == "postgresql+psycopg"
    assert "user" in settings.safe_database_url
    assert SECRET in settings.resolved_database_url.render_as_string(hide_password=False)


def test_the_brokers_password_is_shown_nowhere() -> None:
    settings = Settings(broker_url=f"redis://:{SECRET}@host:6380/1")
    for shown in (repr(settings), str(settings), settings.safe_broker_url):
        assert SECRET not in shown
    assert "host:6380/1" in settings.safe_broker_url


def test_settings_are_frozen_and_refuse_unknown_fields() -> None:
    settings = Settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.shard_size = 3
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        Settings(shards=3)  # type: ignore[call-arg]


def test_every_setting_is_on_its_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "settings.md").read_text(encoding="utf-8")
    for field in Settings.model_fields:
        assert f"`NIGHTMILL_{field.upper()}`" in page or f"`_{field.upper()}`" in page


@pytest.mark.parametrize(
    ("said", "meant"),
    [("0.5", 0.5), ("1", 1.0), ("8GiB", 8 << 30), ("8 gb", 8 * 10**9), ("1.5TiB", 3 << 39)],
)  # fmt: skip
def test_memory_of_a_gpu_is_a_share_or_a_size_and_stays_so_on_its_way_to_a_worker(
    said: str, meant: float
) -> None:
    settings = Settings.from_env({"NIGHTMILL_GPU_MEMORY": said})
    assert (settings.gpu_memory, type(settings.gpu_memory)) == (meant, type(meant))
    passed_on = str(settings.model_dump(mode="json")["gpu_memory"])
    assert Settings.from_env({"NIGHTMILL_GPU_MEMORY": passed_on}) == settings


@pytest.mark.parametrize("said", ["0", "8", "1.1", "-1", "8 apples", "8Gi", "nan", "inf", "1KiB", "1e400"])
def test_other_memory_is_refused(said: str) -> None:
    with pytest.raises(SettingsError, match=r"NIGHTMILL_GPU_MEMORY: must be a share .* a size such as 8GiB"):
        Settings.from_env({"NIGHTMILL_GPU_MEMORY": said})
