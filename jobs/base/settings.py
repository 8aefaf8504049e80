"""Frozen settings from the environment. Every name starts with NIGHTMILL_; unknown names are refused."""

import difflib
import errno
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from nightmill.jobs.base.hours import Hours
from nightmill.jobs.base.logs import LogFormat
from nightmill.jobs.base.sentences import sentence
from nightmill.jobs.base.shares import parse_shares
from nightmill.jobs.base.signing import parse_secrets
from nightmill.jobs.base.targets import parse_allowed
from nightmill.jobs.base.times import parse_span
from nightmill.jobs.base.urls import check_broker_url, check_database_url, scrubbed, shown_url
from nightmill.jobs.errors import InvalidParameterError, SettingsError

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

Pooler = Literal["auto", "transaction", "none"]
"""The connection pooler in front of PostgreSQL: one in transaction mode, or none; auto: detect it."""

PREFIX = "NIGHTMILL_"
END_PREFIX = "NIGHTMILL_END_"
"""Prefix of the variables for the --on-end command, which may call `nightmill`: they are not settings."""
# Prefixes of variables that are not settings of a client or a worker.
FOREIGN_PREFIXES = ("NIGHTMILL_TEST_", END_PREFIX)
MODEL_SCHEMES = ("hf:", "https://", "http://")
"""Prefixes of model names that are downloaded first; anything else is a path."""

_MEMORY = re.compile(r"(\d*\.?\d+(?:e-?\d+)?)\s*([KMGT]i?B)?", re.IGNORECASE)
_UNITS = {
    "": 1,
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
}
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@-]{0,199}")
YEAR_SECONDS = 31_536_000.0
"""Longest time that a setting may name: sums of times and durations stay within what all systems take."""
_LEAST_BYTES = 1 << 20  # a smaller number is likely a mistake for a share


def default_data_dir() -> Path:
    """`$XDG_DATA_HOME/nightmill`, or `~/.local/share/nightmill`."""
    try:
        base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    except RuntimeError:
        raise SettingsError("this user has no home directory: set NIGHTMILL_DATA_DIR") from None
    return Path(base) / "nightmill"


