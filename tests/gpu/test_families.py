"""Every family is computed as by the reference runner, from files with real keys."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from tests.support.comparing import compare_logits
from tests.support.driving import BLOCK, Chunk, Cuda, Pages, Reference, logits_of
from tests.support.family_cases import GPU_FILES, file_of
from tests.support.ggufs import half_tensors
from tests.support.parts import PARTS, file_of_halves, file_of_q8_0

PROMPT, DECODED = 100, 8


CHUNKS = {"whole": [100], "in chunks": [60, 40], "with rows that do not draw": [60, 40]}


@pytest.mark.parametrize("prompt", CHUNKS)
@pytest.mark.parametrize("name", GPU_FILES)
def test_logits_agree_with_the_reference_runner(name: str, prompt: str, tmp_path: Path) -> None:
    """Weights are half: what the GPU has of them is all there is."""
    keys, like = GPU_FILES[name]
    file = file_of(tmp_path, keys, like, **half_tensors(like))
    agree(file, read_spec(file), prompt)


@pytest.mark.parametrize("prompt", CHUNKS)
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_families_with_experts_agree_with_the_reference_runner(
    name: str, prompt: str, tmp_path: Path
) -> None:
    agree(file_of_halves(tmp_path, PARTS[name]), PARTS[name], prompt)


@pytest.mark.parametrize("name", PARTS)
def test_parts_with_weights_as_in_the_file_agree_with_the_reference_runner(name: str, tmp_path: Path) -> None:
    agree(*file_of_q8_0(tmp_path, PARTS[name]), "in chunks", precision=Precision(weights=WeightsFormat.FILE))


def agree(file: GgufFile, spec: ModelSpec, prompt: str, **options: Any) -> None:
    """Compute a prompt in these CHUNKS, and then tokens one by one, by both runners."""
    text = np.random.default_rng(5).integers(0, spec.vocab, PROMPT + DECODED).tolist()
    chunks, start = [], 0
    for length in CHUNKS[prompt]:
        chunks.append(Chunk(0, text, start, length, 25 if "do not draw" in prompt else length))
        start += length
    chunks += [Chunk(0, text, PROMPT + index, 1, drawn=True) for index in range(DECODED)]
    blocks = 128 // BLOCK
    cuda = Cuda(
        file,
        spec,
        slots=1,
        kv_pages=blocks,
        max_tokens=128,
        max_draws=128,
        context=128,
        tune=False,
        **options,
    )
    with closing(cuda.runner):
        reference = Reference(file, spec, kv_pages=blocks, page_size=BLOCK, slots=1)
        ours, theirs = (
            np.concatenate(
                [logits_of(subject, pages, [chunk], admit=index == 0) for index, chunk in enumerate(chunks)]
            )
            for subject, pages in ((cuda, Pages(1, blocks)), (reference, Pages(1, blocks)))
        )
    compare_logits(ours, theirs).check()
