"""A worker that registers, says what it is told to, and dies: `STATE CODE` stand in STUB_WORKER_DEATH."""

import os
import sys

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.database import Database

if __name__ == "__main__":
    state, code = os.environ["STUB_WORKER_DEATH"].split()
    claims = Claims(Database(Settings.from_env()), sys.argv[sys.argv.index("--id") + 1])
    claims.register("another-host", 1, "nightmill-demo", None, "loading the model")
    if state != "starting":
        claims.beat(WorkerState(state))
    if int(code) < 0:
        os.kill(os.getpid(), -int(code))
    sys.exit(int(code))
