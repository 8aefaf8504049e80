"""A night of real rows: 500 prompts of eight kinds through `nightmill run`, and 20 answers as they are.

    python -m benchmarks.real_night MODEL.gguf [--rows 500] [--answers 20] [--output FOLDER] [--reference ...]

Questions, translations, classifications, JSON from notices, programs, poems, summaries of short texts, and
questions about four texts at once: 3 to 372 words, made of the files in `benchmarks/real_prompts`. Greedy,
with a repetition penalty of 1.05, without which small models repeat themselves. Redis and SQLite are those
that `nightmill run` brings, in a folder of their own; it is given all options that are not named here.

Prints a JSON line with times, rates and stop reasons, then the answers. `--output` keeps prompts and results.
"""

import argparse
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEXTS = Path(__file__).with_name("real_prompts")
SAMPLING = ["--temperature", "0", "--repetition-penalty", "1.05"]
LANGUAGES = ("French", "German", "Spanish", "Italian")
POEMS = ("Write a haiku about {}.", "Write a poem of four lines about {}.")
TASKS = (
    "Summarise this text in one sentence:\n\n{}",
    "Give this text a short title:\n\n{}",
    "Write one question that this text answers, and the answer:\n\n{}",
)
NOTICES = (
    'Extract the facts of this text as a JSON object with the keys "who", "what", "where" and "when". '
    "Use null for what the text does not say. Reply with JSON only.\n\n{}",
    "List all numbers of this text with what they mean, as a JSON array of objects with the keys "
    '"number" and "meaning". Reply with JSON only.\n\n{}',
)
REVIEW = "Is this review positive, negative or neutral? Answer with one word.\n\n{}"
TOGETHER = (
    "Here are four texts. Say in one sentence for each what it is about, and then which of them you would "
    "read to a child, and why.\n\n1. {}\n\n2. {}\n\n3. {}\n\n4. {}"
)


def main() -> None:
    """Write the rows, run them, sum up."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--rows", type=int, default=500)
    arguments.add_argument("--answers", type=int, default=20)
    arguments.add_argument("--output", type=Path, help="a folder; by default one that is removed")
    options, passed_on = arguments.parse_known_args()
    with tempfile.TemporaryDirectory() as home:
        folder = options.output or Path(home)
        folder.mkdir(parents=True, exist_ok=True)
        chosen = rows()[: options.rows]
        source, output = folder / "prompts.jsonl", folder / "results.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
        began = time.monotonic()
        done = subprocess.run(
            [
                Path(sys.executable).with_name("nightmill"), "run", source, "-o", output, "--overwrite",
                "--model", options.model, *SAMPLING, *passed_on,
            ],
            env=os.environ | {"NIGHTMILL_DATA_DIR": home}, stdout=sys.stderr, check=False,
        )  # fmt: skip
        seconds = time.monotonic() - began
        if not output.exists():
            sys.exit(done.returncode)
        results = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        print(json.dumps(summary(results, len(chosen), seconds, working_seconds(Path(home)))))
    show(of_all_kinds(chosen)[: options.answers], {result["custom_id"]: result for result in results})
    sys.exit(done.returncode)


def rows() -> list[dict[str, Any]]:
    """All rows of the night, mixed the same way every time."""
    mixed = [
        {
            "custom_id": f"{kind}-{number}",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": most,
        }
        for kind, most, prompts in kinds()
        for number, prompt in enumerate(prompts)
    ]
    random.Random(0).shuffle(mixed)
    return mixed


def kinds() -> Iterator[tuple[str, int, list[str]]]:
    """Each kind: its name, the most tokens of an answer, and the prompts."""
    passages = (TEXTS / "passages.txt").read_text(encoding="utf-8").strip().split("\n\n")
    yield "question", 128, lines("facts")
    yield "translation", 64, [
        f"Translate into {LANGUAGES[(number + turn) % len(LANGUAGES)]}: {sentence}"
        for turn in range(2)
        for number, sentence in enumerate(lines("sentences"))
    ]  # fmt: skip
    yield "review", 8, [REVIEW.format(review) for review in lines("reviews")]
    yield "json", 192, [task.format(notice) for task in NOTICES for notice in lines("notices")]
    yield "program", 256, lines("programs")
    yield "poem", 96, [poem.format(subject) for poem in POEMS for subject in lines("subjects")]
    yield "text", 96, [task.format(passage) for task in TASKS for passage in passages]
    fours = [[passages[(n + apart) % len(passages)] for apart in (0, 7, 16, 21)] for n in range(20)]
    yield "texts", 192, [TOGETHER.format(*four) for four in fours]


def lines(name: str) -> list[str]:
    """Of a file, one text each."""
    return (TEXTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def working_seconds(home: Path) -> float:
    """From when the first row was claimed until the last was finished."""
    with sqlite3.connect(home / "nightmill.db") as database:
        query = "SELECT (julianday(max(finished_at)) - julianday(min(started_at))) * 86400 FROM jobs"
        return float(database.execute(query).fetchone()[0])


def summary(results: list[dict[str, Any]], rows: int, seconds: float, working: float) -> dict[str, Any]:
    """Of the night; rates are those of the time in which rows were worked on."""
    prompts, tokens = (
        sum(result[f"{kind}_tokens"] for result in results) for kind in ("prompt", "completion")
    )
    return {
        "rows": rows,
        "succeeded": len(results),
        "seconds_with_start": round(seconds, 1),
        "seconds": round(working, 2),
        "rows_per_s": round(len(results) / working, 1),
        "output_tokens_per_s": round(tokens / working),
        "prompt_tokens": prompts,
        "output_tokens": tokens,
        "stop_reasons": dict(Counter(result["stop_reason"] for result in results).most_common()),
    }


def of_all_kinds(chosen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows in such an order that kinds take turns."""
    seen: Counter[str] = Counter()
    turns = []
    for row in chosen:
        kind = row["custom_id"].partition("-")[0]
        turns.append(seen[kind])
        seen[kind] += 1
    return [chosen[index] for index in sorted(range(len(chosen)), key=turns.__getitem__)]


def show(chosen: list[dict[str, Any]], results: dict[str, dict[str, Any]]) -> None:
    """Prompts and their answers, as they are."""
    for row in chosen:
        result = results.get(row["custom_id"])
        print(f"\n### {row['custom_id']}\n\n{row['messages'][0]['content']}\n")
        print("--- no answer" if result is None else f"--- {result['stop_reason']}\n\n{result['text']}")


if __name__ == "__main__":
    main()
