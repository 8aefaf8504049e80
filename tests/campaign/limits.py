"""How long a call may take and an end may last, whatever hangs: what the documentation states, in one table.

To each is added the time for which the process that has to keep it was itself stopped, and what the machine
was late by (`lateness`).
"""

from tests.campaign.plan import STALE

MARGIN = 5.0  # for everything that is not waiting: the interpreter, a queue of statements, a slow disk

CLIENT = 60.0  # a call of the client: nobody waits longer for a database or a broker that hangs
CLIENT_CALLS = {
    # Several calls in one, each of which may wait.
    "submit_batch": 2 * CLIENT,
    "prune": 3 * CLIENT,
    "delete batch": 2 * CLIENT,
    "fork": 3 * CLIENT,
}

HTTP = 10.0  # one job, file or batch is shown, or refused; writes likewise
HTTP_LISTS = 30.0  # and lists and metrics, whose statements may take longer
REQUEST_SECONDS = 20.0  # --request-seconds of the campaign's servers
HTTP_CALLS = {
    "completion": REQUEST_SECONDS
    + 30.0
    + HTTP,  # the job's deadline, a worker's delay in ending it, the answer
    "stream": REQUEST_SECONDS + 30.0 + HTTP,
    "list": HTTP_LISTS,
    "upload": 2 * HTTP,
    "content": 2 * HTTP,
}

DRAIN = STALE  # drain_seconds of the campaign's workers
ENDS = {
    "worker": DRAIN + 45.0,
    "server": 45.0,  # 30 s for answers that are under way, and the rest for what hangs
    "run": DRAIN + 70.0,  # first its worker ends, or is killed
}


def client_limit(what: str) -> float:
    """Seconds that a call of the client may take."""
    return CLIENT_CALLS.get(what, CLIENT) + MARGIN


def http_limit(what: str) -> float:
    """Seconds after which an HTTP request has its answer, to the last byte."""
    return HTTP_CALLS.get(what, HTTP) + MARGIN


def grace(kind: str) -> float:
    """Seconds from SIGTERM to the end of a worker, a server or a run."""
    return ENDS[kind] + MARGIN
