"""docs/settings.md and docs/python.md name all settings, keywords and functions, with their defaults."""

import inspect
import re
from pathlib import Path

from nightmill import jobs
from nightmill.jobs.request.fields import FIELDS

DOCS = Path(__file__).parents[3] / "docs"


def rows(page: str) -> dict[str, str]:
    """The rows of its tables: what follows the first column, by each name in backticks there."""
    found = re.findall(r"^\| (`[^|]*) \| (.*) \|$", (DOCS / page).read_text(encoding="utf-8"), re.M)
    return {name: rest for names, rest in found for name in re.findall(r"`(\w+)`", names)}


def test_every_setting_is_described_with_its_default() -> None:
    described = {name: rest for name, rest in rows("settings.md").items() if name.startswith("NIGHTMILL_")}
    fields = {f"NIGHTMILL_{name.upper()}": field for name, field in jobs.Settings.model_fields.items()}
    assert list(described) == list(fields)
    for name, field in fields.items():
        default = described[name].split(" |")[0]
        if isinstance(field.default, bool):
            assert default == str(field.default).lower(), name
        elif isinstance(field.default, int | float):
            assert float(default) == field.default, name


def test_every_keyword_of_enqueue_is_described_with_its_default() -> None:
    described = rows("python.md")
    assert jobs.JobSettings.__annotations__.keys() <= described.keys()
    for name, field in jobs.GenerationParams.model_fields.items():
        if default := re.search(r"\(([^()]*)\)$", described[name]):
            said = default[1].strip("`").split(",")[0]
            assert said == str(field.default) or said == "drawn" or float(said) == field.default, name
        else:
            without = ("stop", "stop_token_ids", "logit_bias", "bad_words", "logprobs", "score")
            without = (*without, "dimensions", "pooling", "rerank", "instruction")
            assert name in (*without, "prompt_logprobs", "truncate_prompt_tokens", "max_reasoning_tokens")


def test_it_is_said_of_every_field_what_it_acts_on() -> None:
    """In the table of plain rows, the scope that it has; times are a file's as a whole."""
    page = (DOCS / "file-formats.md").read_text(encoding="utf-8")
    table = page[page.index("| key | acts on |") :].split("\n\n")[0]
    said = {}
    for names, scope in re.findall(r"^\| (`[^|]*) \| ([a-z ]+) \|", table, re.M):
        said |= dict.fromkeys(re.findall(r"`(\w+)`", names), scope)
    scopes = {name: str(field.scope) for name, field in FIELDS.items()}
    of_a_file = {"scheduled_at", "deadline", "batch", "idempotency_key"}
    assert {name: said.get(name) for name in scopes.keys() - of_a_file} == {
        name: scope for name, scope in scopes.items() if name not in of_a_file
    }
    assert {scopes[name] for name in of_a_file} == {"job"}
    python = (DOCS / "python.md").read_text(encoding="utf-8")
    assert "file-formats.md#plain-jsonl) says what each acts on:" in python


def test_every_public_function_and_error_is_described() -> None:
    page = (DOCS / "python.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b[A-Za-z_]+\b", page))
    public = {name: getattr(jobs, name) for name in jobs.__all__ if name != "default_client"}
    functions = {name for name, value in public.items() if inspect.isfunction(value)}
    errors = {
        name for name, value in public.items() if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert len(functions) > 10 and len(errors) > 10
    assert (functions | errors) - named == set()
