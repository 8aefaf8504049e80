"""Proxies before the servers of a night, in a process of their own: they are to delay nobody.

    python -m tests.campaign.proxies '{"redis": ["127.0.0.1", 6379], "postgres": "/path/of/a/socket"}'

prints the ports, and then does what each line of standard input says, until that ends.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Self

from tests.support.freezing import Address, Freeze, FreezingProxy


class Proxies:
    """The campaign's side."""

    def __init__(self, targets: Mapping[str, Address]) -> None:
        command = [sys.executable, "-m", "tests.campaign.proxies", json.dumps(targets)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._lock = threading.Lock()
        assert self._process.stdout is not None
        self.ports: dict[str, int] = json.loads(self._process.stdout.readline())

    def freeze(self, name: str, how: Freeze, *, new: bool) -> None:
        """As FreezingProxy.freeze."""
        self._say({"freeze": name, "how": how.name, "new": new})

    def thaw(self, name: str) -> None:
        """As FreezingProxy.thaw."""
        self._say({"thaw": name})

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _say(self, order: Mapping[str, object]) -> None:
        """Returns when it is done."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            if not self._process.stdout.readline():
                raise RuntimeError("the process of the proxies has ended")


def main() -> None:
    """Be that process."""
    targets = {
        name: target if isinstance(target, str) else tuple(target)
        for name, target in json.loads(sys.argv[1]).items()
    }
    with ExitStack() as opened:
        proxies = {name: opened.enter_context(FreezingProxy(target)) for name, target in targets.items()}
        print(json.dumps({name: proxy.port for name, proxy in proxies.items()}), flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            if "freeze" in order:
                proxies[order["freeze"]].freeze(Freeze[order["how"]], new=order["new"])
            else:
                proxies[order["thaw"]].thaw()
            print("done", flush=True)


if __name__ == "__main__":
    main()
