"""An FP8 cache: attention gives the bits of attention over the elements that the pages stand for."""

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Attention
from nightmill.worker.runners.gpu.attention.choice import decode_attention, prefill_attention
from nightmill.worker.runners.gpu.attention.decode import DecodeAttention
from nightmill.worker.runners.gpu.attention.general import GeneralDecode
from nightmill.worker.runners.gpu.attention.pieces import decode_pieces
from nightmill.worker.runners.gpu.attention.prefill import HopperPrefill, PortablePrefill
from nightmill.worker.runners.gpu.attention.widening import Widening
from nightmill.worker.runners.gpu.catalogue import Launcher
from nightmill.worker.runners.gpu.device.compiler import compile_all
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import ABSENT
from nightmill.worker.runners.gpu.device.sources import for_element
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.rows.rotation import KvWrite, Rotation
from nightmill.worker.runners.kv_format import KvFormat
from tests.gpu.attending import decode_oracle, prefill_oracle, run_decode, run_prefill, run_split
from tests.gpu.oracles import (  # fmt: skip
    ATTENTION,
    LONG,
    Paged,
    assert_close,
    attention_of,
    make_paged,
    make_queries,
    poison_before,
)
from tests.support.comparing import compare_logits
from tests.support.cuda_runners import pretended_card
from tests.support.driving import Chunk, Cuda, Pages, Reference, logits_of
from tests.support.elements import BOTH_ELEMENTS, rounded
from tests.support.fp8_pages import kept_by
from tests.support.ggufs import write_model
from tests.support.operands import cache_of, elements, layer_of_heads, pages_in
from tests.support.specs import dense_spec

AWKWARD = [0.0, -0.0, 1e-7, 0.01, 1.0, 449.0, 57_344.0, 60_000.0, np.inf, np.nan]
"""What the largest number of a head may be."""
BORDERS = [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 513, 1000, 2100]
CHUNKS, BEFORE = [1, 700, 2, 63, 64, 130], [0, 0, 1500, 1, 64, 335]
LENGTHS = [chunk + earlier for chunk, earlier in zip(CHUNKS, BEFORE, strict=True)]
SIZES = [(14, 2, 64), (20, 1, 64), (16, 8, 128), (4, 2, 80), (4, 2, 192), (8, 4, 256), (3, 3, 40)]
"""Heads: of all ways in which rows lie in shared memory."""
TILE = 64  # keys, whose tiles count from a sequence's first
SCORES: list[dict[str, Any]] = [{}, {"window": 17}, {"window": 300, "softcap": 3.0, "scale": 0.3}]