def make_data_dir(path: Path, setting: str = "NIGHTMILL_DATA_DIR") -> None:
    """Create the directory that a setting names, or one inside it, if it is missing.

    Raises SettingsError if it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "you may not write there")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(
            f"the directory {str(path)!r} cannot be used: {why}. Set {setting} to one that you may write to"
        ) from None


class Settings(BaseModel):
    """Settings of Nightmill. Field `x_y` is read from `NIGHTMILL_X_Y`.

    URLs and keys are kept out of the representation and of errors, since they are secret: print
    `safe_database_url` and `safe_broker_url` instead.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    data_dir: Path = Field(default_factory=default_data_dir)
    """Directory of the embedded database and broker."""
    database_url: str | None = Field(default=None, repr=False)
    """SQLAlchemy URL of SQLite or PostgreSQL; without one, SQLite in `data_dir`."""
    database_pooler: Pooler = "auto"
    """Pooler in front of PostgreSQL, such as pgbouncer in transaction mode; auto: detect it."""
    broker_url: str | None = Field(default=None, repr=False)
    """redis://, rediss:// or redis+socket:// URL; without one, an embedded Redis in `data_dir`."""
    shard_size: int = Field(default=64, ge=1, le=1024)
    """Jobs in one message."""
    shares: str | None = None
    """Weights of owners in a queue: alice=2,bob=1; owners that are not named have 1."""
    max_attempts: int = Field(default=3, ge=1, le=100)
    """Deaths of a worker that ran a job alone, after which the job is failed."""

    price_per_kwh: float | None = Field(default=None, ge=0.0)
    """Price of a kWh, in whatever money: batches are then shown with what their energy cost."""
    spool_bytes: int = 64 << 30
    """Largest input that is copied to disk first, from standard input or a URL, in bytes."""
    log_format: LogFormat = "text"
    """Log format of workers and servers: lines of text, or one JSON object a line."""

    api_keys: str | None = Field(default=None, repr=False)
    """API keys of `nightmill serve`: NAME=KEY or NAME:RIGHT=KEY, separated by commas."""
    files_dir: Path | None = None
    """Directory for the contents of files of `nightmill serve`; by default a folder in `data_dir`."""
    flex_seconds: float = Field(default=600.0, ge=1.0, le=YEAR_SECONDS)
    """Longest wait of `nightmill serve` for an answer of the tier `flex`."""
    tokenizer_files: str | None = None
    """GGUF files from which `nightmill serve` reads vocabularies of workers' models: NAME=PATH,NAME=PATH."""

    webhook_urls: str | None = None
    """Allowed webhook URLs, and everything below them, separated by commas; by default none."""
    webhook_secret: str | None = Field(default=None, repr=False)
    """Signing secrets of webhooks: whsec_BASE64, separated by commas. Without one, no webhook is sent."""
    webhook_private: bool = False
    """Send webhooks also to addresses that are not public: loopback, link-local, private networks."""

    model: Path | str | None = None
    """The worker's GGUF file: a path, or as a string a name that starts with one of MODEL_SCHEMES."""
    model_name: str | None = Field(default=None, min_length=1, max_length=200)
    """Name of the model for jobs; by default the file's name without its ending."""
    models: str | None = None
    """Models that a worker loads in turn, as files, names or NAME=MODEL, separated by commas."""
    together: bool = False
    """Load all of these models at once, each by a worker of its own, with a share of the GPU's memory."""
    stay: str = "10m"
    """Time for which a worker keeps a model that has rows before more urgent rows of another unload it."""
    swap_for_interactive: bool = False
    """Load another of the models when an interactive job asks for it."""
    reference: bool = False
    """Generate with NumPy even if a GPU is present."""
    gpu: int | None = Field(default=None, ge=0)
    """Index of the worker's GPU."""
    pretend_device: str | None = None
    """The card that the GPU is taken for, to try what runs there, such as rtx4090; by default itself."""
    gpu_memory: float | int = 0.9
    """GPU memory for the worker: a share of the free memory, or a whole number of bytes."""
    dtype: Literal["auto", "f16", "bf16"] = "auto"
    """Element type on a GPU; auto: chosen by the model's family and file."""
    weights: Literal["auto", "file", "16bit", "fp8"] = "auto"
    """Format of weight matrices; auto: 16 bits, or as in the file if memory is short."""
    kv: Literal["16bit", "fp8"] = "16bit"
    """Format of the KV cache."""
    tool_format: Literal[
        "auto", "hermes", "llama", "mistral", "mistral-named", "qwen-xml", "glm-xml", "gemma", "pythonic",
        "lfm2", "granite", "phi", "nemotron", "tool-calls", "harmony", "deepseek", "deepseek-r1", "kimi",
        "minimax", "seed", "cohere", "json",
    ] = "auto"  # fmt: skip
    """Syntax of the model's tool calls; auto: detected from its template. json: tools are described in
    words."""
    max_sequences: int | None = Field(default=None, ge=1, le=32768)
    """Sequences generated at once."""
    context: int | None = Field(default=None, ge=2)
    """Tokens a sequence may hold; by default the model's own limit, or what memory allows."""
    prefix_sharing: bool = True
    """Compute equal beginnings of prompts once."""
    drafts: Literal["off", "ngram", "auto"] = "off"
    """Guesses at a text's next tokens while few are computed; ngram: from the text's own words and what it
    has to obey; auto: while that is found to be faster."""
    draft: Path | None = None
    """GGUF file of a small model with the same vocabulary, which guesses tokens where drafts are made."""
    hours: str | None = None
    """Times of day at which a worker serves, such as 22:00-06:00/Europe/Berlin; by default always."""
    idle_seconds: float | None = Field(default=None, ge=1.0, le=YEAR_SECONDS)
    """Time without jobs after which a worker frees its GPU and sleeps until there are some."""
    drain_seconds: float = Field(default=30.0, ge=0.0, le=YEAR_SECONDS)
    """Longest time for which a stopping worker continues its jobs."""
    hang_seconds: float | None = Field(default=None, gt=0.0, le=YEAR_SECONDS)
    """Silence after which a worker's engine counts as hung; 60 by default, with NumPy 600."""
    metrics_host: str = "127.0.0.1"
    """Address at which a worker serves metrics, if it has a port for that."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of a worker's metrics; without one, it serves none."""
    save_seconds: float = Field(default=5.0, gt=0.0, le=YEAR_SECONDS)
    """Interval at which a worker saves the tokens of unfinished jobs."""
    heartbeat_seconds: float = Field(default=5.0, gt=0.0, le=YEAR_SECONDS)
    """Interval of a worker's heartbeat and sweep."""
    stale_seconds: float = Field(default=30.0, gt=0.0, le=YEAR_SECONDS)
    """Silence after which a worker's jobs are taken from it."""
    resend_seconds: float = Field(default=60.0, gt=0.0, le=YEAR_SECONDS)
    """Age at which a queued job whose message seems lost is sent again."""

    @field_validator("model", mode="before")
    @classmethod
    def _model_is_named_or_a_path(cls, value: Any) -> Any:
        return Path(value) if isinstance(value, str) and not value.startswith(MODEL_SCHEMES) else value

    @field_validator("gpu_memory", mode="before")
    @classmethod
    def _memory_is_a_share_or_a_size(cls, value: Any) -> float | int:
        return _memory(value)

    @field_validator("spool_bytes", mode="before")
    @classmethod
    def _spool_is_a_size(cls, value: Any) -> int:
        with suppress(ValueError):
            if isinstance(size := _memory(value), int):
                return size
        raise ValueError("must be a size of at least 1MiB, such as 8GiB")

    @field_validator("shares")
    @classmethod
    def _shares_are_weights(cls, value: str | None) -> str | None:
        if value is not None:
            parse_shares(value)
        return value

    @field_validator("hours")
    @classmethod
    def _hours_are_windows(cls, value: str | None) -> str | None:
        return None if value is None else str(Hours.parse(value))

    @field_validator("models")
    @classmethod
    def _models_are_a_list(cls, value: str | None) -> str | None:
        if value is not None:
            parse_models(value)
        return value

    @field_validator("stay")
    @classmethod
    def _stay_is_a_duration(cls, value: str) -> str:
        with suppress(InvalidParameterError):
            parse_span("stay", value)
            return value
        raise ValueError("is not a duration; write a number and s, m, h or d, as in 10m")

    @field_validator("tokenizer_files")
    @classmethod
    def _tokenizers_have_names(cls, value: str | None) -> str | None:
        _named_paths(value)
        return value

    @field_validator("webhook_urls")
    @classmethod
    def _webhooks_go_to_urls(cls, value: str | None) -> str | None:
        parse_allowed(value)
        return value

    @field_validator("webhook_secret")
    @classmethod
    def _secret_can_sign(cls, value: str | None) -> str | None:
        parse_secrets(value)
        return value

    @field_validator("database_url")
    @classmethod
    def _database_is_known(cls, value: str | None) -> str | None:
        if value is None:
            return None
        check_database_url(value)
        return value

    @field_validator("broker_url")
    @classmethod
    def _broker_is_redis(cls, value: str | None) -> str | None:
        if value is not None:
            check_broker_url(value)
        return value

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the NIGHTMILL_* variables; raises SettingsError that names the bad one."""
        environ = os.environ if environ is None else environ
        values: dict[str, str] = {}
        for name, value in environ.items():
            if not name.startswith(PREFIX) or name.startswith(FOREIGN_PREFIXES):
                continue
            field = name.removeprefix(PREFIX).lower()
            if field not in cls.model_fields or not name.isupper():
                raise SettingsError(f"{name} is not a setting of Nightmill.{_suggestion(name, cls)}")
            if value != "":  # an empty variable counts as absent, as compose files write it
                values[field] = value
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0])
            raise SettingsError(
                f"{PREFIX}{name.upper()}: {sentence(first, value=cls.model_fields[name].repr)}"
            ) from None

    @cached_property
    def weights_of_owners(self) -> Mapping[str, int]:
        """The weights in `shares` by owner."""
        return {} if self.shares is None else parse_shares(self.shares)

    @cached_property
    def resolved_database_url(self) -> "URL":
        """The database to use, with the driver that Nightmill is tested with filled in."""
        from sqlalchemy.engine import URL, make_url  # takes 0.25 s, which the engine's process saves

        if self.database_url is None:
            return URL.create("sqlite", database=str(self.data_dir.absolute() / "nightmill.db"))
        url = make_url(self.database_url)
        return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url

    @property
    def resolved_files_dir(self) -> Path:
        """The directory for the contents of files."""
        return self.files_dir or self.data_dir.absolute() / "files"

    @property
    def tokenizer_paths(self) -> Mapping[str, Path]:
        """The files of `tokenizer_files` by model name."""
        return _named_paths(self.tokenizer_files)

    @property
    def embedded_database(self) -> bool:
        """True if the database is our own file, created and migrated on first use."""
        return self.database_url is None

    @property
    def embedded_broker(self) -> bool:
        """True if the broker is our own Redis, started on first use."""
        return self.broker_url is None

    @property
    def safe_database_url(self) -> str:
        """The database's URL without its secrets."""
        return shown_url(self.resolved_database_url.render_as_string(hide_password=False))

    @property
    def safe_broker_url(self) -> str:
        """The broker's URL without its secrets."""
        if self.broker_url is None:
            return f"embedded Redis in {self.data_dir.absolute()}"
        return shown_url(self.broker_url)

    def scrubbed(self, error: object) -> str:
        """Return the message of a foreign error without the secrets of these URLs."""
        text = scrubbed(str(error), self.database_url, self.broker_url)
        return text.replace(self.webhook_secret, "***") if self.webhook_secret else text


