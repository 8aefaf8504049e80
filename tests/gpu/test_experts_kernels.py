"""Kernels of mixtures of experts against the reference runner in float64; and to the bit, against themselves.

A token's result hangs on that token alone: on no other, on no order, and on no number of rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nightmill.worker.model.spec import Activation, Experts, FeedForward, RouterScores
from nightmill.worker.runners.gpu.device.compiler import compile_all
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import ABSENT, ELEMENT, FLOAT, Format
from nightmill.worker.runners.gpu.device.sources import Source, for_element, source_of
from nightmill.worker.runners.gpu.experts.combine import Combine
from nightmill.worker.runners.gpu.experts.tiles import (
    ExpertTile,
    Multiplier,
    grouped_source,
    multipliers,
    tiles_for,
)
from nightmill.worker.runners.gpu.rows.norms import Ending
from nightmill.worker.runners.gpu.shapes import Kind
from nightmill.worker.runners.gpu.weights.layout import NormWeight
from nightmill.worker.runners.gpu.weights.router import PART_SCALE, part_rows, router_parts
from tests.gpu.expert_trials import KINDS, ExpertTrial, assert_same, results
from tests.gpu.oracles import nmse
from tests.support.cuda_runners import pretended_card
from tests.support.elements import BOTH_ELEMENTS, rounded
from tests.support.needs import Need, missing
from tests.support.operands import all_products, buffer, elements, fetched, matrix, poisoned, room

ROWS = (1, 3, 17, 64, 200, 2048)
SIZES = {
    "Qwen3-30B-A3B": (Experts(count=128, used=8, width=768, normalise=True), 2048),
    "gpt-oss-20b": (
        Experts(
            count=32, used=4, width=2880, activation=Activation.CLAMPED_SWIGLU, bias=True, router_bias=True,
            scores=RouterScores.SOFTMAX_OF_CHOSEN,
        ),
        2880,
    ),
}  # fmt: skip
PACKED = [kept for kept in Format if kept.packed]


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """All files of the tests that run, at once: a test would compile its own, one after the other."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    chosen = [item.callspec.params for item in items if hasattr(item, "callspec")]
    packed = {one["kept"] for one in chosen if "kept" in one} & set(PACKED)
    with Device(pretended=pretended_card()) as device:
        architecture, hopper = device.architecture, device.hopper
    sources: list[Source] = [
        for_element(source, element)
        for element in Element
        for source in [
            source_of("route"),
            source_of("combine"),
            *(
                grouped_source(kept, by)
                for kept in (Format.F16, Format.FP8)
                for by in multipliers(kept, hopper=hopper)
            ),
        ]
    ]
    sources += [
        for_element(grouped_source(kept, by), Element.F16)
        for kept in sorted(packed, key=PACKED.index)
        for by in multipliers(kept, hopper=hopper)
    ]
    compile_all(list(dict.fromkeys(sources)), architecture)
    yield


@BOTH_ELEMENTS
@pytest.mark.parametrize("kind", KINDS)
def test_all_numbers_of_rows(device: Device, kind: str) -> None:
    trial = ExpertTrial(device, KINDS[kind])
    for rows in ROWS:
        trial.check(*trial.inputs(rows))
    trial.check(*trial.inputs(200), padding=np.arange(200) % 3 == 1)


@pytest.mark.parametrize("model", SIZES)
def test_sizes_of_models(device: Device, model: str) -> None:
    experts, width = SIZES[model]
    trial = ExpertTrial(device, experts, width)
    for rows in (1, 5, 64, 700):
        trial.check(*trial.inputs(rows))


@pytest.mark.parametrize("kept", [Format.FP8, *PACKED], ids=lambda one: one.name)
def test_every_format(device: Device, kept: Format) -> None:
    multiply(device, kept, 1)
    multiply(device, kept, 40)
    multiply(device, kept, 300)


def multiply(device: Device, kept: Format, rows: int) -> None:
    """Gate and up in one format, and in two; inputs that fill the last packets, and that do not."""
    step = 256 if kept.step == 256 else 64 if kept is Format.FP8 else 32
    experts = Experts(count=5, used=2, width=step * (1 if step == 256 else 3))
    trial = ExpertTrial(device, experts, 2 * step, kept)
    trial.check(*trial.inputs(rows))
    if kept.packed and kept is not Format.Q8_0 and step < 256:
        trial = ExpertTrial(device, replace(experts, bias=True), 2 * step, kept, Format.Q8_0)
        trial.check(*trial.inputs(rows))


