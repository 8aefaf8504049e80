"""The GPU runner refuses a model that its kernels would compute wrongly, and says what of it."""

import pytest

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.catalogue import check_spec
from tests.specs import PLAIN, VARIANTS, dense_spec

LACKING = {
    "soft-caps": "logit_softcap",
    "scales": "embedding_scale, logit_scale, residual_scale",
    "norms after too": "attention_post_norm, feed_forward_post_norm",
    "norms after alone": "attention_norm, attention_post_norm, feed_forward_norm, feed_forward_post_norm",
    "both at once": "feed_forward_norm, parallel",
    "temperature": "temperature",
    "norms after rotation": "qk_norm_rotated",
    "norms of whole Q and K": "qk_norm_whole",
    "GeGLU": "activation",
    "LayerNorm, no gate, biases": "activation, bias, centred, gated, output_bias",
    "gate with biases": "bias",
    "half of a head rotated": "dim",
    "and in pairs": "dim",
    "no rotation": "dim",
}


@pytest.mark.parametrize("name", LACKING)
def test_what_kernels_do_not_compute_is_refused_by_name(name: str) -> None:
    with pytest.raises(
        RunnerError, match=rf"do not take a model with its own {LACKING[name]}; `--reference`"
    ):
        check_spec(VARIANTS[name])


TAKEN = ("fused tensors", "window", "window, then all")
COMPUTED = [
    *(VARIANTS[name] for name in TAKEN), PLAIN, dense_spec(qk_norm=True, bias=False), dense_spec(layers=24),
]  # fmt: skip


@pytest.mark.parametrize("spec", COMPUTED)
def test_what_they_compute_is_taken(spec: ModelSpec) -> None:
    check_spec(spec)


def test_each_kind_of_part_is_looked_at() -> None:
    assert {*TAKEN, *LACKING} == set(VARIANTS)
