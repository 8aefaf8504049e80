"""Random models of every family, how logits are compared, and objects in processes of their own."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nightmill.worker.model.families import FAMILIES, read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from tests.support import agreement, apart
from tests.support.agreement import Agreement, compared
from tests.support.apart import Apart, ApartError
from tests.support.driving import Reference
from tests.support.encoder_models import ENCODERS
from tests.support.expert_cases import EXPERT_FILES
from tests.support.family_models import MODELS, QWEN, Heads, Size, families, full_size, write
from tests.support.gemma4_cases import GEMMA4_FILES
from tests.support.hybrid_cases import HYBRID_FILES

pytestmark = pytest.mark.heavy


def tiny(family: str) -> Size:
    """Two layers with the heads and windows of the family, and little else."""
    return replace(full_size(family), layers=2, vocab=400, width=32, ffn=32)


def test_every_family_that_the_gpu_computes_is_in_the_table() -> None:
    others = {spec.family for _, spec in (HYBRID_FILES | EXPERT_FILES | GEMMA4_FILES).values()} - {"llama"}
    assert {model.family for model in MODELS.values()} == set(FAMILIES) - others - ENCODERS
    assert MODELS[QWEN].family == QWEN


def test_families_are_chosen_by_name() -> None:
    assert list(families(["gemma3", "qwen3"])) == ["qwen3", *(name for name in MODELS if "gemma3" in name)]
    with pytest.raises(SystemExit, match="gemma9: no such family; there are cohere2, "):
        families(["gemma9"])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_read_back_in_the_size_that_was_asked_for(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    size = tiny(model.family)
    with GgufFile.open(write(tmp_path / "model.gguf", model, size)) as file:
        spec = read_spec(file)
        assert file.tensors["blk.1.ffn_up.weight"].kind.name == ("BF16" if spec.overflows_half else "F16")
        matrix, norm = file.array("blk.1.attn_output.weight"), file.array("output_norm.weight")
    assert (spec.family, spec.width, spec.vocab, spec.context_length) == (model.family, 32, 400, 4096)
    assert len(spec.layers) == max(2, len(model.like.layers))
    for one in spec.attentions:
        assert Heads(one.heads, one.kv_heads, one.head_dim) == size.heads
    assert {layer.feed_forward.width for layer in spec.layers} == {32}
    assert bool(spec.layers[0].attention.rope.divisors) == bool(model.divisors)
    assert matrix.std() == pytest.approx(1.5 / matrix.shape[1] ** 0.5, rel=0.05)
    undone = (spec.embedding_scale if spec.tied_head else 1) / spec.logit_scale
    assert norm.mean() == pytest.approx(undone, rel=0.1)


def test_windows_and_their_layers_are_those_of_real_models(tmp_path: Path) -> None:
    size = replace(full_size("gemma3"), vocab=400, width=32, ffn=32)
    with GgufFile.open(write(tmp_path / "model.gguf", MODELS["gemma3"], size)) as file:
        windows = [layer.attention.window for layer in read_spec(file).layers]
    assert windows == [*[512] * 5, None] * 4


def test_bf16_holds_the_same_numbers_but_for_their_ends(tmp_path: Path) -> None:
    held = []
    for dtype in ("f16", "bf16"):
        with GgufFile.open(write(tmp_path / dtype, MODELS[QWEN], tiny(QWEN), dtype)) as file:
            assert file.tensors["blk.0.ffn_up.weight"].kind.name == dtype.upper()
            held.append(file.array("blk.0.ffn_up.weight"))
    np.testing.assert_allclose(held[1], held[0], rtol=2**-7, atol=1e-6)


def test_rows_are_compared_by_divergence_and_by_best_token() -> None:
    assert pytest.approx(0.08) == agreement.CLEAR
    expected = np.array([[2.0, 0.0, 0.0], [1.0, 1.05, 0.0], [0.0, 0.5, 0.0]], np.float32)
    entropy = compared(expected, expected).entropy
    assert compared(expected, expected) == Agreement(3, entropy, 0.0, 0.0, 1.0, 2, 1.0, 0.0)
    assert compared(np.zeros((2, 8), np.float32), np.zeros((2, 8), np.float32)).entropy == pytest.approx(
        np.log(8)
    )
    near_tie = expected.copy()
    near_tie[1, 0] = 1.1
    found = compared(near_tie, expected)
    assert (found.same_top, found.clear_rows, found.same_clear) == (2 / 3, 2, 1.0)
    assert found.largest_gap == pytest.approx(0.05, rel=1e-3)
    other = expected.copy()
    other[2] = [1.0, 0.5, 0.0]
    found = compared(other, expected)
    assert (found.same_clear, found.largest_gap) == (0.5, 0.5)
    # With p the softmax of logits l, and Z the sum of their exponents: KL = p . (l - l') + ln(Z' / Z).
    p = np.exp(expected[2]) / np.exp(expected[2]).sum()
    divergence = np.log(np.exp(other[2]).sum() / np.exp(expected[2]).sum()) + p @ (expected[2] - other[2])
    assert found.largest_kl == pytest.approx(divergence, rel=1e-5)
    assert found.mean_kl == pytest.approx(divergence / 3, rel=1e-5)


def test_a_fault_of_one_percent_misses_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "PROMPT", 40)
    monkeypatch.setattr(agreement, "CHUNKS", (24, 16))
    monkeypatch.setattr(agreement, "CONTEXT", 48)

    class Faulty(Reference):
        def show(self, rows: int) -> np.ndarray:
            return super().show(rows) * np.float32(1.01)

    with GgufFile.open(write(tmp_path / "model.gguf", MODELS["gemma3"], tiny("gemma3"))) as file:
        spec = read_spec(file)
        right, wrong = (
            agreement.agreement(
                lambda file, spec, kind=kind: kind(file, spec, kv_pages=3, page_size=16, slots=1),
                file,
                spec,
            )
            for kind in (Reference, Faulty)
        )
    assert right.rows == 96
    assert right.mean_kl < agreement.MEAN_KL < wrong.mean_kl


@pytest.mark.parametrize(("gain", "least"), [(0.01, 5.9), (1000.0, 0.0)])
def test_a_model_that_would_show_no_fault_is_an_error(
    gain: float, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "PROMPT", 40)
    monkeypatch.setattr(agreement, "CHUNKS", (24, 16))
    monkeypatch.setattr(agreement, "CONTEXT", 48)
    with GgufFile.open(write(tmp_path / "model.gguf", MODELS[QWEN], tiny(QWEN))) as file:
        spec = replace(read_spec(file), logit_scale=gain)

        def make(file: GgufFile, spec: ModelSpec) -> Reference:
            return Reference(file, spec, kv_pages=3, page_size=16, slots=1)

        with pytest.raises(ValueError, match=rf"the model says little: an entropy of {least:.1f}"):
            agreement.agreement(make, file, spec)


class Subject:
    """For another process."""

    def double(self, number: int) -> int:
        return 2 * number

    def sleep(self) -> None:
        time.sleep(60)

    def close(self) -> None:
        """Nothing to let go of."""


def test_calls_go_to_another_process() -> None:
    with Apart(Subject) as subject:
        assert [subject.call("double", number, limit_s=5) for number in (1, 21)] == [2, 42]


def test_a_call_that_fails_says_why() -> None:
    with Apart(Subject) as subject, pytest.raises(ApartError, match=r"^TypeError: .*missing 1 required"):
        subject.call("double", limit_s=5)


def test_a_call_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ApartError, match="sleep did not return within 0 s"), Apart(Subject) as subject:
        subject.call("double", 1, limit_s=5)
        monkeypatch.setattr(apart, "START_S", 0)
        subject.call("sleep", limit_s=0.2)
