"""Whether drafts pay: what is timed, what is chosen by it, and that it is chosen again."""

from collections.abc import Callable

import pytest

from nightmill.worker.engine.drafting import MOST_SEQUENCES, Drafts
from nightmill.worker.engine.metering import Metering
from nightmill.worker.engine.payoff import PATIENCE, RETRY, SETTLING, WINDOW, Payoff
from tests.support.engines import complete
from tests.unit.engine.scripted import RepeatingRunner, cyclic, make_engine

TURN = SETTLING + WINDOW + 1


class Steps:
    """Steps of so many sequences: `cost` and `gain` of a step with drafts and of one without."""

    def __init__(
        self, cost: Callable[[bool], float], gain: Callable[[bool], int] = lambda on: 3 if on else 1
    ):
        self.cost, self.gain = cost, gain
        self.now = 0.0
        self.payoff = Payoff(lambda: self.now)

    def share(self, launches: int, sequences: int = 1) -> float:
        """Collect launches; how many of them had drafts."""
        drafted = 0
        for _ in range(launches):
            on = self.payoff.drafting
            drafted += on
            self.now += self.cost(on)
            self.payoff.drew(sequences, self.gain(on) * sequences)
        return drafted / launches


def test_first_both_ways_are_timed() -> None:
    steps = Steps(lambda on: 1.0)
    assert steps.share(TURN) < 0.1
    assert steps.share(TURN) > 0.9


@pytest.mark.parametrize(("dear", "pays"), [(1.2, True), (2.9, True), (2.95, False), (6.0, False)])
def test_what_gives_more_tokens_per_second_is_chosen(dear: float, pays: bool) -> None:
    """A draft gives three tokens in place of one, and costs so much more."""
    steps = Steps(lambda on: dear if on else 1.0)
    steps.share(2 * TURN)
    share = steps.share(20 * TURN)
    assert share > 0.95 if pays else share < 0.05


def test_the_first_step_of_each_shape_does_not_count_against_drafts() -> None:
    """Its graph is captured, which takes as long as many steps; a window has some such at first."""
    new = iter(range(8))
    steps = Steps(lambda on: 2.0 if not on else 40.0 if next(new, None) is not None else 3.0)
    steps.share(2 * TURN)
    assert steps.share(20 * TURN) > 0.95


def test_what_was_worse_is_tried_again_and_chosen_once_it_pays() -> None:
    dear = 9.0
    steps = Steps(lambda on: dear if on else 1.0)
    steps.share(4 * TURN)
    assert steps.share((RETRY - 4) * TURN) == 0.0
    dear = 0.9
    for _ in range(6):  # the old figure counts for half each time
        steps.share(RETRY * TURN)
    assert steps.share(10 * TURN) > 0.8


def test_numbers_of_sequences_are_judged_apart() -> None:
    steps = Steps(lambda on: 1.0)
    steps.share(3 * TURN, sequences=1)
    assert steps.payoff.drafting
    steps.share(1, sequences=MOST_SEQUENCES)
    assert not steps.payoff.drafting
    steps.share(1, sequences=1)
    assert steps.payoff.drafting


def interrupted(steps: Steps, stretch: int, launches: int) -> float:
    """Collect launches with prompts between, which take long, after each so many; the share with drafts."""
    drafted = 0.0
    for _ in range(launches // stretch):
        drafted += steps.share(stretch) * stretch
        steps.now += 1000.0
        steps.payoff.interrupt()
    return drafted / (launches // stretch * stretch)


@pytest.mark.parametrize(("dear", "pays"), [(1.0, True), (6.0, False)])
def test_what_is_interrupted_is_timed_in_parts(dear: float, pays: bool) -> None:
    """Prompts come before a window is over; their time counts for nothing."""
    steps = Steps(lambda on: dear if on else 1.0)
    interrupted(steps, WINDOW // 2, 8 * TURN)
    share = interrupted(steps, WINDOW // 2, 20 * TURN)
    assert share > 0.9 if pays else share < 0.1


def test_what_can_never_be_timed_is_without_drafts() -> None:
    """Too few launches come together, from the beginning or once drafts are tried."""
    steps = Steps(lambda on: 1.0)
    assert interrupted(steps, SETTLING, 3 * PATIENCE) == 0.0
    steps.share(TURN)
    assert steps.payoff.drafting
    interrupted(steps, SETTLING, PATIENCE)
    assert not steps.payoff.drafting
    assert interrupted(steps, SETTLING, 3 * PATIENCE) == 0.0


def test_a_way_that_pays_is_gone_on_where_the_other_cannot_be_timed() -> None:
    steps = Steps(lambda on: 1.0)
    steps.share(2 * TURN)
    while steps.payoff.drafting:  # until steps without drafts are tried again
        steps.share(1)
    interrupted(steps, SETTLING, PATIENCE)
    assert steps.payoff.drafting


def test_numbers_that_change_to_and_fro_are_timed_in_parts() -> None:
    """And what is tried is tried no sooner than after so many windows of its own."""
    steps = Steps(lambda on: 6.0 if on else 1.0)
    drafted = 0.0
    for turn in range(20 * RETRY):
        drafted += 10 * steps.share(10, sequences=1 + turn % 2)
    assert 0.0 < drafted / (200 * RETRY) < 0.1


def test_a_window_that_took_no_time_teaches_nothing() -> None:
    steps = Steps(lambda on: 0.0)
    assert steps.share(4 * TURN) == 0.0


@pytest.mark.parametrize("depth", [1, 3])
def test_an_engine_drafts_by_itself_where_that_takes_less_time(depth: int) -> None:
    """Its clock goes on with each step. The text is the same; so it is where a draft takes long."""
    requests = [cyclic("a", tokens=600)]
    options = {"kv_pages": 256, "depth": depth, "slots": 16}
    limits = {"context_length": 800, "token_budget": 64}
    plain = complete(make_engine(RepeatingRunner(**options), **limits), requests)

    def run(dear: float) -> tuple[object, int, int]:
        runner = RepeatingRunner(**options)
        metering = Metering(
            None, lambda: float(sum(dear if len(one.tokens) > 1 else 1.0 for one in runner.batches))
        )
        engine = make_engine(runner, metering=metering, drafts=Drafts.AUTO, **limits)
        done = complete(engine, requests)
        return done, engine.stats.guessed_right, engine.stats.steps

    cheap, right, steps = run(1.0)
    assert cheap == plain and right > 300 and steps < 300
    dear, right, steps = run(40.0)
    assert dear == plain and 0 < right < 300 and steps > 300
