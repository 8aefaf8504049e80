"""Kernels of experts for a few tokens, off by default, have the bits of those for any number of tokens."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Activation, Experts, RouterScores
from nightmill.worker.runners.gpu.device.compiler import compile_all
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import for_element, source_of
from nightmill.worker.runners.gpu.experts import few
from nightmill.worker.runners.gpu.experts.few import few_sources
from nightmill.worker.runners.gpu.experts.tiles import grouped_sources
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.products.chooser import Products
from nightmill.worker.runners.gpu.shapes import Kind
from tests.gpu.few_trials import FewTrial, few_agree, few_strange
from tests.gpu.test_experts_kernels import SIZES
from tests.support.cuda_runners import cuda_runner, pretended_card
from tests.support.elements import BOTH_ELEMENTS
from tests.support.engines import bits, complete, engine_of, mixed_requests
from tests.support.needs import Need, missing
from tests.support.operands import products_with, room
from tests.tiny import unpacked

PACKED = [kept for kept in Format if kept.packed]
BESIDE = Experts(
    count=40, used=3, width=256, activation=Activation.CLAMPED_SWIGLU, bias=True, router_bias=True,
    scores=RouterScores.SIGMOID, selection_bias=True, expert_scales=("gate", "up", "down"), fused=True,
    groups=4, groups_used=2, scale=2.5,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """All files of the tests that run, at once."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    chosen = [item.callspec.params for item in items if hasattr(item, "callspec")]
    packed = [one for one in PACKED if any(params.get("kept") is one for params in chosen)]
    with Device(pretended=pretended_card()) as device:
        if not device.hopper:
            missing(Need.HOPPER)
        sources = [
            for_element(source, element)
            for element in Element
            for source in (
                source_of("route"), source_of("combine"), *few_sources(packed),
                *grouped_sources(packed, hopper=True),
            )
        ]  # fmt: skip
        compile_all(list(dict.fromkeys(sources)), device.architecture)
    yield


@pytest.fixture
def products(device: Device) -> Iterator[Products]:
    held = products_with(device, room(device, (1, 8), np.uint16), [Kind.FLOAT])
    yield held
    held.close()


def few_trial(device: Device, products: Products, experts: Experts, width: int, kept: Format) -> FewTrial:
    def product(x: Buffer, router: Matrix, y: Buffer, rows: int) -> None:
        products.of(Kind.FLOAT, router.rows, router.columns)(x, router, y, rows)

    return FewTrial(device, experts, width, kept, product)


@BOTH_ELEMENTS
@pytest.mark.parametrize("kept", PACKED, ids=lambda one: one.name)
def test_every_format_has_the_bits_of_any_number_of_tokens(
    device: Device, products: Products, kept: Format
) -> None:
    width, inner = (512, 256) if kept.step == 256 else (352, 160)
    experts = Experts(count=16, used=4, width=inner, normalise=True)
    few_agree(few_trial(device, products, experts, width, kept), (1, 2, 3, 8))


@BOTH_ELEMENTS
@pytest.mark.parametrize("kept", [Format.Q4_K, Format.Q8_0], ids=lambda one: one.name)
def test_what_routers_and_experts_have_beside(device: Device, products: Products, kept: Format) -> None:
    few_strange(few_trial(device, products, BESIDE, 512, kept), 7)
    gelu = replace(BESIDE, activation=Activation.GELU, fused=False, scores=RouterScores.SOFTMAX)
    few_strange(few_trial(device, products, gelu, 512, kept), 4)


@pytest.mark.parametrize("kept", [Format.Q4_K, Format.Q6_K, Format.MXFP4], ids=lambda one: one.name)
def test_sizes_of_models(device: Device, products: Products, kept: Format) -> None:
    """Again and again, since what blocks leave for the last of them, or ask for ahead, may come late."""
    experts, width = SIZES["gpt-oss-20b" if kept is Format.MXFP4 else "Qwen3-30B-A3B"]
    trial = few_trial(device, products, replace(experts, count=32), width, kept)
    few_agree(trial, (1, 2, 5, 8))
    x = trial.inputs(8)
    for tokens in (1, 8):
        expected = trial.computed(x[:tokens], None, few=True)
        for _ in range(50):
            for name, found in trial.computed(x[:tokens], None, few=True).items():
                np.testing.assert_array_equal(found.view(np.uint8), expected[name].view(np.uint8), name)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_models_texts_have_the_same_bits(
    tmp_path: Path, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence, and as many as there are kernels for a few tokens for; graphs are replayed."""
    file = GgufFile.open(unpacked("qwen3moe-q8_0", tmp_path))
    spec = read_spec(file)
    found = []
    for switched in (False, True):
        monkeypatch.setattr(few, "FEW_BY_DEFAULT", switched)
        with closing(
            cuda_runner(
                file, spec, slots=8, context=256, kv_pages=256, max_tokens=256, graphs=graphs,
                precision=Precision(weights=WeightsFormat.FILE),
            )
        ) as runner:  # fmt: skip
            requests = mixed_requests(8, (0, 40))
            alone = complete(engine_of(runner, 256), requests[:1])
            found.append((bits(alone), bits(complete(engine_of(runner, 256), requests))))
    assert found[0] == found[1]
