"""Families that the kernels compute are computed as by the reference runner, from files with real keys."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.catalogue import check_spec
from tests.gpu.comparing import compare_logits
from tests.gpu.driving import BLOCK, Chunk, Cuda, Pages, Reference, logits_of
from tests.unit.model.test_family_keys import FILES, file_of

PROMPT, DECODED = 100, 8


def _computed(spec: ModelSpec) -> bool:
    try:
        check_spec(spec)
    except RunnerError:
        return False
    return True


TAKEN = [name for name, (_, spec) in FILES.items() if _computed(spec)]


def test_there_are_families_beside_the_first_three() -> None:
    assert {FILES[name][1].family for name in TAKEN} >= {"ernie4_5", "phi3", "seed_oss"}


@pytest.mark.parametrize("name", TAKEN)
def test_logits_agree_with_the_reference_runner(name: str, tmp_path: Path) -> None:
    """A prompt in two chunks, then a few tokens one by one."""
    keys, like = FILES[name]
    file = file_of(tmp_path, keys, like)
    spec = read_spec(file)
    text = np.random.default_rng(5).integers(0, spec.vocab, PROMPT + DECODED).tolist()
    chunks = [Chunk(0, text, 0, 60, 60), Chunk(0, text, 60, PROMPT - 60, PROMPT - 60)]
    chunks += [Chunk(0, text, PROMPT + index, 1, drawn=True) for index in range(DECODED)]
    blocks = 128 // BLOCK
    cuda = Cuda(file, spec, slots=1, kv_blocks=blocks, max_tokens=128, max_draws=128, context=128, tune=False)
    with closing(cuda.runner):
        reference = Reference(file, spec, kv_blocks=blocks, block_size=BLOCK, slots=1)
        ours, theirs = (
            np.concatenate(
                [logits_of(subject, pages, [chunk], admit=index == 0) for index, chunk in enumerate(chunks)]
            )
            for subject, pages in ((cuda, Pages(1, blocks)), (reference, Pages(1, blocks)))
        )
    compare_logits(ours, theirs).check()
