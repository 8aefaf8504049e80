"""What `pip install` gets: everything that is read at run time, and nothing that hides another package."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_wheel_carries_kernels_migrations_and_the_demo_model(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("nightmill-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    revisions = {path.name for path in (ROOT / "migrations" / "versions").glob("*.py")}
    assert {f"jobs/_migrations/versions/{name}" for name in revisions} <= names
    assert {"jobs/_migrations/env.py", "worker/_models/nightmill-demo.gguf"} <= names
    assert {f"worker/_cuda/{path.name}" for path in (ROOT / "cuda").iterdir()} <= names
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"jobs", "worker"}
