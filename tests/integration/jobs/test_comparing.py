"""Two batches of the same rows, compared against a search over all their texts."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import BatchNotFoundError
from nightmill.jobs.sql.claims import Claims, Outcome
from tests.integration.jobs.batches.rows import jobs_of
from tests.support.servers import worker_env

SCHEMA = {"type": "object", "properties": {"mood": {"type": "string"}, "score": {"type": "integer"}}}


@pytest.fixture
def client(server_settings: Settings) -> Iterator[Client]:
    with Client(server_settings) as client:
        yield client


def ended(client: Client, batch: Batch, texts: dict[int, tuple[str, StopReason]]) -> None:
    """End rows of a batch with these texts, by their numbers; others stay."""
    claims = Claims(client.database, f"{len(batch.name):032}")
    claims.register("host", 1, "model", None)
    jobs = jobs_of(batch)
    rows = {jobs[row].id: row for row in texts}
    outcomes = []
    for claim in claims.claim(list(rows)):
        said, reason = texts[rows[claim.job_id]]
        outcomes.append(Outcome(claim.job_id, claim.attempt, reason, said, 1, 1))
    claims.finish(outcomes)


def test_differences_are_those_of_a_search(client: Client, tmp_path: Path) -> None:
    draw = random.Random(1)
    path = tmp_path / "in.csv"
    path.write_text("x\n" + "".join(f"{number}\n" for number in range(40)))
    reasons = (StopReason.EOS, StopReason.LENGTH)
    texts = []
    batches = []
    for name in ("a", "bb"):
        batch = client.submit_batch(path, template=f"{name} {{{{ x }}}}", name=name, json_schema=SCHEMA)
        said = {
            row: (
                json.dumps({"mood": draw.choice(["up", "down"]), "score": draw.randrange(2)}),
                draw.choices(reasons, [5, 1])[0],
            )
            for row in range(1, 41)
            if draw.random() < 0.9
        }
        ended(client, batch, said)
        texts.append(said)
        batches.append(batch)
    one, other = texts
    found = batches[0].diff(batches[1])
    both = [row for row in one if row in other]
    assert found.same_source
    assert (found.rows, found.alone) == (len(both), (len(one) - len(both), len(other) - len(both)))
    assert found.texts == sum(one[row][0] != other[row][0] for row in both)
    assert found.differing == sum(one[row] != other[row] for row in both)
    assert found.columns["stop_reason"] == sum(one[row][1] != other[row][1] for row in both)

    def mood(said: tuple[str, StopReason]) -> object:
        return json.loads(said[0])["mood"] if said[1] is StopReason.EOS else None

    moods = [row for row in sorted(both) if mood(one[row]) != mood(other[row])]
    assert found.columns["text.mood"] == len(moods) > 0
    assert found.first["text.mood"].row == moods[0]
    first = found.first["text"]
    differing = [row for row in sorted(both) if one[row][0] != other[row][0]]
    assert first.row == differing[0]
    before, after = one[first.row][0], other[first.row][0]
    assert first.place is not None
    assert before[: first.place] == after[: first.place]
    assert before[first.place :][:1] != after[first.place :][:1]


def test_the_command_says_it(
    client: Client, server_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in worker_env(server_settings).items():
        monkeypatch.setenv(name, value)
    for name, said in (("a", "the cat sat"), ("bb", "the cat\x1b[31m ran")):
        batch = client.submit_batch(["one", "two"], name=name)
        ended(client, batch, {1: (said, StopReason.EOS), 2: ("same", StopReason.EOS)})
    result = CliRunner().invoke(main, ["batch", "diff", "a", "bb"])
    assert result.exit_code == 0, result.output
    assert "2 rows in both, 1 row differs" in result.output
    assert "text: 1 row, first in row 1, character 8" in result.output
    assert "\x1b" not in result.output
    values = json.loads(CliRunner().invoke(main, ["batch", "diff", "a", "bb", "--json"]).output)
    assert (values["differing"], values["columns"], values["first"][0]["place"]) == (1, {"text": 1}, 7)
    same = CliRunner().invoke(main, ["batch", "diff", "a", "a"])
    assert "2 rows in both, 0 rows differ" in same.output
    with pytest.raises(BatchNotFoundError):
        client.get_batch("none")
