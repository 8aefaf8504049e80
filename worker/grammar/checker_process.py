"""Compiles strangers' grammars in a process of its own, which may be killed at any moment.

llguidance has limits, but not for all that a grammar can ask of it: some schemas take minutes to compile, and
chains of rules overflow the stack. What has been compiled here, with less stack and in bounded time and
memory, can be compiled where the GPU is driven. `worker.grammar.checker` starts this as a script and is
the other end of the connection; the package is not imported here, for that would take a second.

The parent sends JSON, first what bounds this process, then a grammar at a time; each is answered by JSON:
the grammar again, or why it cannot be compiled. Nothing that comes from here is ever unpickled.
"""

import json
import resource
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

sys.path += sys.argv[2:]  # where llguidance is: site-packages are not searched, which saves time

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

STACK = 1 << 20  # bytes; where grammars are compiled for good, and masks computed, threads have twice that


def confine(memory: int) -> None:
    """Give up what a parser does not need, for good."""
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def answer(asked: dict[str, Any], tokenizer: LLTokenizer, limits: LLParserLimits) -> dict[str, str]:
    """Compile a grammar and look at its first mask, which must leave something to begin with.

    If there is an `after`, it must leave `next`, a character, behind that text.
    """
    lark = asked["lark"]
    matcher = LLMatcher(tokenizer, lark + asked["options"], log_level=0, limits=limits)
    if "after" in asked:
        matcher.try_consume_tokens(list(asked["after"].encode()))
    if not matcher.is_error():
        mask = matcher.compute_bitmask()
        if "next" in asked and not mask[ord(asked["next"]) // 8] >> ord(asked["next"]) % 8 & 1:
            return {"refused": "it cannot go on so"}
    return {"refused": matcher.get_error()} if matcher.is_error() else {"lark": lark}


def serve(connection: Connection, begin: dict[str, Any]) -> None:
    """Until the parent is gone."""
    limits = LLParserLimits(**begin["parser"])
    tokenizer = LLTokenizer("byte")
    confine(begin["memory"])
    while True:
        try:
            asked = json.loads(connection.recv_bytes())
        except EOFError:
            return
        # The kernel kills this process after so much processor time from now on.
        signal.setitimer(signal.ITIMER_PROF, begin["seconds"])
        said = answer(asked, tokenizer, limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(json.dumps(said).encode())


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # when to stop is the parent's to say
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with Connection(int(sys.argv[1])) as connection:
        begin = json.loads(connection.recv_bytes())
        threading.stack_size(STACK)
        thread = threading.Thread(target=serve, args=(connection, begin))
        thread.start()
        thread.join()


if __name__ == "__main__":
    main()
