"""The faults of a plan, carried out on processes and servers; what is mischief by work is in `mischief`."""

import signal

import redis

from tests.campaign.fleet import Fleet
from tests.campaign.ledger import Ledger
from tests.campaign.mischief import Mischief
from tests.campaign.plan import Action
from tests.campaign.report import Report
from tests.campaign.world import World


class Faults(Mischief):
    """`carry_out` calls the method that an action names."""

    def __init__(self, world: World, fleet: Fleet, ledger: Ledger, report: Report) -> None:
        super().__init__(world, ledger, report)
        self._fleet = fleet

    def carry_out(self, action: Action) -> None:
        """Do it now."""
        self._report.step = str(action)
        self._report.count(f"fault {action.name}")
        getattr(self, action.name)(action)

    def undo_all(self) -> None:
        """Everything runs again, and what was begun comes to its end."""
        self._world.revive_redis()
        self._world.release_write_lock()
        self._fleet.thaw(-1)
        for worker, clock in enumerate(self._fleet.clocks):
            clock.unlink(missing_ok=True)
            self._fleet.limit_files(worker, None)
        self.wait()

    # -- processes ---------------------------------------------------------------------------------

    def kill_worker(self, action: Action) -> None:
        self._fleet.kill(action.worker)

    def kill_engine(self, action: Action) -> None:
        self._fleet.kill_engine(action.worker)

    def terminate(self, action: Action) -> None:
        self._fleet.terminate(action.worker)

    def hang_engine(self, action: Action) -> None:
        self._fleet.hang_engine(action.worker)

    def freeze(self, action: Action) -> None:
        self._fleet.freeze(action.worker)

    def thaw(self, action: Action) -> None:
        self._fleet.thaw(action.worker)

    # -- servers -----------------------------------------------------------------------------------

    def redis_kill(self, action: Action) -> None:
        self._world.kill_redis()

    def redis_start(self, action: Action) -> None:
        self._world.revive_redis()

    def redis_flush(self, action: Action) -> None:
        try:
            self._world.redis.flush()
        except redis.exceptions.RedisError:
            self._report.count("faults that met another")

    def redis_pause(self, action: Action) -> None:
        self._world.freeze_redis()

    def redis_continue(self, action: Action) -> None:
        self._world.revive_redis()

    def restart_fast(self, action: Action) -> None:
        self._world.trouble()
        self._world.postgres.restart(signal.SIGINT)

    def restart_immediate(self, action: Action) -> None:
        self._world.trouble()
        self._world.postgres.restart(signal.SIGQUIT)

    def drop_connections(self, action: Action) -> None:
        self._world.trouble()
        self._world.postgres.drop_connections()

    def write_lock(self, action: Action) -> None:
        self._world.hold_write_lock()

    def write_unlock(self, action: Action) -> None:
        self._world.release_write_lock()

    def disk_full(self, action: Action) -> None:
        self._fleet.limit_files(action.worker, 4096)

    def disk_free(self, action: Action) -> None:
        self._fleet.limit_files(action.worker, None)

    def clock_step(self, action: Action) -> None:
        self._fleet.clocks[action.worker].write_text("3600")

    def clock_right(self, action: Action) -> None:
        self._fleet.clocks[action.worker].unlink(missing_ok=True)
