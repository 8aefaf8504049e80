"""Several answers of one job: their seeds, and the names by which they go while they are generated.

Nothing tells an answer from that of a job of its own but where its seed comes from: enqueued alone with that
seed it has the same text.
"""

_STRIDE = 0x1E3779B97F4A7C15
"""2^64 over the golden ratio, without its highest bit. It is odd, so no two answers of a job share a seed."""
_SEEDS = 1 << 63


def answer_seed(seed: int, number: int) -> int:
    """The seed of a job's answer `number`, counted from 0; the first has the job's own."""
    return (seed + number * _STRIDE) % _SEEDS


def answer_id(job_id: str, number: int) -> str:
    """What an answer is called in the engine and on its way to readers; the first goes by the job's id."""
    return f"{job_id}.{number}" if number else job_id


def split_answer_id(answer: str) -> tuple[str, int]:
    """The job's id and the answer's number of what `answer_id` made."""
    job_id, _, number = answer.partition(".")
    return job_id, int(number or 0)
