"""Nightmill: a batch text generator for your own GPUs.

    from nightmill import jobs
    job_id = jobs.enqueue("Write a haiku about rain")

`nightmill.jobs` is the client, `nightmill.worker` what runs on the machine with the GPU.
"""

from pathlib import Path

__all__ = ["package_directory"]


def package_directory() -> Path:
    """The folder with the kernels (`_cuda`), migrations (`_migrations`) and the bundled model (`_models`)."""
    return Path(__file__).resolve().parent
