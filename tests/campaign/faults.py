"""The faults of a plan, carried out on processes and servers; what is mischief by work is in `mischief`.

A method returns False where there was nothing to be done: the process was away, another fault was in its way.
"""

import random
import signal

import redis

from tests.campaign.clocks import HOUR
from tests.campaign.disk import NO_DISK
from tests.campaign.fleet import Fleet
from tests.campaign.ledger import Ledger
from tests.campaign.members import Member
from tests.campaign.mischief import Mischief
from tests.campaign.plan import FAULTS, Action
from tests.campaign.report import Report
from tests.campaign.world import World
from tests.support.freezing import Freeze

FULL = 4096  # bytes beyond which a process writes no file


class Faults(Mischief):
    """`carry_out` calls the method that an action names."""

    def __init__(self, world: World, fleet: Fleet, ledger: Ledger, report: Report) -> None:
        super().__init__(world, ledger, report)
        self._fleet = fleet

    def carry_out(self, action: Action) -> None:
        """Do it now."""
        self._report.step = str(action)
        done = getattr(self, action.name)(action)
        if action.name in FAULTS:  # not the end of one
            self._report.count(f"fault {action.name}" if done is not False else "faults that met another")

    def undo_all(self) -> None:
        """Everything runs again, and what was begun comes to its end."""
        self.continue_servers()
        self._world.right_clock()
        self._fleet.undo_all()
        self.wait()
        self._world.sql("UPDATE workers SET paused = FALSE")

    def continue_servers(self) -> None:
        """Redis, the database, their connections, disk and folder are as they should be."""
        world = self._world
        world.revive_redis()
        world.thaw_connections("redis")
        world.release_write_lock()
        world.free_disk()
        world.stale_folder.unlink(missing_ok=True)
        world.folder_returns()
        if world.database == "postgresql":
            world.thaw_connections("postgres")
            world.continue_postgres()

    # -- processes ---------------------------------------------------------------------------------

    def kill_worker(self, action: Action) -> bool:
        return self._fleet.do("kill", self._workers(action))

    def kill_engine(self, action: Action) -> bool:
        return self._fleet.do("kill_engine", self._workers(action))

    def terminate(self, action: Action) -> bool:
        return self._fleet.do("terminate", self._workers(action), self._hung(self._workers(action)))

    def hang_engine(self, action: Action) -> bool:
        return self._fleet.do("hang_engine", self._workers(action))

    def continue_engine(self, action: Action) -> None:
        self._fleet.do("continue_engine", self._workers(action))

    def freeze(self, action: Action) -> bool:
        return self._fleet.do("freeze", self._workers(action))

    def thaw(self, action: Action) -> None:
        self._fleet.do("thaw", self._workers(action))

    def kill_server(self, action: Action) -> bool:
        return self._fleet.do("kill", self._servers(action))

    def terminate_server(self, action: Action) -> bool:
        return self._fleet.do("terminate", self._servers(action), self._hung([]))

    def freeze_server(self, action: Action) -> bool:
        return self._fleet.do("freeze", self._servers(action))

    def thaw_server(self, action: Action) -> None:
        self._fleet.do("thaw", self._servers(action))

    def _workers(self, action: Action) -> list[Member]:
        return self._fleet.workers if action.worker < 0 else [self._fleet.workers[action.worker]]

    def _servers(self, action: Action) -> list[Member]:
        return self._fleet.servers if action.worker < 0 else [self._fleet.servers[action.worker]]

    def _hung(self, members: list[Member]) -> str:
        """What hangs beside somebody who is asked to end."""
        engines = ["its engine"] if any(member.engine_hangs for member in members) else []
        return ", ".join(filter(None, [self._world.hanging, *engines]))

    # -- servers -----------------------------------------------------------------------------------

    def redis_kill(self, action: Action) -> None:
        self._world.kill_redis()

    def redis_start(self, action: Action) -> None:
        self._world.revive_redis()

    def redis_flush(self, action: Action) -> bool:
        try:
            self._world.redis.flush()
        except redis.exceptions.RedisError:
            return False
        return True

    def redis_pause(self, action: Action) -> None:
        self._world.freeze_redis()

    def redis_continue(self, action: Action) -> None:
        self._world.revive_redis()

    def redis_deaf(self, action: Action) -> None:
        self._world.freeze_connections("redis", Freeze.ACKNOWLEDGED, new=True)

    def redis_freeze(self, action: Action) -> None:
        self._freeze("redis", action)

    def redis_hears(self, action: Action) -> None:
        self._world.thaw_connections("redis")

    def restart_fast(self, action: Action) -> None:
        self._world.trouble()
        self._world.postgres.restart(signal.SIGINT)

    def restart_immediate(self, action: Action) -> None:
        self._world.trouble()
        self._world.postgres.restart(signal.SIGQUIT)

    def drop_connections(self, action: Action) -> bool:
        if self._world.postgres_hangs:
            return False
        self._world.trouble()
        self._world.postgres.drop_connections()
        return True

    def postgres_pause(self, action: Action) -> None:
        self._world.hang_postgres()

    def postgres_continue(self, action: Action) -> None:
        self._world.continue_postgres()

    def postgres_deaf(self, action: Action) -> None:
        self._world.freeze_connections("postgres", Freeze.ACKNOWLEDGED, new=True)

    def postgres_freeze(self, action: Action) -> None:
        self._freeze("postgres", action)

    def postgres_hears(self, action: Action) -> None:
        self._world.thaw_connections("postgres")

    def _freeze(self, name: str, action: Action) -> None:
        """Open connections, or new ones, too; with TCP's acknowledgements, or with silence."""
        draw = random.Random(action.number)
        how, new = draw.choice(list(Freeze)), draw.random() < 0.5
        self._report.count(f"frozen connections to {name}: {how.name.lower()}{', new ones, too' * new}")
        self._world.freeze_connections(name, how, new=new)

    def write_lock(self, action: Action) -> None:
        self._world.hold_write_lock()

    def write_unlock(self, action: Action) -> None:
        self._world.release_write_lock()

    # -- disks, folders, clocks --------------------------------------------------------------------

    def file_limit(self, action: Action) -> bool:
        return self._fleet.do("limit_files", self._workers(action), FULL)

    def file_unlimited(self, action: Action) -> None:
        self._fleet.do("limit_files", self._workers(action), None)

    def disk_full(self, action: Action) -> bool:
        if not self._world.disk.mounted:
            self._report.count(NO_DISK)
            return False
        return self._world.fill_disk()

    def disk_free(self, action: Action) -> None:
        self._world.free_disk()

    def folder_gone(self, action: Action) -> bool:
        return self._world.folder_goes()

    def folder_back(self, action: Action) -> None:
        self._world.folder_returns()

    def folder_stale(self, action: Action) -> None:
        self._world.stale_folder.touch()

    def folder_fresh(self, action: Action) -> None:
        self._world.stale_folder.unlink(missing_ok=True)

    def clock_step(self, action: Action) -> bool:
        if self._world.postgres_hangs:
            return False
        self._world.step_clock(HOUR if action.number % 2 else -HOUR)
        return True

    def clock_right(self, action: Action) -> bool:
        if self._world.postgres_hangs:
            self._world.continue_postgres()  # its clock is set at the time that the plan says
        self._world.right_clock()
        return True

    def host_clock(self, action: Action) -> None:
        for worker in self._workers(action):
            worker.clock.write_text(str(HOUR if action.number % 2 else -HOUR))

    def host_clock_right(self, action: Action) -> None:
        for worker in self._workers(action):
            worker.clock.unlink(missing_ok=True)
