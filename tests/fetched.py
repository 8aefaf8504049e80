"""What tests read that comes from the network: a developer may do without it, continuous integration not."""

import os
from typing import NoReturn

import pytest


def missing(said: str) -> NoReturn:
    """Skip the test that needs what `said` says is not there and how to get it; with CI set, fail it."""
    if os.environ.get("CI"):
        pytest.fail(f"{said}. Continuous integration skips nothing for want of it", pytrace=False)
    pytest.skip(said)