def parse_models(text: str) -> tuple[tuple[str | None, str], ...]:
    """Parse a list of models into (name, model): `a.gguf,big=hf:OWNER/REPO:Q8_0` names the second `big`.

    A model is a path, or a name that begins with one of MODEL_SCHEMES. Raises ValueError.
    """
    found: list[tuple[str | None, str]] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, model = entry.partition("=")
        found.append((name, model) if equals and _MODEL_NAME.fullmatch(name) else (None, entry))
    if not found or not all(model for _, model in found):
        raise ValueError("must be GGUF files, names of models, or NAME=MODEL; separate several by commas")
    named = [name for name, _ in found if name is not None]
    if twice := next((name for name in named if named.count(name) > 1), None):
        raise ValueError(f"has two models of the name {twice[:60]!r}; give each a name of its own")
    return tuple(found)


def _named_paths(value: str | None) -> dict[str, Path]:
    """Parse NAME=PATH pairs separated by commas."""
    found: dict[str, Path] = {}
    for entry in filter(None, (part.strip() for part in (value or "").split(","))):
        name, equals, path = entry.partition("=")
        if not (name and equals and path):
            raise ValueError("must be NAME=PATH of a model and its GGUF file; separate several by commas")
        found[name] = Path(path).absolute()
    return found


def _memory(value: Any) -> float | int:
    """Parse GPU memory: a share such as 0.9 as a float, or a size such as 8GiB in bytes."""
    found = _MEMORY.fullmatch(str(value).strip())
    number = float(found[1]) if found else 0.0
    unit = found[2].lower() if found and found[2] else ""
    if unit or number >= _LEAST_BYTES:
        number *= _UNITS[unit]
        if _LEAST_BYTES <= number < math.inf:
            return int(number)
    elif 0.0 < number <= 1.0:
        return number
    raise ValueError("must be a share of the free memory, up to 1, or a size such as 8GiB")


def _suggestion(name: str, cls: type[Settings]) -> str:
    close = difflib.get_close_matches(name.removeprefix(PREFIX).lower(), cls.model_fields, n=1)
    if close:
        return f" Did you mean {PREFIX}{close[0].upper()}?"
    return f" Known are {', '.join(PREFIX + field.upper() for field in cls.model_fields)}."
