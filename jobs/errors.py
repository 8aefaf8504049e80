"""Every error Nightmill raises on purpose, as one tree.

NightmillError
├── SettingsError                    a NIGHTMILL_* variable is unknown or impossible
├── MissingExtraError                an optional part of the installation is needed and absent
├── InvalidRequestError              (also ValueError) a request that can never run, with `.field` and `.code`
│   ├── InvalidParameterError
│   ├── InvalidPromptError
│   ├── UnknownModelError
│   ├── IdempotencyConflictError
│   └── BatchConflictError
├── BatchFileError                   a batch file that cannot be read or written as a whole
├── JobNotFoundError                 (also LookupError)
├── BatchNotFoundError               (also LookupError)
├── InvalidTransitionError           the job's state does not allow what was asked
├── WaitTimeoutError                 (also TimeoutError)
├── StreamChangedError               a text began afresh and is another than was read so far
├── ScoreError                       a job that was to score texts ended without
├── NotServedError                   no live worker serves what somebody wants to wait for
├── DatabaseError
│   ├── DatabaseUnreachableError     an outage: the same statement may succeed later
│   │   └── DatabaseBusyError        other transactions hold the same rows, also after several tries
│   ├── DatabaseRefusedError         it never takes these values
│   └── SchemaError                  the database needs `nightmill migrate`
├── BrokerError
│   ├── BrokerUnreachableError
│   └── MessageError                 a message in the broker that announces no jobs of ours
├── ModelFetchError                  a model that its name does not find, or that cannot be fetched
├── ModelFileError                   a model file that is broken, hostile or unsupported
├── ConstraintError                  what an answer must be cannot be compiled, or followed any further
├── ChatTemplateError                the model's chat template is missing or failed on these messages
└── RunnerError                      the arithmetic failed; the jobs in flight are handed back

Foreign errors are mapped at one border each: SQLAlchemy's in `jobs.sql.database`, redis's and kombu's in
`jobs.messages.broker`, the Hub's in `worker.model.hub`, `gguf`'s in `worker.model.gguf.file`, Jinja's in
`worker.model.chat`. The docstring of a class is its default message.
"""

import inspect
from collections.abc import Sequence
from enum import StrEnum
from typing import Self


class NightmillError(Exception):
    """Nightmill could not do what was asked."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or inspect.cleandoc(type(self).__doc__ or type(self).__name__))


class SettingsError(NightmillError):
    """A NIGHTMILL_* setting is unknown or impossible."""


class MissingExtraError(NightmillError):
    """An optional part of Nightmill is needed here and not installed."""


class RowCode(StrEnum):
    """Why a job or a row of a file cannot be run, in one word."""

    INVALID_ENCODING = "invalid_encoding"
    INVALID_JSON = "invalid_json"
    INVALID_CSV = "invalid_csv"
    TOO_LONG = "too_long"
    MISSING_FIELD = "missing_field"
    UNSUPPORTED_FIELD = "unsupported_field"
    INVALID_VALUE = "invalid_value"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"


class InvalidRequestError(NightmillError, ValueError):
    """The request can never run as it stands."""

    position = 0
    """Which of the rows that were to be inserted together is meant."""

    def __init__(
        self, message: str | None = None, *, field: str | None = None, code: RowCode = RowCode.INVALID_VALUE
    ) -> None:
        super().__init__(message)
        self.field = field
        self.code = code
        self.enqueued: Sequence[str] = ()
        """Ids of the jobs that `enqueue_many` had queued before it met this item."""

    def renamed(self, field: str) -> Self:
        """The same, of a field that has this name where it was given."""
        said = str(self).removeprefix(str(self.field))
        return type(self)(f"{field}{said}", field=field, code=self.code)


class InvalidParameterError(InvalidRequestError):
    """A generation parameter or job option is out of its range."""


class InvalidPromptError(InvalidRequestError):
    """The prompt is neither a text nor a list of chat messages that can be stored and tokenised."""


class UnknownModelError(InvalidRequestError):
    """No worker has ever served a model of this name."""


class IdempotencyConflictError(InvalidRequestError):
    """The idempotency key belongs to a job with other content."""


class BatchConflictError(InvalidRequestError):
    """There is a batch of this name, which does not take this: it has other rows, or is being deleted."""


class BatchFileError(NightmillError):
    """The batch file cannot be read or written; what is wrong with a single row is that row's error."""


class BatchFileUnavailableError(BatchFileError):
    """The batch file could not be read just now, whatever it holds: its disk or shared folder failed."""


class JobNotFoundError(NightmillError, LookupError):
    """There is no job with this id."""


class BatchNotFoundError(NightmillError, LookupError):
    """There is no batch of this name."""


class InvalidTransitionError(NightmillError):
    """The job's state does not allow this."""


class WaitTimeoutError(NightmillError, TimeoutError):
    """The jobs did not finish in the time given; they go on."""


class StreamChangedError(NightmillError):
    """The job began afresh and its text is another than was read so far: read all of it once it has ended."""


class ScoreError(NightmillError):
    """The texts were not scored."""


class NotServedError(NightmillError):
    """No live worker serves the model."""


class DatabaseError(NightmillError):
    """The database refused a statement."""


class DatabaseUnreachableError(DatabaseError):
    """The database does not answer."""


class DatabaseBusyError(DatabaseUnreachableError):
    """Other transactions hold the same rows, also after several tries."""


class DatabaseRefusedError(DatabaseError):
    """The database does not take these values, today or later."""


class SchemaError(DatabaseError):
    """The database has no Nightmill tables, or tables of another version: run `nightmill migrate`."""


class BrokerError(NightmillError):
    """The broker refused a command."""


class BrokerUnreachableError(BrokerError):
    """The broker does not answer."""


class MessageError(BrokerError):
    """A message in the broker is not one that Nightmill could have sent."""


class ModelFetchError(NightmillError):
    """The model's name finds nothing, or what it finds cannot be fetched."""


class ModelFileError(NightmillError):
    """The model file is broken or not supported."""


class ChatTemplateError(NightmillError):
    """The model's chat template is missing, broken, or refuses these messages."""


class ConstraintError(NightmillError):
    """What the answer must be cannot be compiled, or needs more than a step may take."""


class RunnerError(NightmillError):
    """The runner failed; the jobs in flight are handed back to the queue."""


class DeliveryDelayedWarning(UserWarning):
    """Jobs are safe in the database, but the broker did not take their message: a worker will fetch them."""
