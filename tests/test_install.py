"""The wheel, installed outside the checkout, carries its recipes and templates and runs the
quickstart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from small_quickstart import SMALL

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_wheel_runs_outside_the_checkout(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)],
        check=True,
    )
    [wheel] = tmp_path.glob("sharpen-*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    site = next((tmp_path / "env" / "lib").glob("python3.*")) / "site-packages"
    # the dependencies of this environment, but not its editable install of the checkout
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(
        [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)],
        check=True,
    )
    where = subprocess.run(
        [str(python), "-c", "import sharpen; print(sharpen.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert where.stdout.startswith(str(site)), where
    command = [
        str(tmp_path / "env" / "bin" / "sharpen"),
        "run",
        "quickstart",
        "model=pico",
        *SMALL,
        "--json",
    ]
    environment = {**os.environ, "SHARPEN_CACHE": str(tmp_path / "cache")}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert results["before"]["valid_call"]["count"] == 4
    assert (tmp_path / "runs" / "quickstart" / "results.json").is_file()
