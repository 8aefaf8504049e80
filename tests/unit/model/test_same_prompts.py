"""A row's prompt is the same wherever and whenever it is rendered, or verifying the row says why not."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.jobs.batches.verifying import Verdict, compare
from nightmill.worker.model.chat import ChatTemplate, renderer
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from nightmill.worker.service.resume import prompt_digest
from tests.support.ggufs import write_model
from tests.support.needs import Need, missing
from tests.unit.jobs.test_verifying import job
from tests.unit.model import digests_elsewhere
from tests.unit.model.conftest import DOWNLOADED
from tests.unit.model.plain_jinja import CHATS, TEMPLATES

pytestmark = pytest.mark.heavy

_SURROUNDINGS = [
    ("2026", {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "0"}),
    ("2031", {"TZ": "Pacific/Kiritimati", "LC_ALL": "de_DE.UTF-8", "PYTHONHASHSEED": "1"}),
    ("1999", {"TZ": "America/Anchorage", "LC_ALL": "tr_TR.UTF-8", "PYTHONHASHSEED": "2", "PYTHONUTF8": "0"}),
]


def test_a_prompt_is_the_same_in_another_zone_locale_year_and_process(tmp_path: Path) -> None:
    """110 chats under 10 templates, those that show the date among them."""
    if not TEMPLATES:
        missing(Need.VOCABULARIES)
    texts = {name: (DOWNLOADED / "templates" / name).read_text(encoding="utf-8") for name in TEMPLATES}
    dated = [name for name, text in texts.items() if "strftime_now" in text][:4]
    names = dated + random.Random(3).sample(sorted(set(TEMPLATES) - set(dated)), 4)
    model = write_model(tmp_path / "m.gguf", layers=1)
    answers = []
    for year, variables in _SURROUNDINGS:
        command = [sys.executable, "-m", digests_elsewhere.__name__, str(model), year, *names]
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[3])} | variables
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300)
        answers.append(done.stdout.splitlines())
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) >= 10 * len(CHATS) and len(set(answers[0])) > 45


def test_another_version_of_jinja_is_the_reason_that_verifying_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Jinja that trims blocks in another way, for one: the file is the same, and the tokens are not."""
    source = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}"
    with GgufFile.open(write_model(tmp_path / "m.gguf", layers=1, chat_template=source)) as file:
        tokenizer, model = Tokenizer.from_gguf(file), file.digest()[:16]
        told: list[dict[str, Any]] = []
        other = tmp_path / "renderer_process.py"
        program = renderer.PROGRAM.read_text(encoding="utf-8")
        other.write_text(program.replace("trim_blocks=True", "trim_blocks=False"), encoding="utf-8")
        for version in (renderer.PROGRAM, other):
            monkeypatch.setattr(renderer, "PROGRAM", version)
            template = ChatTemplate.from_gguf(file, tokenizer)
            try:
                ids = template.encode([{"role": "user", "content": "Hello"}])
            finally:
                template.close()
            told.append({"prompt_digest": prompt_digest(ids), "prompt_tokens": len(ids)})
    name = str(Arithmetic("numpy", "x", "f32", "f32", "1", model))
    then, now = (job(text=str(one), arithmetic=name, **one) for one in told)
    found = compare(then.id, then, now)
    assert found.verdict is Verdict.EXPLAINED
    assert "since the version of Jinja or of Nightmill is another; the model file and" in found.differences[0]
    another = str(Arithmetic("numpy", "x", "f32", "f32", "1", "0" * 16))
    found = compare(then.id, then, job(text="b", arithmetic=another, **told[1]))
    assert "its chat template or the version of Jinja is another" in found.differences[0]
