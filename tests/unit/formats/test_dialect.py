"""Results of a CSV are written as it was: its delimiter, and its byte order mark."""

import gzip
from pathlib import Path

import pytest

from nightmill.jobs.formats import Destination, FileFormat, InputFile, ResultFile
from nightmill.jobs.formats.dialect import Dialect
from nightmill.jobs.formats.layout import Layout
from nightmill.jobs.formats.ours import job_ids
from nightmill.jobs.formats.together import open_input
from nightmill.jobs.tables.reading import TableFile
from tests.unit.formats.destinations import rows
from tests.unit.tables.sources import options

EXCEL = Dialect(";", mark=True)
MARK = "\ufeff"


@pytest.mark.parametrize(
    ("name", "text", "plain", "table"),
    [
        ("in.csv", "prompt,seed\na;b;c,1\n", Dialect(), Dialect()),
        ("in.csv", f"{MARK}prompt;seed\r\na,1\r\n", EXCEL, EXCEL),
        ("in.csv", f"{MARK}sep=|\r\nprompt|seed\r\na|1\r\n", Dialect("|", True), Dialect("|", True)),
        ("in.csv", "\nprompt\na\n", Dialect(), Dialect()),
        ("in.csv", "sep=:\nprompt:seed\na:1\n", Dialect(), Dialect()),
        ("in.tsv", "prompt\tx;y;z;a\n", Dialect("\t"), Dialect("\t")),
        ("in.csv", "prompt;a;b,seed\n", Dialect(), Dialect(";")),
        ("in.jsonl", f'{MARK}{{"prompt": "a;b"}}\n', Dialect(), Dialect()),
    ],
)
def test_a_dialect_is_that_of_the_line_of_names(
    name: str, text: str, plain: Dialect, table: Dialect, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode())
    assert InputFile(path).dialect == plain
    assert TableFile(path, options=options("{{ prompt }}", keep="none")).dialect == table


def test_of_packed_files_and_of_several_it_is_known(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("prompt,seed\na,1\n")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(f"{MARK}prompt;seed\na;1\n".encode()))
    source = open_input(tmp_path)
    assert source.dialect == EXCEL
    assert len(list(source.rows())) == 2


def test_it_is_kept_in_settings_and_follows_names() -> None:
    for dialect in Dialect().or_others():
        assert Dialect.of(dialect.settings()) == dialect
    assert Dialect().settings() == {} and Dialect.of(None) == Dialect()
    assert Dialect.of({"csv": {"delimiter": "\n"}}) == Dialect.of({"csv": 1}) == Dialect()
    assert EXCEL.named("out.csv") == EXCEL.named("-") == EXCEL
    assert EXCEL.named("out.TSV") == Dialect("\t", mark=True)
    assert Dialect("\t").named("out.csv") == Dialect() and Dialect("\t").named("out") == Dialect("\t")


def test_results_in_a_dialect_are_known_and_one_that_was_begun_in_another_goes_on(tmp_path: Path) -> None:
    made = rows(FileFormat.CSV, range(4), text='a;b\n"c", d')
    ids = [row["id"] for row in made]
    whole = tmp_path / "whole.csv"
    with ResultFile(whole, FileFormat.CSV, layout=Layout(FileFormat.CSV, dialect=EXCEL)) as file:
        for row in made:
            file.write(row)
        file.flush()
        assert file.ids() == set(ids)
    data = whole.read_bytes()
    assert data.startswith(f"{MARK}custom_id;id;text;".encode()) and b';"a;b\n""c"", d";' in data
    assert list(job_ids(whole, FileFormat.CSV, errors=False)) == ids  # also where another is expected

    begun = tmp_path / "begun.csv"
    with ResultFile(begun, FileFormat.CSV) as file:  # as versions before wrote it
        for row in made[:2]:
            file.write(row)
    with Destination(begun, FileFormat.CSV, dialect=EXCEL) as destination:
        destination.vet("batch", lambda some: set(some) <= set(ids))
        with destination.grow() as file:
            assert file.ids() == set(ids[:2])
            for row in made[2:]:
                file.write(row)
    assert list(job_ids(begun, FileFormat.CSV, errors=False)) == ids
    assert begun.read_bytes().startswith(b"custom_id,id,text,") and b";," not in begun.read_bytes()

    new = tmp_path / "new.tsv"
    with Destination(new, FileFormat.CSV, dialect=EXCEL) as destination:
        destination.vet("batch", lambda some: True)
        with destination.replace() as file:
            file.write(made[0])
    assert new.read_bytes().startswith(f"{MARK}custom_id\tid\ttext\t".encode())
