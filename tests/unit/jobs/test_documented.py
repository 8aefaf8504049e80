"""docs/settings.md and docs/python.md name all settings, keywords and functions, with their defaults."""

import inspect
import re
from pathlib import Path

from nightmill import jobs

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
            assert name in ("stop", "stop_token_ids", "logit_bias", "bad_words", "logprobs", "score")


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
