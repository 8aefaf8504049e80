"""The part `templates`: hostile chat templates, rendered as a worker does, beside innocent chats."""

import itertools
import random
import shutil
import tempfile
import time
from pathlib import Path

from tests.campaign import gguf_document, strange_templates
from tests.campaign.model_files import Opener
from tests.campaign.report import Report
from tests.support.ggufs import write_model
from tests.support.servers import scratch_directory

SECONDS = 45.0  # from opening the file to the answer, whatever the template does
MIB = 2048.0  # of the worker's stand-in with all its children
DELAY = 10.0  # seconds that a chat of another model may take beside it, on a busy machine


def run(seed: int, seconds: float, report: Report) -> None:
    """The whole corpus in a random order, then generated ones until the time is used."""
    home = scratch_directory()
    small = {"layers": 1, "width": 32, "ffn": 32, "heads": 2, "kv_heads": 1}
    sound = write_model(home / "sound.gguf", "qwen2", **small)
    opener = Opener(beside=sound, largest_mib=MIB)
    corpus = list(strange_templates.CORPUS)
    random.Random(f"{seed} templates").shuffle(corpus)
    give_up_at = time.monotonic() + seconds
    try:
        for number in itertools.count():
            if time.monotonic() > give_up_at:
                break
            if number < len(corpus):
                source = corpus[number]
            else:
                source = strange_templates.generated(random.Random(f"{seed} template {number}"))
            report.step = f"template {number}"
            report.progress(f"{number} templates")
            _try(opener, sound, home / "hostile.gguf", source, report)
    finally:
        opener.close()
        shutil.rmtree(home)


def _try(opener: Opener, sound: Path, path: Path, source: str, report: Report) -> None:
    document = gguf_document.read(sound)
    entry = document.entry(b"tokenizer.chat_template")
    assert entry is not None
    entry.value = source.encode("utf-8", "surrogatepass")
    path.write_bytes(document.encode())
    began = time.monotonic()
    answer = opener.open(path)
    wall = time.monotonic() - began
    outcome, wrong = answer["outcome"], ""
    if outcome not in ("accepted", "refused"):
        wrong = answer["said"]
    elif wall > SECONDS:
        outcome, wrong = "slow", f"took {wall:.0f} s"
    elif answer["delay"] > DELAY:
        outcome, wrong = "delay", f"held up another model's chat for {answer['delay']:.0f} s"
    elif len(answer["said"]) > 5000:
        outcome, wrong = "verbose", f"its error has {len(answer['said'])} characters"
    report.count("templates")
    report.count(f"templates {outcome}")
    if wrong:
        shown = source if len(source) < 160 else f"{source[:120]}... ({len(source)} characters)"
        kept = (
            Path(tempfile.gettempdir()) / f"nightmill-template-{report.seed}-{report.step.split()[1]}.jinja"
        )
        kept.write_text(source, errors="replace")
        report.violate(f"template-{outcome}", f"{wrong}: {shown} (kept: {kept})")
