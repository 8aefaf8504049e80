"""The collector waits for a command's imports, and goes on after them."""

import gc
import subprocess
import sys

import pytest

from nightmill.jobs.base.importing import imports


@pytest.fixture(autouse=True)
def _as_before() -> object:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_within_and_all_is_as_before_even_if_an_import_fails(collects: bool) -> None:
    (gc.enable if collects else gc.disable)()
    with pytest.raises(ImportError), imports():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() is collects


def test_a_command_starts_without_a_full_collection_and_collects_afterwards() -> None:
    program = (
        "import gc\n"
        "from nightmill.jobs.commands.main import main\n"
        "main.get_command(None, 'batch')\n"
        "print(gc.get_stats()[2]['collections'], gc.isenabled(), gc.get_freeze_count() > 50_000)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True", "True"]
