"""When two submissions are of one batch: the same file, model and settings."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from nightmill.jobs.errors import BatchConflictError
from nightmill.jobs.formats import InputFile
from nightmill.jobs.reply.batch_status import BatchRecord
from nightmill.jobs.tables.shape import identity


def file_batch_name(file: InputFile, fingerprint: str, model: str | None, settings: Mapping[str, Any]) -> str:
    """The name of a file's batch if none is given: the same for the same rows, model and settings."""
    return batch_name(file.path.name.partition(".")[0], fingerprint, model, settings)


def batch_name(begin: str, fingerprint: str, model: str | None, settings: Mapping[str, Any]) -> str:
    """A name that begins so, the same for the same rows, model and settings."""
    content = json.dumps([fingerprint, model, identity(settings)], sort_keys=True)
    stem = re.sub(r"[^\w.-]+", "-", begin)[:100] or "batch"
    return f"{stem}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def check_same(wanted: BatchRecord, known: BatchRecord) -> None:
    """Refuse to mix what is to be submitted with a batch that is there; BatchConflictError names the part."""
    if wanted.fingerprint is None or known.fingerprint is None:
        raise BatchConflictError(
            f"name: there is a batch {known.name!r} already, and only files can be submitted again: choose "
            "another name, or delete it first",
            field="name",
        )
    differences = {
        "content of the file": wanted.fingerprint != known.fingerprint,
        "model": wanted.model != known.model,
        "settings": identity(wanted.settings) != identity(known.settings),
    }
    if different := [part for part, differs in differences.items() if differs]:
        raise BatchConflictError(
            f"name: batch {known.name!r} was submitted with other {' and '.join(different)} "
            f"({known.source}): choose another name, or delete it first",
            field="name",
        )
