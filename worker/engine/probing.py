"""A look at a model before it takes jobs: are its outputs numbers at all?

A row whose output is not a number fails its own job (`NOT_A_NUMBER`). Of a damaged file that is every row,
and a night would end as failed in minutes.
"""

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.errors import ModelFileError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.request import Request

PROMPTS, TOKENS = 4, 4


def probe(engine: Engine, vocab: int) -> None:
    """Compute some short prompts; raises ModelFileError where none of them gives numbers.

    One that does not proves nothing: a single token may be broken, which only its prompts pay for.
    """
    params = GenerationParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    step = max(1, vocab // (PROMPTS * TOKENS))
    for number in range(PROMPTS):
        first = number * TOKENS
        tokens = tuple((first + place) * step % vocab for place in range(TOKENS))
        embeds = range(1) if engine.encodes else None
        engine.submit(Request(f"probe {number}", 1, tokens, params, seed=0, embeds=embeds))
    reasons = []
    while engine.has_work:
        reasons += [completion.stop_reason for completion in engine.step()]
    if all(reason is StopReason.ERROR for reason in reasons):
        raise ModelFileError(
            f"the model's output is not a number for any of {PROMPTS} plain prompts: its file is damaged, or "
            "it computes what is too large for F16; then give --dtype bf16"
        )
