"""benchmarks.formats_cost: what is compared with what, and that coarser formats cost more."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from benchmarks import formats_cost
from benchmarks.formats_cost import Cost, Requantised, costs_of, pieces_of
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from tests.ggufs import write_model


class Letters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


def test_texts_are_cut_into_whole_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats_cost, "PIECE", 4)
    texts = [tmp_path / "a", tmp_path / "b"]
    for path, text in zip(texts, ("abcdef", "ghijk"), strict=True):
        path.write_text(text)

    def pieces(tokens: int) -> list[str]:
        found = pieces_of(Letters(), texts, tokens)  # type: ignore[arg-type]
        return ["".join(map(chr, piece)) for piece in found]

    assert pieces(100) == ["abcd", "efgh"]
    assert pieces(4) == ["abcd"]
    assert pieces(5) == ["abcd", "efgh"]


def test_matrices_are_rounded_and_vectors_are_not(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", layers=1)
    with GgufFile.open(path) as plain, Requantised.open(path) as rounded:
        rounded.kind = GGMLQuantizationType.Q4_0
        for name in plain.tensors:
            values = plain.array(name)
            if values.ndim == 2:
                values = dequantize(quantize(values, rounded.kind), rounded.kind)
            np.testing.assert_array_equal(rounded.array(name), values)


def test_coarser_formats_cost_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats_cost, "PIECE", 64)
    path = write_model(tmp_path / "m.gguf", width=128, ffn=256)
    with GgufFile.open(path) as file:
        spec = read_spec(file)
    text = np.random.default_rng(0).integers(0, spec.vocab, 128).tolist()
    costs = costs_of(path, spec, [text[:64], text[64:]])
    eight, five, four, fp8, kv, both = (cost.divergence / cost.places for cost in costs.values())
    assert 0 < eight < five < four
    assert 0 < kv < both
    assert eight < fp8 < four
    assert {cost.places for cost in costs.values()} == {128}


def test_a_row_of_the_table_has_means_over_all_places() -> None:
    cost, logits = Cost(), np.log(np.array([[0.5, 0.3, 0.2]], dtype=np.float32))
    cost.add(logits, logits)
    cost.add(logits[:, ::-1], logits)
    divergence = 0.3 * np.log(0.5 / 0.2) / 2
    assert cost.row("x") == f"| x | {divergence:.5f} | {2 * divergence:.2f} | 50.00% |"
