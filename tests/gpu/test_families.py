"""Every family is computed as by the reference runner, from files with real keys."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from tests.gpu.latents import latent_of
from tests.support.comparing import compare_logits
from tests.support.driving import BLOCK, Chunk, Cuda, Pages, Reference, logits_of
from tests.support.family_cases import GPU_FILES, file_of
from tests.support.ggufs import spec_tensors, write_file
from tests.support.specs import variant

PROMPT, DECODED = 100, 8
SINKS = {"heads": 16, "head_dim": 64, "sinks": True, "bias": True, "output_bias": True}
LAYERS = [variant(attention=SINKS | {"window": one}).layers[0] for one in (20, None, 20)]
LATENT = latent_of(4)
LATENTS = [
    replace(variant().layers[0], mixer=one) for one in (LATENT, LATENT, replace(LATENT, query_latent=None))
]
SMALL_LATENT = replace(latent_of(3, 40, 8), key_dim=24, value_dim=24, query_latent=40)
PARTS = {
    "sinks": replace(variant(), layers=tuple(LAYERS)),
    "latent attention": replace(variant(), layers=tuple(LATENTS)),
    "latent attention of older files": replace(
        variant(), layers=(replace(variant().layers[0], mixer=replace(LATENT, fused=True)),) * 2
    ),
    "small latents": replace(variant(), layers=(replace(variant().layers[0], mixer=SMALL_LATENT),) * 2),
}
"""Specs of layers that only models with experts have, with other feed-forward networks."""

CHUNKS = {"whole": [100], "in chunks": [60, 40], "with rows that do not draw": [60, 40]}


@pytest.mark.parametrize("prompt", CHUNKS)
@pytest.mark.parametrize("name", GPU_FILES)
def test_logits_agree_with_the_reference_runner(name: str, prompt: str, tmp_path: Path) -> None:
    """Weights are half: what the GPU has of them is all there is."""
    keys, like = GPU_FILES[name]
    file = file_of(tmp_path, keys, like, **halves_of(like))
    agree(file, read_spec(file), prompt)


@pytest.mark.parametrize("prompt", CHUNKS)
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_families_with_experts_agree_with_the_reference_runner(
    name: str, prompt: str, tmp_path: Path
) -> None:
    spec = PARTS[name]
    path = write_file(tmp_path / "model.gguf", "llama", {}, halves_of(spec))
    agree(GgufFile.open(path), spec, prompt)


def halves_of(spec: ModelSpec) -> dict[str, np.ndarray]:
    """Random weights that are halves."""
    return {name: array.astype(np.float16).astype(np.float32) for name, array in spec_tensors(spec).items()}


def agree(file: GgufFile, spec: ModelSpec, prompt: str) -> None:
    """Compute a prompt in these CHUNKS, and then tokens one by one, by both runners."""
    text = np.random.default_rng(5).integers(0, spec.vocab, PROMPT + DECODED).tolist()
    chunks, start = [], 0
    for length in CHUNKS[prompt]:
        chunks.append(Chunk(0, text, start, length, 25 if "do not draw" in prompt else length))
        start += length
    chunks += [Chunk(0, text, PROMPT + index, 1, drawn=True) for index in range(DECODED)]
    blocks = 128 // BLOCK
    cuda = Cuda(file, spec, slots=1, kv_pages=blocks, max_tokens=128, max_draws=128, context=128, tune=False)
    with closing(cuda.runner):
        reference = Reference(file, spec, kv_pages=blocks, page_size=BLOCK, slots=1)
        ours, theirs = (
            np.concatenate(
                [logits_of(subject, pages, [chunk], admit=index == 0) for index, chunk in enumerate(chunks)]
            )
            for subject, pages in ((cuda, Pages(1, blocks)), (reference, Pages(1, blocks)))
        )
    compare_logits(ours, theirs).check()
