"""One prompt that cannot be computed: on the GPU too it fails alone, and nothing of it reaches another.

Either a token's embedding is not a number, or, as in real models, a value overflows half precision: then even
the positions before it, in the same piece of a prompt, are computed to NaN, though nothing of it is theirs.
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.base import FROM_SLOT, NOT_A_NUMBER, Admission, mask_words
from nightmill.worker.runners.gpu.runner import CudaRunner
from nightmill.worker.runners.gpu.sampling.sampler import SLOT
from tests.support.cuda_runners import cuda_runner
from tests.support.driving import BLOCK, Chunk, Cuda, Pages, logits_of
from tests.support.engines import NoText, complete
from tests.support.ggufs import write_model
from tests.support.poisoned import EMBEDDING, PARAMS, POISON, VOCAB, forty, note_acquittals

CONTEXT = 256
SLOTS = 9
NOT_A_HALF = 0xFF  # each byte of a NaN
SIZES: dict[str, dict[str, Any]] = {
    "heads-of-64": {"head_dim": 64},
    "heads-of-128": {"head_dim": 128, "heads": 2, "kv_heads": 1},
    "heads-of-40": {"head_dim": 40},
    "qk-norm": {"architecture": "qwen3", "head_dim": 64},
}


def write(path: Path, sizes: dict[str, Any], tensors: dict[str, Any]) -> GgufFile:
    options = {"layers": 2, "width": 128, "ffn": 256, "heads": 4, "kv_heads": 2, "tied": False} | sizes
    options["padding_rows"] = -VOCAB % 64
    return GgufFile.open(write_model(path, tensors=tensors, **options))


def make_runner(file: GgufFile, **options: Any) -> CudaRunner:
    defaults = {"slots": SLOTS, "kv_pages": SLOTS * CONTEXT // BLOCK, "max_tokens": 2048, "tune": False}
    return cuda_runner(file, read_spec(file), context=CONTEXT, **(defaults | options))


def spoil_embedding(runner: CudaRunner) -> None:
    """On the device, since the loader refuses what is not a number."""
    table = runner._model._weights.embedding
    width = table.columns
    row = runner.device.pinned(width, np.float16)
    row[:] = np.nan
    runner.device.copy_in(table.address + 2 * width * POISON, row)
    runner.device.synchronize()


def overflowing(directory: Path, sizes: dict[str, Any]) -> tuple[GgufFile, GgufFile]:
    """A model and its twin, in which one token has a value of infinity in half precision.

    Column 0 of the residual stream belongs to that token: no other embedding and no layer puts anything
    there, and the first layer's values take it 60,000 times.
    """
    plain = write(directory / "plain.gguf", sizes, {})
    tensors: dict[str, Any] = {EMBEDDING: np.array(plain.array(EMBEDDING), dtype=np.float32)}
    tensors[EMBEDDING][:, 0] = 0
    for layer in range(2):
        for part in ("attn_output", "ffn_down"):
            name = f"blk.{layer}.{part}.weight"
            tensors[name] = np.array(plain.array(name), dtype=np.float32)
            tensors[name][0] = 0
    values = "blk.0.attn_v.weight"
    tensors[values] = np.array(plain.array(values), dtype=np.float32)
    tensors[values][:, 0] = 60_000
    clean = write(directory / "clean.gguf", sizes, tensors)
    table = tensors[EMBEDDING].copy()
    table[POISON, 0] = 1000
    return clean, write(directory / "overflowing.gguf", sizes, tensors | {EMBEDDING: table})


def generate(runner: CudaRunner, requests: list[Request], *, sharing: bool) -> dict[str, Completion]:
    engine = Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(context_length=CONTEXT, max_sequences=SLOTS, token_budget=1024),
        prefix_sharing=sharing,
    )
    done = complete(engine, requests)
    assert engine.stats.preemptions == 0
    return done


def check(done: dict[str, Completion], clean: dict[str, Completion], requests: list[Request]) -> int:
    """Who has the poison failed, keeping what it had; all others are as they were. How many failed."""
    assert done.keys() == clean.keys()
    failed = 0
    for request in requests:
        one, other = done[request.job_id], clean[request.job_id]
        drawn = other.token_ids
        if POISON in request.prompt_ids or POISON in drawn[:-1]:
            kept = () if POISON in request.prompt_ids else drawn[: drawn.index(POISON) + 1]
            assert (one.stop_reason, one.token_ids) == (StopReason.ERROR, kept)
            assert one.error is not None
            assert "not a number" in one.error
            failed += 1
        else:
            assert one == other
    return failed


@pytest.fixture
def acquitted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """`note_acquittals`."""
    return note_acquittals(monkeypatch)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("sharing", [True, False])
def test_an_embedding_that_is_not_a_number_fails_its_jobs_alone(
    sizes: str, depth: int, sharing: bool, tmp_path: Path
) -> None:
    file = write(tmp_path / "model.gguf", SIZES[sizes], {})
    guilty, innocent = forty(poison=True), forty(poison=False)
    with closing(make_runner(file, depth=depth)) as runner:
        clean = generate(runner, guilty, sharing=sharing)
        before = generate(runner, innocent, sharing=sharing)
        spoil_embedding(runner)
        assert check(generate(runner, guilty, sharing=sharing), clean, guilty) >= 9
        # Pages that the poisoned had are used again, by others and by themselves.
        check(generate(runner, innocent, sharing=sharing), before, innocent)
        assert check(generate(runner, guilty, sharing=sharing), clean, guilty) >= 9


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("sharing", [True, False])
def test_an_overflow_of_half_precision_fails_its_jobs_alone(
    sizes: str, depth: int, sharing: bool, tmp_path: Path, acquitted: list[bool]
) -> None:
    clean_file, overflows = overflowing(tmp_path, SIZES[sizes])
    requests = forty(poison=True)
    with closing(make_runner(clean_file, depth=depth)) as runner:
        clean = generate(runner, requests, sharing=sharing)
    assert not acquitted
    with closing(make_runner(overflows, depth=depth)) as runner:
        failed = check(generate(runner, requests, sharing=sharing), clean, requests)
    assert failed >= 9
    assert acquitted.count(False) == failed
    assert sharing or not any(acquitted)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("change", PARAMS, ids=str)
def test_steps_that_run_ahead_of_a_poisoned_row_are_safe(
    tmp_path: Path, change: dict[str, Any], graphs: bool
) -> None:
    """Its slot goes on with token 0, unseen; the next sequence there finds nothing of it."""
    plain = write(tmp_path / "plain.gguf", {"head_dim": 64}, {})
    head = np.array(plain.array("output.weight"), dtype=np.float32)
    head[POISON] = 0  # hardly ever drawn: the other row is not to be poisoned
    file = write(tmp_path / "model.gguf", {"head_dim": 64}, {"output.weight": head})
    params = GenerationParams.parse(change)
    texts = [[70, 71, 72, 73], [80, 81, POISON, 82]]
    fresh = [90, 91, 92, 93]
    fed_back = [FROM_SLOT] * 10
    pages = Pages(2, 4)

    def launch(runner: CudaRunner, chunks: list[Chunk], admitted: list[list[int]]) -> None:
        admissions = (Admission(slot, tuple(text), params, 5) for slot, text in enumerate(admitted))
        runner.launch(replace(pages.batch(chunks, admit=False), admissions=tuple(admissions)))

    drawn = []
    with closing(make_runner(file, slots=2, kv_pages=8, depth=6, graphs=graphs)) as runner:
        for spoilt in (False, True):
            if spoilt:
                spoil_embedding(runner)
            launch(runner, [Chunk(slot, text, 0, 4) for slot, text in enumerate(texts)], texts)
            for position in (4, 5, 6):
                launch(runner, [Chunk(slot, fed_back, position, 1, drawn=True) for slot in (0, 1)], [])
            if spoilt:
                slot = runner.device.download(runner._slots.address, 2, SLOT)[1]
                assert slot["last_token"] == 0
                assert (slot["seen"] != 0) == (params.repetition_penalty != 1.0)
                if slot["seen"]:
                    seen = runner.device.download(int(slot["seen"]), mask_words(VOCAB), np.uint32)
                    bits = np.flatnonzero(np.unpackbits(seen.view(np.uint8), bitorder="little"))
                    assert bits.tolist() == sorted(texts[1])
            launch(runner, [Chunk(slot, fresh, 0, 4) for slot in (0, 1)], [fresh, fresh])
            launch(runner, [Chunk(slot, fed_back, 4, 1, drawn=True) for slot in (0, 1)], [])
            results = [runner.collect() for _ in range(6)]
            drawn.append(np.array([one.tokens for one in results if one is not None]))
    clean, poisoned = drawn
    assert clean.shape == poisoned.shape == (6, 2)
    assert (clean >= 0).all()
    assert (poisoned[:4, 1] == NOT_A_NUMBER).all()
    np.testing.assert_array_equal(poisoned[:, 0], clean[:, 0])
    np.testing.assert_array_equal(poisoned[4:, 1], clean[4:, 0])


LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127, 128, 129, 191, 192, 193, 240]


def fill_cache(runner: CudaRunner, byte: int) -> None:
    """All keys and values of all pages, that of padding rows too."""
    for layer in runner._model.layers:
        for part in (layer.cache.keys, layer.cache.values):
            runner.device.fill(part.address, byte, part.bytes)
    runner.device.synchronize()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("graphs", [True, False])
def test_what_lies_past_a_context_counts_for_nothing(sizes: str, graphs: bool, tmp_path: Path) -> None:
    """Free pages and the tails of pages: zeros or NaN, the logits are the same to the bit."""
    file = write(tmp_path / "model.gguf", SIZES[sizes], {})
    count = len(LENGTHS)
    texts = np.random.default_rng(6).integers(0, VOCAB, (count, CONTEXT)).tolist()
    pages = Pages(count, CONTEXT // BLOCK)
    cuda = Cuda(
        file, read_spec(file), slots=count + 5, kv_pages=count * CONTEXT // BLOCK,
        max_tokens=4096, context=CONTEXT, tune=False, graphs=graphs,
    )  # fmt: skip  # more slots than sequences: replayed steps are padded
    everyone = list(zip(range(count), texts, LENGTHS, strict=True))
    steps = [[Chunk(slot, text, 0, length) for slot, text, length in everyone]]  # whole prompts at once

    def drawn(slot: int, text: list[int], place: int) -> Chunk:
        return Chunk(slot, text, place, 1, drawn=True)

    steps += [[drawn(slot, text, length + i) for slot, text, length in everyone] for i in range(3)]
    steps += [[drawn(slot, text, length + 3)] for slot, text, length in everyone]  # each by itself
    steps += [[Chunk(slot, text, length + 4, 7) for slot, text, length in everyone]]  # a piece, further on
    both = [drawn(slot, text, length + 11) for slot, text, length in everyone[::2]]
    both += [Chunk(slot, text, length + 11, 2) for slot, text, length in everyone[1::2]]
    steps.append(both)
    found = []
    with closing(cuda.runner):
        for byte in (0, NOT_A_HALF):
            fill_cache(cuda.runner, byte)
            found.append([logits_of(cuda, pages, step, admit=turn == 0) for turn, step in enumerate(steps)])
    for zeros, poisoned in zip(*found, strict=True):
        assert np.isfinite(poisoned).all()
        np.testing.assert_array_equal(poisoned, zeros)
