"""A worker whose model is loaded once the file that SLOW_WORKER_GATE names is there."""

import os
import sys
import time
from pathlib import Path

from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.model import OpenModel
from nightmill.worker.assembly.reporting import ReportingFile
from nightmill.worker.engine.engine import Engine
from tests.support.own_engine import run_module

NAME = "tests.integration.worker.slow_worker"
SLOW_WORKER = (sys.executable, "-m", NAME)


def build_slowly(settings: Settings, model: OpenModel) -> Engine:
    """As `build_engine`, after some of the weights and a wait."""
    assert isinstance(model.file, ReportingFile)
    for name in list(model.file.tensors)[:10]:
        model.file.raw(name)
    while not Path(os.environ["SLOW_WORKER_GATE"]).exists():
        time.sleep(0.02)
    return build_engine(settings, model)


if __name__ == "__main__":
    run_module(NAME, build_slowly)
