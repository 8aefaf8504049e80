"""Kernels of layers with states against the reference runner in float64; and to the bit, against themselves.

Whatever else is in a launch, and however a sequence is cut, a token's bits are the same.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from nightmill.worker.model.spec import Mamba2, ShortConv
from nightmill.worker.runners.gpu.device.compiler import compile_all
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.sources import Source, for_element
from nightmill.worker.runners.gpu.states.convolution import ShortConvolution
from nightmill.worker.runners.gpu.states.delta_net import DeltaNet
from nightmill.worker.runners.gpu.states.mamba2 import Mamba
from tests.gpu.state_trials import AnyMixer, Piece, Results, Trial, assert_same, delta_net, mamba
from tests.support.cuda_runners import pretended_card
from tests.support.elements import BOTH_ELEMENTS

LENGTHS = (1, 2, 3, 16, 17, 63, 64, 65, 100, 127, 128, 129, 1000)
MANY = [*(Piece(length) for length in LENGTHS), *(Piece(length, 64) for length in LENGTHS), Piece(77, 640)]
DRAWN = [*(Piece(1, start) for start in range(1, 200, 5)), Piece(2, 7), Piece(3, 64), Piece(9, 100), Piece(1)]

SHORT = {
    "3": ShortConv(width=2048, kernel=3),
    "4, narrow": ShortConv(width=8, kernel=4),
    "2, odd": ShortConv(width=1048, kernel=2),
}
DELTA = {
    "0.8B": delta_net(16, 16),
    "9B": delta_net(16, 32),
    "27B": delta_net(16, 48),
    "one head": delta_net(1, 1),
    "64 heads": delta_net(64, 64, 32, 32),
    "80B of Qwen3-Next": delta_net(16, 32, by_key_head=True),
    "neighbours": delta_net(3, 9, 96, 64, by_key_head=True),
    **{
        f"{k} x {v}": delta_net(2, 4, k, v, 2 + k // 32 % 3)
        for k in (32, 64, 96, 128)
        for v in (32, 64, 96, 128)
    },
}
MAMBA = {
    "Nemotron": mamba(64, 64, 8, 128),
    "Granite": mamba(48, 64, 1, 128),
    "Falcon": mamba(24, 128, 1, 256),
    "Nemotron 9B": mamba(128, 80, 8, 128),
    "one head": mamba(1, 32, 1, 16, 2),
    "no bias": mamba(6, 96, 3, 64, 3, bias=False),
    **{
        f"{s} x {d}": mamba(4, d, 2, s)
        for s, d in [(16, 64), (32, 96), (64, 80), (96, 128), (128, 32), (128, 80), (256, 32), (256, 64)]
    },
    "256 x 80": mamba(4, 80, 2, 256),
    "256 x 96": mamba(4, 96, 4, 256),
}
MIXERS: dict[str, AnyMixer] = {
    **{f"short {name}": mixer for name, mixer in SHORT.items()},
    **{f"delta {name}": mixer for name, mixer in DELTA.items()},
    **{f"mamba {name}": mixer for name, mixer in MAMBA.items()},
}
KINDS: dict[str, AnyMixer] = {
    "short": SHORT["3"],
    "delta": DELTA["9B"],
    "delta 96 x 64": DELTA["96 x 64"],
    "mamba": MAMBA["Nemotron"],
    "mamba 256 x 80": MAMBA["256 x 80"],
}


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """All files of the tests that run, at once: a test would compile its own, one after the other."""
    with Device(pretended=pretended_card()) as device:
        architecture, hopper = device.architecture, device.hopper
    sources = [
        for_element(source, element)
        for mixer, element in dict.fromkeys(tried(request.session.items))
        for source in sources_of(mixer, hopper=hopper)
    ]
    compile_all(list(dict.fromkeys(sources)), architecture)


def tried(items: Sequence[pytest.Item]) -> Iterator[tuple[AnyMixer, Element]]:
    """The mixers of this module's tests, of those that were chosen."""
    for item in items:
        if isinstance(item, pytest.Function) and item.module.__name__ == __name__:
            given = item.callspec.params
            mixer = MIXERS[given["name"]] if "name" in given else KINDS[given["kind"]]
            yield mixer, given.get("element", Element.F16)


