"""The cases of lm-eval: small tasks made here, and its log-likelihoods beside the server's own scores."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from reporting import BASE_URL, FOLDER, KEY, MODEL, MODEL_FOLDER, URL, case, run_cases

TASKS = Path(FOLDER) / "tasks"
QUESTIONS = (
    ("The capital of France is", (" Paris", " London", " a long way from here"), 0),
    ("Two and two make", (" four", " five", " rain"), 0),
    ("The sun rises in the", (" west", " east", " kitchen of the mill"), 1),
)
TOLERANCE = 1e-3
"""Between two log-likelihoods that one runner computes in batches of another shape."""


def make_tasks() -> None:
    """Two tasks: a choice of continuations, and answers that are generated to the end of a line."""
    TASKS.mkdir()
    rows = [
        {"question": prompt, "choices": list(choices), "label": label} for prompt, choices, label in QUESTIONS
    ]
    (TASKS / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = "dataset_path: json\ntest_split: test\ndataset_kwargs:\n  data_files:\n"
    data += f"    test: {TASKS}/rows.jsonl\n"
    (TASKS / "choice.yaml").write_text(
        f"task: mill_choice\n{data}output_type: multiple_choice\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{label}}"\n'
        'target_delimiter: ""\nmetric_list:\n  - metric: acc\n'
    )
    (TASKS / "generated.yaml").write_text(
        f"task: mill_generated\n{data}output_type: generate_until\n"
        'doc_to_text: "{{question}}"\ndoc_to_target: "{{choices[label]}}"\n'
        'generation_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 6\nmetric_list:\n  - metric: exact_match\n'
    )


def evaluate(kind: str, task: str, *arguments: str, **model_args: Any) -> list[dict[str, Any]]:
    """Run the command, and return what it wrote of each sample."""
    endpoint = "chat/completions" if kind == "local-chat-completions" else "completions"
    given = {"base_url": f"{BASE_URL}/{endpoint}", "model": MODEL} | model_args
    output = (
        Path(FOLDER)
        / "output"
        / f"{len(list(Path(FOLDER).iterdir()))}-{kind}-{task}-{len(arguments)}-{len(model_args)}"
    )
    command = [sys.executable, "-m", "lm_eval", "run", "--model", kind]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in given.items())]
    command += ["--tasks", task, "--include_path", str(TASKS), "--log_samples", "--output_path", str(output)]
    environment = os.environ | {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=170, check=False, env=environment
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-1200:]
    (samples,) = output.rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    return sorted(rows, key=lambda row: int(row["doc_id"]))


def scores(prompt: str, texts: tuple[str, ...]) -> list[float]:
    """The log-likelihoods of texts behind a prompt, as the server's own `score` gives them."""
    body = json.dumps({"prompt": prompt, "score": list(texts), "model": MODEL}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{URL}/v1/generate", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return [one["logprob"] for one in json.load(answer)["answers"]]


def hold_to_scores(samples: list[dict[str, Any]]) -> None:
    """Every log-likelihood is the server's own, and the likeliest choice is the one that is counted."""
    assert len(samples) == len(QUESTIONS)
    for sample, (prompt, choices, label) in zip(samples, QUESTIONS, strict=True):
        found = [float(response[0]) for response in sample["filtered_resps"]]
        wanted = scores(prompt, choices)
        assert all(abs(one - other) < TOLERANCE for one, other in zip(found, wanted, strict=True)), (
            found,
            wanted,
        )
        assert all(one < 0 for one in found), found  # 0 is what a choice has whose tokens are left out
        assert sample["acc"] == float(wanted.index(max(wanted)) == label)


@case
def choice_with_defaults() -> None:
    hold_to_scores(evaluate("local-completions", "mill_choice", auth_token=KEY))


@case
def choice_with_a_local_tokenizer() -> None:
    samples = evaluate(
        "local-completions", "mill_choice", tokenizer_backend="huggingface", tokenizer=MODEL_FOLDER
    )
    hold_to_scores(samples)


@case
def choice_in_batches() -> None:
    samples = evaluate(
        "local-completions",
        "mill_choice",
        "--batch_size",
        "8",
        tokenizer_backend="huggingface",
        tokenizer=MODEL_FOLDER,
    )
    hold_to_scores(samples)


@case
def choice_as_texts() -> None:
    samples = evaluate(
        "local-completions",
        "mill_choice",
        tokenizer_backend="huggingface",
        tokenizer=MODEL_FOLDER,
        tokenized_requests=False,
    )
    hold_to_scores(samples)


@case
def generated_with_defaults() -> None:
    assert len(evaluate("local-completions", "mill_generated", auth_token=KEY)) == len(QUESTIONS)


@case
def generated_at_once() -> None:
    samples = evaluate(
        "local-completions",
        "mill_generated",
        tokenizer_backend="huggingface",
        tokenizer=MODEL_FOLDER,
        num_concurrent=4,
    )
    texts = [sample["filtered_resps"][0] for sample in samples]
    assert len(texts) == len(QUESTIONS) and all("\n" not in text for text in texts)


@case
def chat_generated_with_defaults() -> None:
    samples = evaluate("local-chat-completions", "mill_generated", "--apply_chat_template")
    assert len(samples) == len(QUESTIONS)


if __name__ == "__main__":
    make_tasks()
    run_cases()
