"""What steps cost is shared by those that they computed: sums, signs, costs of tokens, a counter's pace."""

import math
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from operator import itemgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.metering import PROMPT_SHARE, READ_SECONDS, Metering, TokenCosts
from nightmill.worker.engine.plan import Chunk, StepPlan
from nightmill.worker.engine.request import Request, Sequence, SequenceState
from tests.support.engines import complete
from tests.unit.engine.scripted import ScriptedRunner, make_engine, make_request


def sequence(number: int, prompt: int = 8) -> Sequence:
    request = Request(f"j{number}", 1, (0,) * prompt, GenerationParams(), 0)
    return Sequence(request, number, [0] * prompt, 1000)


def step(decodes: Listed[Sequence], chunks: Listed[tuple[Sequence, int]] = ()) -> StepPlan:
    return StepPlan([*decodes], [Chunk(one, 0, length) for one, length in chunks], [], [], [])


@dataclass
class Device:
    """A device that draws a power, and counts energy in steps of a tenth of a second."""

    now: float = 100.0
    watts: float = 300.0
    energy: float = 5000.0
    tells: bool = True
    read: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def work(self, seconds: float, watts: float | None = None) -> None:
        self.watts = self.watts if watts is None else watts
        self.now += seconds
        self.energy += seconds * self.watts

    def joules(self) -> float | None:
        self.read.append(self.now)
        return round(self.energy, 3) if self.tells else None


def test_a_step_is_shared_by_tokens_and_nobody_pays_for_rest() -> None:
    device = Device(tells=False)
    metering, (a, b, c) = Metering(device, device.clock), [sequence(number) for number in range(3)]
    metering.begin()
    device.work(1.0)
    metering.end(step([a, b], [(c, 8)]))  # a token of a prompt costs a quarter of a drawn one
    assert (a.seconds, b.seconds, c.seconds) == pytest.approx((0.25, 0.25, 0.5)) and PROMPT_SHARE == 0.25
    b.state = SequenceState.FINISHED  # its text was over before this step, which was launched ahead
    device.work(1.0)
    metering.end(step([a, b]))
    assert (a.seconds, b.seconds) == pytest.approx((1.25, 0.25))
    metering.rest()
    device.work(50.0)
    metering.begin()
    device.work(0.5)
    metering.end(step([a]))
    assert a.seconds == pytest.approx(1.75) and metering.seconds == pytest.approx(2.5)
    assert metering.joules is None and {one.joules for one in (a, b, c)} == {0.0}


def test_charges_follow_the_counter_and_rest_is_no_ones() -> None:
    device = Device()
    metering, one = Metering(device, device.clock), sequence(0)
    worked = 0.0
    for watts in (300.0, 650.0, 120.0):
        device.work(40.0, 90.0)  # idle
        before = device.energy
        metering.begin()
        for _ in range(400):
            device.work(0.025, watts)
            metering.end(step([one]))
        metering.rest()
        worked += device.energy - before
        assert one.joules == pytest.approx(worked, rel=0.02)
    assert metering.joules == pytest.approx(one.joules)
    # Once an interval at most, and where rest begins and ends.
    assert len(device.read) <= 3 * (10.0 / READ_SECONDS + 2)


SECONDS = st.floats(1e-4, 0.5)
WATTS = st.floats(0.0, 1000.0)