def sources_of(mixer: AnyMixer, *, hopper: bool) -> list[Source]:
    """Kernel files of a mixer."""
    if isinstance(mixer, ShortConv):
        return ShortConvolution.sources(mixer)
    kind = Mamba if isinstance(mixer, Mamba2) else DeltaNet
    return kind.sources(mixer, hopper=hopper)


@pytest.mark.parametrize("name", MIXERS)
def test_prompts_and_drawn_tokens(device: Device, name: str) -> None:
    Trial(device, MIXERS[name]).check(MANY[::2], DRAWN[::3], padding=3)


@BOTH_ELEMENTS
@pytest.mark.parametrize("controls", [False, True], ids=["all elements", "controls in float"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_lengths(device: Device, kind: str, controls: bool) -> None:
    trial = Trial(device, KINDS[kind], seed=1, controls=controls)
    trial.check(MANY, DRAWN, padding=2)
    trial.check(MANY[:1])
    trial.check([], DRAWN[-1:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokens_bits_do_not_depend_on_what_follows(device: Device, kind: str) -> None:
    follow(Trial(device, KINDS[kind], seed=2), 200, (1, 2, 63, 64, 65, 130, 199))


def follow(trial: Trial, length: int, shorter: tuple[int, ...]) -> None:
    """A prompt, and its beginnings; each piece is of a sequence of its own, so they run one by one."""
    whole = trial.run([Piece(length, 64)])
    for less in shorter:
        (rows,) = trial.run([Piece(less, 64)]).out
        assert (rows == whole.out[0][:less]).all(), f"{less} of {length} tokens"


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_cut_at_chunks_has_the_same_bits(device: Device, kind: str) -> None:
    cut(Trial(device, KINDS[kind], seed=3), 300, (64, 128, 256))


def cut(trial: Trial, length: int, places: tuple[int, ...]) -> None:
    """A prompt at once, and in two pieces, with the state of the first for the second."""
    whole = trial.run([Piece(length)])
    for place in places:
        first = trial.run([Piece(place)])
        second = trial.run([Piece(length - place, place)], before=first.states)
        assert_same(whole, joined(first, second))


def joined(first: Results, second: Results) -> Results:
    """Rows of both, and the states after the second."""
    rows: list[Any] = [[*one, *other] for one, other in zip(first.out, second.out, strict=True)]
    return Results(rows, second.states)


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_tokens_computed_again_together_have_the_same_bits(device: Device, kind: str) -> None:
    again(Trial(device, KINDS[kind], seed=4), 5)


def again(trial: Trial, count: int) -> None:
    """Drawn tokens in one piece, and one piece each."""
    whole = trial.run([], [Piece(count, 77)])
    states, rows = None, Results([[]], [])
    for at in range(count):
        step = trial.run([], [Piece(1, 77 + at)], before=states or [trial.states(0, Piece(1, 77))])
        states, rows = step.states, joined(rows, step)
    assert_same(whole, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_other_pieces(device: Device, kind: str) -> None:
    beside(Trial(device, KINDS[kind], seed=5), [Piece(130, 64), Piece(70)], 140)


def beside(trial: Trial, prompts: list[Piece], count: int) -> None:
    """Sequences alone, and last among many: with the blocks of few prompts, and of many."""
    others = [Piece(1 + n * 7 % 66, 64 * (n % 3)) for n in range(count)]
    drawn = [Piece(1 + n % 2, 20 + n) for n in range(count)]
    sequences = 2 * count
    together = trial.run([*others, *prompts], drawn, padding=5)
    for n, piece in enumerate(prompts):
        alone = trial.run([piece], first_sequence=sequences + n)
        assert_same(alone, Results(together.out[sequences + n :][:1], together.states[sequences + n :][:1]))
    alone = trial.run([], drawn[:1])
    assert_same(alone, Results(together.out[:1], together.states[:1]))


@pytest.mark.parametrize("kind", KINDS)
def test_launches_repeat_their_bits(device: Device, kind: str) -> None:
    Trial(device, KINDS[kind], seed=6).run(MANY, DRAWN, launches=5)
