"""Several answers of one job: their seeds, and their ids during generation.

An answer equals that of a separate job with the same seed.
"""

_STRIDE = 0x1E3779B97F4A7C15
"""2^64 divided by the golden ratio, without the highest bit. It is odd, so answers of a job never share a
seed."""
_SEEDS = 1 << 63


def answer_seed(seed: int, number: int) -> int:
    """Return the seed of answer `number`, counted from 0; the first has the job's own seed."""
    return (seed + number * _STRIDE) % _SEEDS


def answer_id(job_id: str, number: int) -> str:
    """Return the id of an answer in the engine and in streams; the first has the job's id."""
    return f"{job_id}.{number}" if number else job_id


def split_answer_id(answer: str) -> tuple[str, int]:
    """Split the result of `answer_id` into the job's id and the answer's number."""
    job_id, _, number = answer.partition(".")
    return job_id, int(number or 0)
