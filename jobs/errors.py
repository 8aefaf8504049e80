"""The tree of all errors that Nightmill raises on purpose.

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
│   └── BatchFileUnavailableError    not just now: the disk is full, or failed
├── JobNotFoundError                 (also LookupError)
├── BatchNotFoundError               (also LookupError)
├── InvalidTransitionError           the job's state does not allow what was asked
├── WaitTimeoutError                 (also TimeoutError)
├── StreamChangedError               a job restarted and produced different text
├── ScoreError                       a scoring job ended without scores
├── EmbeddingError                   a job that embeds a text ended without an embedding
├── RerankError                      a job that ranks a document ended without its relevance
├── NotServedError                   no live worker serves the model of a waiting caller
├── DatabaseError
│   ├── DatabaseUnreachableError     an outage: the same statement may succeed later
│   │   └── DatabaseBusyError        other transactions hold the same rows, also after several tries
│   ├── DatabaseRefusedError         the database never accepts these values
│   └── SchemaError                  the database needs `nightmill migrate`
├── BrokerError
│   ├── BrokerUnreachableError
│   └── MessageError                 a message in the broker that does not announce jobs
├── ModelFetchError                  a model that is not found or cannot be fetched
├── ModelFileError                   a model file that is broken, hostile or unsupported
├── ConstraintError                  a constraint that cannot be compiled or enforced
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
    """Nightmill could not do what was requested."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or inspect.cleandoc(type(self).__doc__ or type(self).__name__))


class SettingsError(NightmillError):
    """A NIGHTMILL_* setting is unknown or impossible."""


class MissingExtraError(NightmillError):
    """An optional part of Nightmill is needed here and not installed."""


class RowCode(StrEnum):
    """The reason why a job or a row of a file cannot be run, as one word."""

    INVALID_ENCODING = "invalid_encoding"
    INVALID_JSON = "invalid_json"
    INVALID_CSV = "invalid_csv"
    TOO_LONG = "too_long"
    MISSING_FIELD = "missing_field"
    UNSUPPORTED_FIELD = "unsupported_field"
    INVALID_VALUE = "invalid_value"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"
    PRIOR_FAILED = "prior_failed"
    PRIOR_CANCELLED = "prior_cancelled"


class InvalidRequestError(NightmillError, ValueError):
    """The request can never run as it stands."""

    position = 0
    """Index of the bad row among those inserted together."""

    def __init__(
        self, message: str | None = None, *, field: str | None = None, code: RowCode = RowCode.INVALID_VALUE
    ) -> None:
        super().__init__(message)
        self.field = field
        self.code = code
        self.enqueued: Sequence[str] = ()
        """Ids of the jobs that `enqueue_many` queued before this item."""

    def renamed(self, field: str) -> Self:
        """Return this error for the name that the field has in the caller's request."""
        said = str(self).removeprefix(str(self.field))
        return type(self)(f"{field}{said}", field=field, code=self.code)


class InvalidParameterError(InvalidRequestError):
    """A generation parameter or job option is out of its range."""


class InvalidPromptError(InvalidRequestError):
    """The prompt must be a text, token ids, or a list of chat messages, and storable as UTF-8."""


class UnknownModelError(InvalidRequestError):
    """No worker has ever served a model of this name."""


class IdempotencyConflictError(InvalidRequestError):
    """The idempotency key belongs to a job with other content."""


class BatchConflictError(InvalidRequestError):
    """The batch of this name conflicts: it has other rows, or is being deleted."""


class BatchFileError(NightmillError):
    """The batch file cannot be read or written."""


class EmptyBatchFileError(BatchFileError):
    """The batch file holds no rows; its batch, if it has one, is `failed`."""


class BatchFileUnavailableError(BatchFileError):
    """The batch file is temporarily unavailable: its disk is full, or failed."""


class JobNotFoundError(NightmillError, LookupError):
    """There is no job with this id."""


class BatchNotFoundError(NightmillError, LookupError):
    """There is no batch of this name."""


class InvalidTransitionError(NightmillError):
    """The job's state does not allow this."""


class WaitTimeoutError(NightmillError, TimeoutError):
    """The jobs did not finish in time; they continue."""


class StreamChangedError(NightmillError):
    """The job restarted and produced different text; read the final result instead."""


class ScoreError(NightmillError):
    """The texts were not scored."""


class EmbeddingError(NightmillError):
    """The text was not embedded."""


class RerankError(NightmillError):
    """The document was not ranked."""


class NotServedError(NightmillError):
    """No live worker serves the model."""


class DatabaseError(NightmillError):
    """The database refused a statement."""


class DatabaseUnreachableError(DatabaseError):
    """The database does not answer."""


class DatabaseBusyError(DatabaseUnreachableError):
    """Other transactions hold the same rows, even after several attempts."""


class DatabaseRefusedError(DatabaseError):
    """The database does not accept these values."""


class SchemaError(DatabaseError):
    """The database has no Nightmill tables, or tables of another version: run `nightmill migrate`."""


class BrokerError(NightmillError):
    """The broker refused a command."""


class BrokerUnreachableError(BrokerError):
    """The broker does not answer."""


class MessageError(BrokerError):
    """A message in the broker could not have been sent by Nightmill."""


class ModelFetchError(NightmillError):
    """The model was not found, or cannot be fetched."""


class ModelFileError(NightmillError):
    """The model file is broken or not supported."""


class ChatTemplateError(NightmillError):
    """The model's chat template is missing, broken, or refuses these messages."""


class ConstraintError(NightmillError):
    """The constraint cannot be compiled, or exceeds the limits of a step."""


class RunnerError(NightmillError):
    """The runner failed; the jobs in flight are handed back to the queue."""


class DeliveryDelayedWarning(UserWarning):
    """The jobs are stored, but the broker did not accept their message: a worker will fetch them later."""


class IgnoredColumnWarning(UserWarning):
    """Index columns that pandas wrote into the table are ignored."""
