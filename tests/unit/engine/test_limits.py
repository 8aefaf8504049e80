"""Advice on a prompt that does not fit is advice that can be followed."""

import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.limits import RequestLimits


@pytest.mark.parametrize(
    ("model_context", "prompt", "advice"),
    [
        (None, 64, "shorten it or start the worker with --context 164, if the model allows it"),
        (4096, 64, "shorten it or start the worker with --context 164"),
        (128, 64, "shorten it or start the worker with --context 128"),  # not 164, which it would refuse
        (65, 64, "shorten it or start the worker with --context 65"),
        (64, 64, "shorten it, the model itself was made for 64"),
        (128, 500, "shorten it, the model itself was made for 128"),
    ],
)
def test_no_more_context_is_advised_than_the_model_has(
    model_context: int | None, prompt: int, advice: str
) -> None:
    limits = RequestLimits(vocab=9, context=64, page_size=16, model_context=model_context)
    fault = limits.fault((0,) * prompt, GenerationParams(max_tokens=100))
    assert fault is not None and fault.endswith(f"must be left for the answer: {advice}")


def test_a_stop_token_that_the_model_lacks_is_named() -> None:
    limits = RequestLimits(vocab=9, context=64, page_size=16)
    assert limits.fault((0,), GenerationParams(stop_token_ids=(3, 8))) is None
    fault = limits.fault((0,), GenerationParams(stop_token_ids=(3, 9)))
    assert fault is not None
    assert fault.startswith("stop_token_ids: holds 9, but this model's ids go from 0 to 8")
