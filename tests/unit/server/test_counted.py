"""Slow counts are asked by one thread at a time."""

import threading

from nightmill.jobs.server.counted import Counted


def test_who_looks_while_another_asks_takes_what_there_is() -> None:
    asked: list[int] = []
    asking, answer = threading.Event(), threading.Event()

    def ask() -> int:
        asked.append(1)
        asking.set()
        assert answer.wait(240)
        return 7

    counted = Counted(ask, 0)
    first = threading.Thread(target=counted.look)
    first.start()
    assert asking.wait(240)
    others = [threading.Thread(target=counted.look) for _ in range(8)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join(240)
    assert (counted.found, len(asked)) == (0, 1)
    answer.set()
    first.join(240)
    counted.look()
    assert (counted.found, len(asked)) == (7, 1)


def test_a_question_that_failed_is_asked_again() -> None:
    answers = iter([ValueError("away"), 7])

    def ask() -> int:
        if isinstance(found := next(answers), Exception):
            raise found
        return found

    counted = Counted(ask, 0)
    try:
        counted.look()
    except ValueError:
        counted.look()
    assert counted.found == 7