@pytest.mark.parametrize("kept", PACKED, ids=lambda one: one.name)
def test_all_tiles_have_the_same_bits(device: Device, kept: Format) -> None:
    """Tokens, of which each expert gets a few and one gets many."""
    step = 256 if kept.step == 256 else 160
    on_hopper = [ExpertTile(64, Multiplier.WGMMA)] * device.hopper
    tiles = [ExpertTile(16), *on_hopper, *tiles_for([kept], hopper=device.hopper)]
    tiles_agree(device, Experts(count=9, used=3, width=step), 2 * step, kept, 150, tiles)
    wide = Experts(count=30, used=2, width=512)  # more tiles than blocks at once
    tiles_agree(device, wide, 768, kept, 700, tiles)


@BOTH_ELEMENTS
def test_whole_operands_have_the_same_bits(device: Device) -> None:
    """Of elements; more items than blocks, and outputs that fill no unit."""
    if not device.hopper:
        missing(Need.HOPPER)
    tiles = [ExpertTile(16), *tiles_for([device.element.format], hopper=True)]
    tiles_agree(device, Experts(count=9, used=3, width=168), 328, None, 150, tiles)
    tiles_agree(device, Experts(count=30, used=2, width=512), 768, None, 3000, tiles)


def test_fp8_as_it_is_depends_on_the_row_alone(device: Device) -> None:
    """By both tiles, against the rounded numbers in float64."""
    if not device.hopper:
        missing(Need.HOPPER)
    for experts, width in ((Experts(count=9, used=3, width=176), 336), SIZES["Qwen3-30B-A3B"]):
        trial = ExpertTrial(device, experts, width, Format.FP8)
        x, logits = trial.inputs(2048)
        together = trial.check(x, logits)
        for rows in (1, 3, 17, 64, 200):
            assert_same(
                results(trial.check(x[:rows], logits[:rows]), slice(None)), results(together, slice(rows))
            )


def tiles_agree(
    device: Device,
    experts: Experts,
    width: int,
    kept: Format | None,
    tokens: int,
    tiles: Sequence[ExpertTile],
) -> None:
    trial = ExpertTrial(device, experts, width, kept)
    x, logits = trial.inputs(tokens)
    logits[:, 1] += 3
    found = []
    for tile in tiles:
        trial.among = (tile,)
        found.append(trial.run(x, logits))
    for one in found[1:]:
        assert_same(results(one, slice(None)), results(found[0], slice(None)))
        np.testing.assert_array_equal(one.activated, found[0].activated)
        np.testing.assert_array_equal(one.outputs, found[0].outputs)


@pytest.mark.parametrize("kept", [None, Format.FP8, Format.Q4_K, Format.Q6_K, Format.Q8_0, Format.MXFP4])
def test_a_tokens_bits_are_those_of_the_token_alone(device: Device, kept: Format | None) -> None:
    alone(device, Experts(count=16, used=4, width=256, normalise=True), 2048, 512, kept)
    for kind in KINDS.values() if kept is None else ():
        alone(device, kind, 2048)


