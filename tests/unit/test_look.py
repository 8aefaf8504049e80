"""tools.look: rooms, floors, circles and figures of a small product."""

from pathlib import Path

import pytest

from tools import look

FILES = {
    "jobs/__init__.py": "from nightmill.jobs.client import Client\n",
    "jobs/client.py": (
        '"""What calls."""\nfrom nightmill.jobs import sql, words\nclass Client:\n    """A client."""\n'
    ),
    "jobs/words.py": "def f(a, b, c, d, e, f, g, h, *i): ...\n",
    "jobs/sql/__init__.py": "",
    "jobs/sql/tables.py": "class Client: ...\nclass _Hidden: ...\n",
    "jobs/sql/rows.py": 'from .tables import Client\nfrom .. import words\n\nROWS = 3\n"""How many."""\n',
    "worker/__init__.py": "",
    "worker/app.py": (
        "def start():\n    from nightmill.worker.engine import go\n    from nightmill.jobs import words\n"
    ),
    "worker/engine/__init__.py": "",
    "worker/engine/go.py": "import nightmill.worker.link\n",
    "worker/link/__init__.py": "import nightmill.worker.engine.go\nimport nightmill.worker.app\n",
    "worker/runners/gpu/__init__.py": "",
    "cuda/kernel.cu": "// a\n// b\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout that holds FILES."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_rooms_stand_above_what_they_import(root: Path) -> None:
    drawing = look.draw(look.read(root), "jobs")
    assert drawing.floors == [["__init__"], ["client"], ["sql"], ["words"]]
    assert {room: dict(to) for room, to in drawing.arrows.items()} == {
        "__init__": {"client": 1},
        "client": {"sql": 1, "words": 1},
        "sql": {"words": 1},
    }
    assert drawing.circles == drawing.upward == []
    assert list(drawing.text())[-1] == "4 rooms, 4 floors, 4 arrows, 0 up, 0 circles"


def test_a_circle_is_named_and_its_arrow_up(root: Path) -> None:
    drawing = look.draw(look.read(root), "worker")
    assert drawing.circles == [["app", "engine", "link"]]
    assert len(drawing.upward) == 1
    lines = list(drawing.text())
    assert "circle: app, engine, link" in lines
    assert lines[-1] == "5 rooms, 1 floors, 4 arrows, 1 up, 1 circles"


def test_figures_are_counted(root: Path) -> None:
    said = list(look.figures(root, look.read(root)))
    assert said[0].startswith("modules 12; lines of product 21 (jobs 13, worker 6, cuda 2, ")
    assert "modules at the top of jobs/, without __init__: 2: client, words" in said
    assert "public class names that occur twice or more: 1: Client 2" in said
    assert "functions of more than 8 parameters: 1; most first: jobs.words.f 9" in said
    assert said[-2].startswith(
        "docstrings of modules, classes and functions: 2; that begin as fragments do: 1 (What 1, "
    )
    assert "docstrings of attributes: 1; that begin as fragments do: 1 " in said[-1]


def test_this_product_fits_a_terminal_and_no_docstring_begins_as_a_fragment() -> None:
    modules = look.read(look.ROOT)
    for package in look.PACKAGES:
        assert max(map(len, look.draw(modules, package).text())) <= look.COLUMNS
    texts = [text for one in modules for text in (*look._docstrings(one.tree), *look._attributes(one.tree))]
    assert len(texts) > 5000
    assert [text for text in texts if text.split()[0].rstrip(",:;.") in look.FRAGMENTS] == []
