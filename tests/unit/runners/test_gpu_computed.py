"""The GPU runner refuses a model that its kernels would compute wrongly, and says what of it."""

from dataclasses import replace

import pytest

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.spec import ModelSpec, Predictor
from nightmill.worker.runners.gpu.catalogue import check_spec
from tests.support.specs import GEMMAS, PLAIN, VARIANTS, dense_spec

WHOLE = VARIANTS["norms of whole Q and K"]
WHOLE_AFTER = replace(WHOLE.layers[0].attention, qk_norm_rotated=True)
LACKING = {
    "norms of whole Q and K after rotation": (
        replace(WHOLE, layers=(replace(WHOLE.layers[0], mixer=WHOLE_AFTER),)), "qk_norm_rotated",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LACKING)
def test_what_kernels_do_not_compute_is_refused_by_name(name: str) -> None:
    spec, lacking = LACKING[name]
    with pytest.raises(RunnerError, match=rf"do not take a model with its own {lacking}; `--reference`"):
        check_spec(spec)


PREDICTOR = Predictor(
    block=2, layer=PLAIN.layers[-1], norm=PLAIN.output_norm, last_norm_name="nextn.shared_head_norm",
    hands_on_normed=False,
)  # fmt: skip
COMPUTED = [
    *VARIANTS.values(), *GEMMAS.values(), PLAIN, dense_spec(qk_norm=True, bias=False), dense_spec(layers=24),
    replace(PLAIN, predictor=PREDICTOR),
]  # fmt: skip


@pytest.mark.parametrize("spec", COMPUTED)
def test_what_they_compute_is_taken(spec: ModelSpec) -> None:
    check_spec(spec)