def alone(device: Device, experts: Experts, tokens: int, width: int = 72, kept: Format | None = None) -> None:
    """Among many, in another order, alone, and where all go to the same experts."""
    trial = ExpertTrial(device, experts, width, kept)
    x, logits = trial.inputs(tokens)
    together = trial.run(x, logits)
    order = np.random.default_rng(3).permutation(tokens)
    permuted = trial.run(x[order], logits[order])
    assert_same(results(permuted, slice(None)), results(together, order))
    for row in (0, 1, tokens // 2 + 5, tokens - 1):
        one = slice(row, row + 1)
        assert_same(results(trial.run(x[one], logits[one]), slice(None)), results(together, one))
    some = slice(0, tokens // 9)
    assert_same(results(trial.run(x[some], logits[some]), slice(None)), results(together, some))
    same = np.repeat(logits[:1], tokens, axis=0)  # all to the same experts, none to the others
    crowded = trial.check(x, same)
    assert_same(results(trial.run(x[-1:], same[-1:]), slice(None)), results(crowded, slice(-1, None)))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_number_stays_in_its_row(device: Device, kind: str) -> None:
    strange(device, KINDS[kind], 40)


def strange(device: Device, experts: Experts, tokens: int) -> None:
    trial = ExpertTrial(device, experts)
    x, logits = trial.inputs(tokens)
    clean = trial.run(x, logits)
    x[7, 3], logits[7], logits[tokens - 1] = np.nan, np.nan, np.inf
    poisoned = trial.run(x, logits)
    others = np.delete(np.arange(tokens), [7, tokens - 1])
    assert_same(results(poisoned, others), results(clean, others))
    assert np.isnan(poisoned.stream[7]).all()
    ranks = np.sort(poisoned.chosen, axis=1)
    assert (np.diff(ranks, axis=1) > 0).all() and (ranks >= 0).all() and (ranks < experts.count).all()


def test_of_equal_logits_the_lower_index_comes_first(device: Device) -> None:
    ties(device)


def ties(device: Device) -> None:
    for scores in RouterScores:
        for groups in (1, 4):
            experts = Experts(count=72, used=5, width=32, scores=scores, groups=groups, groups_used=2)
            trial = ExpertTrial(device, experts)
            x, logits = trial.inputs(12)
            logits[:] = np.round(logits / 3)
            logits[0], logits[1, :-1], logits[2] = 0, np.arange(72) // 6, -0.0
            logits[2, ::3] = 0.0
            trial.check(x, logits)


@BOTH_ELEMENTS
@pytest.mark.parametrize(("experts", "width"), [(128, 2048), (33, 2880), (256, 2048), (7, 64)])
def test_logits_are_as_good_as_floats_and_hang_on_no_other_row(
    device: Device, experts: int, width: int
) -> None:
    rng = np.random.default_rng(4)
    weights = (rng.standard_normal((experts, width)) / np.sqrt(width)).astype(np.float32)
    x = rounded(rng.standard_normal((2048, width)), device.element)
    words = router_parts(weights, device.element)
    bits: Any = words.view(np.float16) if device.element is Element.F16 else (words.astype(np.uint32) << 16)
    router = matrix(device, bits if device.element is Element.F16 else bits.view(np.float32))
    held, y = elements(device, x), room(device, (2048, router.rows), FLOAT)
    part = part_rows(experts)
    with all_products(device) as products:
        product = products.of(Kind.FLOAT, router.rows, width)
        product(held, router, y, 2048)
        whole = fetched(device, y)
        logits = whole[:, :experts] + PART_SCALE * whole[:, part : part + experts].astype(np.float64)
        assert nmse(logits, x.astype(np.float64) @ weights.astype(np.float64).T) < (
            1e-10 if device.element is Element.F16 else 3e-10
        )
        other = elements(device, x)  # for products that are timed, which may overwrite it
        for rows in (1, 2, 7, 16, 40, 200, 1000):
            product.tune(other, [router], y, rows, lambda: None)
            product(held, router, y, rows)
            np.testing.assert_array_equal(fetched(device, y, rows), whole[:rows])


def test_a_router_of_no_multiple_of_8_is_filled_up(device: Device) -> None:
    weights = np.random.default_rng(1).standard_normal((5, 16)).astype(np.float32)
    words = router_parts(weights, device.element)
    assert words.shape == (16, 16)
    assert not words[5:8].any() and not words[13:].any()
    numbers = fetched(device, buffer(device, words)).view(np.float16).astype(np.float64)
    np.testing.assert_allclose(numbers[:5] + PART_SCALE * numbers[8:13], weights, rtol=2**-21)


@pytest.mark.parametrize("width", [2048, 4096, 4104, 7168])
def test_outputs_of_all_ranks_are_added_to_the_stream(device: Device, width: int) -> None:
    outputs_are_added(device, width, 40)


def outputs_are_added(device: Device, width: int, tokens: int) -> None:
    """Over rows of one, two and four pieces a thread, with a shared expert beside, and normed; in float64."""
    rng, used = np.random.default_rng(width), 3
    experts = Experts(count=8, used=used, width=64, shared=FeedForward(width=64))
    shapes = {
        "outputs": (tokens * used, width), "shares": (tokens, used), "shared": (tokens, width),
        "logits": (tokens, 16), "x": (tokens, width), "weight": (width,),
    }  # fmt: skip
    of = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    places = rng.permutation(tokens * used).astype(np.int32).reshape(tokens, used)
    places[tokens // 2, 1] = -1
    held = {name: buffer(device, array) for name, array in of.items()} | {"places": buffer(device, places)}
    at: Any = SimpleNamespace(**held)
    out = poisoned(device, (tokens, width), ELEMENT)
    ending = Ending(scale=0.5, before=NormWeight(held["weight"], 1e-5))
    Combine(device).add(experts, at, ABSENT, ending, held["x"], out, tokens)
    device.synchronize()
    wide = {name: array.astype(np.float64) for name, array in of.items()}
    counted = np.where(places < 0, 0.0, wide["shares"])[:, :, None]
    mixed = (wide["outputs"][places] * counted).sum(axis=1) + wide["shared"]
    stream = wide["x"] + 0.5 * mixed
    normed = stream / np.sqrt((stream**2).mean(axis=1, keepdims=True) + 1e-5) * wide["weight"]
    np.testing.assert_allclose(fetched(device, held["x"]), stream, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fetched(device, out).astype(np.float64), normed, rtol=2e-3, atol=2e-3)
