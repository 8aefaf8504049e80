"""A worker whose model is loaded once the file that SLOW_WORKER_GATE names is there."""

import os
import sys
import time
from pathlib import Path

import nightmill.worker.app
from nightmill.jobs.settings import Settings
from nightmill.worker.commands.serving import worker as worker_command
from nightmill.worker.engine.engine import Engine
from nightmill.worker.link import process as engine_process
from nightmill.worker.link.loading import OpenModel, ReportingFile, build_engine


def build_slowly(settings: Settings, model: OpenModel) -> Engine:
    """As `build_engine`, after some of the weights and a wait."""
    assert isinstance(model.file, ReportingFile)
    for name in list(model.file.tensors)[:10]:
        model.file.raw(name)
    while not Path(os.environ["SLOW_WORKER_GATE"]).exists():
        time.sleep(0.02)
    return build_engine(settings, model)


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:  # started by the worker, below
        engine_process.build_engine = build_slowly
        sys.exit(engine_process.main())
    nightmill.worker.app.ENGINE_COMMAND = (sys.executable, __file__, "engine")
    worker_command.main()
