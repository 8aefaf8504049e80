"""Names of jobs: their own ids, or the ids that the API gives their answers."""

from nightmill.jobs.base.ids import is_job_id
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import JobNotFoundError
from nightmill.jobs.formats.openai import MAX_PROMPTS
from nightmill.jobs.sql.jobs import Selection

PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""Before the id of a job, or of a request with several prompts, in the ids of answers over HTTP."""


def ids_of(client: Client, name: str) -> list[str]:
    """The jobs that this names: one by its id, one or several by the id of an answer.

    Raises JobNotFoundError for the id of an answer that no job gave. Other names stand for themselves:
    whether there is such a job, whoever looks for it finds out.
    """
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    bare = name.removeprefix(prefix)
    if not prefix or not is_job_id(bare):
        return [name]
    try:
        return [client.get(bare).id]
    except JobNotFoundError:
        found = client.store.ids(Selection(request_id=bare), MAX_PROMPTS)
        if not found:
            raise
        return found