def check_written(device: Device, head_dim: int) -> None:
    """Rotation, and what writes keys and values that it finds finished, keep what is left of elements."""
    attention = attention_of((2, 2, head_dim))
    rng = np.random.default_rng(head_dim)
    qkv = rng.standard_normal((40, 6, head_dim))
    for token, largest in enumerate(AWKWARD):
        qkv[token, 2:] *= min(abs(largest), 1.0)
        qkv[token, 2:, rng.integers(head_dim)] = largest
    qkv = rounded(qkv, device.element)
    rows = rng.permutation(4 * PAGE)[:40].astype(np.int32)
    rows[20] = -1  # not written
    poison = np.full((4, 2, PAGE, head_dim), np.nan)
    expected = np.stack([poison, poison])
    for token, row in enumerate(rows):
        if row >= 0:
            kept = kept_by(qkv[token, 2:].reshape(2, 2, head_dim), device.element)
            expected[:, row // PAGE, :, row % PAGE] = kept
    assert np.isfinite(expected).mean() > 0.5
    held, where = elements(device, qkv), device.upload(np.zeros(40, dtype=np.int32))  # which rotates nothing
    rotation = Rotation(device, attention, max_context=1)
    unused = layer_of_heads(ABSENT, [ABSENT, ABSENT])
    for finished in (False, True):
        cache, places = cache_of(device, poison, poison), device.upload(rows)
        if finished:
            KvWrite(device, attention)(held, places, cache, len(qkv))
        else:
            rotation(held, unused, where, places, cache, len(qkv))
        np.testing.assert_array_equal(pages_in(device, cache, head_dim), expected)


@BOTH_ELEMENTS
@pytest.mark.parametrize("kv", [KvFormat.FP8])
@pytest.mark.parametrize("head_dim", [16, 40, 64, 96, 128, 256, 12])
def test_pages_keep_what_is_left_of_elements(device: Device, head_dim: int) -> None:
    check_written(device, head_dim)


@dataclass(frozen=True)
class Case:
    """Contexts that end at BORDERS, and prompts."""

    attention: Attention
    decoded: Paged
    queries: np.ndarray
    prompts: Paged
    prompt_queries: np.ndarray

    @classmethod
    def of(cls, shape: tuple[int, int, int], scores: dict[str, Any], element: Element) -> "Case":
        attention = attention_of(shape, **scores)
        rng, size = np.random.default_rng(shape[2]), (attention.kv_heads, attention.head_dim)
        formats = {"element": element, "kv": KvFormat.FP8}
        decoded = make_paged(rng, BORDERS, *size, stride=LONG // 16, **formats)
        prompts = make_paged(rng, LENGTHS, *size, **formats)
        for sequence, length in enumerate(BORDERS):
            poison_before(decoded, sequence, length - (attention.window or LONG))
        for sequence, earlier in enumerate(BEFORE):
            poison_before(prompts, sequence, (earlier + 1 - (attention.window or LONG)) // TILE * TILE)
        queries = [make_queries(rng, count, attention, element) for count in (len(BORDERS), sum(CHUNKS))]
        return cls(attention, decoded, queries[0], prompts, queries[1])

    def decode(self, device: Device) -> list[np.ndarray]:
        """In pieces, whole and cut, and split, as far as there are kernels for that."""
        attention, given = self.attention, (self.queries, self.decoded, BORDERS)
        decode = decode_attention(device, attention, max_context=LONG)
        if not isinstance(decode, DecodeAttention):
            return [run_decode(device, decode, attention, *given)]
        contexts, everyone = np.array(BORDERS, dtype=np.int32), np.arange(len(BORDERS), dtype=np.int32)
        results = [
            run_decode(device, decode, attention, *given, pieces=pieces)
            for at_once in (1, 20)
            for pieces in [decode_pieces(contexts, everyone, segment=256, at_once=at_once, most_cut=1000)]
        ]
        if attention.head_dim <= 128:
            results.append(run_split(device, decode, attention, *given))
        return results

    def prefill(self, device: Device) -> list[np.ndarray]:
        """By the best kernel and by that for all GPUs; in parts it gives the same."""
        results, prompts = [], self.prompts
        part = Paged([], [], prompts.k_cache, prompts.v_cache, prompts.tables[1:2])
        for make in (prefill_attention, PortablePrefill):
            prefill = make(device, self.attention)
            queries = self.prompt_queries
            whole = run_prefill(device, prefill, self.attention, queries, prompts, LENGTHS, CHUNKS)
            cut = run_prefill(device, prefill, self.attention, queries[301:701], part, [700], [400])
            np.testing.assert_array_equal(cut, whole[301:701])
            results.append(whole)
        return results


def compile_kernels(device: Device, cases: list[Case], launchers: tuple[type[Launcher], ...]) -> None:
    """All at once: one after the other takes minutes."""
    sources = set()
    for case in cases:
        spec = dense_spec()
        layer = replace(spec.layers[0], mixer=case.attention)
        for launcher in launchers:
            for hopper in {device.hopper, False}:
                sources.update(launcher.sources(replace(spec, layers=(layer,)), hopper=hopper))
    compile_all((for_element(one, device.element, device.kv) for one in sources), device.architecture)


SCORES_IN_ELEMENTS = pytest.mark.parametrize(
    ("scores", "element"),
    [(SCORES[0], Element.F16), (SCORES[0], Element.BF16), (SCORES[1], Element.F16), (SCORES[2], Element.F16)],
    ids=str,
)


@pytest.mark.timeout(600)
@SCORES_IN_ELEMENTS
def test_decode_over_bytes_has_the_bits_of_decode_over_elements(
    scores: dict[str, Any], element: Element
) -> None:
    cases = [Case.of(shape, scores, element) for shape in SIZES]
    found = []
    for kv in KvFormat:
        with Device(0, element, kv, pretended=pretended_card()) as device:
            compile_kernels(device, cases, (DecodeAttention, GeneralDecode))
            found.append([case.decode(device) for case in cases])
    for case, plain, ours in zip(cases, *found, strict=True):
        oracle = decode_oracle(case.attention, case.queries, case.decoded, BORDERS)
        assert_close(ours[0], oracle, ATTENTION)
        for one in [*plain, *ours]:
            np.testing.assert_array_equal(one, ours[0])


@pytest.mark.timeout(600)
@SCORES_IN_ELEMENTS
def test_prefill_over_bytes_has_the_bits_of_prefill_over_elements(
    scores: dict[str, Any], element: Element
) -> None:
    cases = [Case.of(shape, scores, element) for shape in SIZES]
    found = []
    for kv in KvFormat:
        with Device(0, element, kv, pretended=pretended_card()) as device:
            compile_kernels(device, cases, (HopperPrefill, PortablePrefill, Widening))
            found.append([case.prefill(device) for case in cases])
    for case, plain, ours in zip(cases, *found, strict=True):
        oracle = prefill_oracle(case.attention, case.prompt_queries, case.prompts, LENGTHS, CHUNKS)
        assert_close(ours[0], oracle, ATTENTION)
        for one, other in zip(plain, ours, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("family", ["qwen2", "llama"])  # heads of 64 and of 16
def test_logits_are_those_of_the_reference_with_the_same_cache(family: str, tmp_path: Path) -> None:
    """Of a prompt, and of tokens after it, and closer than with any other cache."""
    heads = {"head_dim": 64, "width": 448, "heads": 7, "kv_heads": 1} if family == "qwen2" else {}
    file = GgufFile.open(write_model(tmp_path / "model.gguf", family, layers=4, seed=5, **heads))
    spec = read_spec(file)
    (text,) = np.random.default_rng(4).integers(0, spec.vocab, (1, 120)).tolist()
    options = {"slots": 1, "kv_pages": 8}
    found = []
    for make in (
        lambda: Reference(file, spec, kv=KvFormat.FP8, **options),
        lambda: Cuda(file, spec, precision=Precision(kv=KvFormat.FP8), context=128, max_draws=128, **options),
        lambda: Cuda(file, spec, context=128, max_draws=128, **options),
    ):
        subject, pages = make(), Pages(1, 8)
        with closing(subject.runner):
            chunks = [Chunk(0, text, 0, 100, 100)]
            chunks += [Chunk(0, text, place, 1, drawn=True) for place in range(100, 120)]
            rows = [logits_of(subject, pages, [one], admit=one.start == 0) for one in chunks]
        found.append(np.concatenate(rows))
    expected, ours, plain = found
    agreement, other = compare_logits(ours, expected), compare_logits(plain, expected)
    print(agreement, other)  # noqa: T201
    # The GPU's keys and values are half: what is near the middle of two E4M3 numbers may become the other.
    assert agreement.mean_kl < min(other.mean_kl / 4, 2e-3)