@given(
    st.lists(
        st.tuples(
            SECONDS,
            WATTS,
            st.lists(st.integers(0, 5), max_size=6, unique=True),
            st.lists(st.tuples(st.integers(0, 5), st.integers(1, 500)), max_size=3, unique_by=itemgetter(0)),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_whatever_steps_compute_shares_add_up_and_none_is_negative(
    steps: list[tuple[float, float, list[int], list[tuple[int, int]], bool]],
) -> None:
    device = Device()
    metering, sequences = Metering(device, device.clock), [sequence(number) for number in range(6)]
    metering.begin()
    worked = energy = 0.0
    for seconds, watts, decodes, chunks, rests in steps:
        before = [(one.seconds, one.joules) for one in sequences]
        drawn = [sequences[number] for number in decodes]
        prompts = [(sequences[number], length) for number, length in chunks if number not in decodes]
        counted = device.energy
        device.work(seconds, watts)
        metering.end(step(drawn, prompts))
        worked += seconds if drawn or prompts else 0.0
        energy += device.energy - counted
        after = [(one.seconds, one.joules) for one in sequences]
        pairs = list(zip(after, before, strict=True))
        assert all(now[0] >= then[0] and now[1] >= then[1] for now, then in pairs)
        paid = {number for number, (now, then) in enumerate(pairs) if now != then}
        assert paid <= {*decodes, *(number for number, _ in chunks)}
        if rests:
            metering.rest()
            metering.begin()
    assert sum(one.seconds for one in sequences) == pytest.approx(metering.seconds) == pytest.approx(worked)
    assert sum(one.joules for one in sequences) == pytest.approx(metering.joules or 0.0, abs=1e-6)
    # Charges never run ahead of what is known by more than the time since the last reading.
    assert (metering.joules or 0.0) <= energy + 1000.0 * (READ_SECONDS + 0.5) * 4


@given(
    st.floats(0.002, 1.0),
    st.floats(1e-5, 1e-2),
    st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 500)), min_size=40, max_size=80),
)
def test_the_cost_of_a_token_is_what_the_steps_showed(
    share: float, draw: float, steps: list[tuple[int, int]]
) -> None:
    costs = TokenCosts()
    for prompts, drawn in steps:
        costs.observe(prompts, drawn, draw * (share * prompts + drawn))
        costs.observe(0, drawn, draw * drawn)
        costs.observe(prompts, 0, draw * share * prompts)
    assert math.isclose(costs.prompt_share, share, rel_tol=1e-6)


def test_costs_are_guessed_until_steps_differ_and_stay_possible() -> None:
    costs = TokenCosts()
    for _ in range(100):
        costs.observe(0, 64, 0.01)
    assert costs.prompt_share == PROMPT_SHARE
    costs.observe(4096, 64, 0.05)
    assert costs.prompt_share == pytest.approx(0.04 / 4096 / (0.01 / 64))
    for _ in range(100):
        costs.observe(10, 0, 1.0)
        costs.observe(0, 10, 0.001)
    assert costs.prompt_share == 1.0


def test_an_engine_says_with_each_text_what_it_cost() -> None:
    device = Device()

    class Metered(ScriptedRunner):
        def launch(self, batch: object) -> None:
            super().launch(batch)  # type: ignore[arg-type]
            device.work(0.125)

    engine = make_engine(Metered(), metering=Metering(device, device.clock), context_length=400)
    requests = [
        make_request(f"j{number}", (0, 1) * (number + 1), seed=number, max_tokens=300, ignore_eos=True)
        for number in range(6)
    ]
    done = complete(engine, requests)
    stats = engine.stats
    assert stats.gpu_seconds == pytest.approx(0.125 * stats.steps)
    assert sum(one.gpu_seconds for one in done.values()) == pytest.approx(stats.gpu_seconds)
    joules = [one.energy_joules for one in done.values()]
    assert None not in joules and sum(map(float, joules)) == pytest.approx(stats.energy_joules)  # type: ignore[arg-type]
    assert stats.energy_joules == pytest.approx(device.energy - 5000.0, rel=0.02)


def test_what_is_abandoned_says_what_it_cost_so_far() -> None:
    device = Device()

    class Metered(ScriptedRunner):
        def launch(self, batch: object) -> None:
            super().launch(batch)  # type: ignore[arg-type]
            device.work(0.125)

    engine = make_engine(Metered(), metering=Metering(device, device.clock), context_length=400)
    for number in range(3):
        engine.submit(make_request(f"j{number}", seed=number, max_tokens=300, ignore_eos=True))
    for _ in range(40):
        engine.step()
    stats, partials = engine.stats, engine.abandon()
    assert (
        sum(one.gpu_seconds for one in partials) == pytest.approx(stats.gpu_seconds) and stats.gpu_seconds > 4
    )
    assert sum(one.energy_joules or 0.0 for one in partials) == pytest.approx(stats.energy_joules)
