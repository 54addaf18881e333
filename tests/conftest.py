"""Shared by all tests: no network but loopback, throwaway models, and skips that fail where nothing
may be skipped."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share two cores

SHARED_DATA = Path(
    os.environ.get("SHARPEN_TEST_DATA", Path(__file__).parents[2] / "shared" / "data")
)
_connect = socket.socket.connect


def connect_to_loopback(self: socket.socket, address):
    host = address[0] if isinstance(address, tuple) else ""
    if self.family != socket.AF_UNIX and host not in ("127.0.0.1", "localhost", "::1"):
        raise AssertionError(f"a test reached for the network: {address}")
    return _connect(self, address)


socket.socket.connect = connect_to_loopback  # type: ignore[method-assign]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """With SHARPEN_REQUIRE_ALL a skip is a failure, but for external data, which a clone may not
    have."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("SHARPEN_REQUIRE_ALL"):
        reason = str(call.excinfo.value) if call.excinfo else ""
        if "external data" not in reason:
            report.outcome = "failed"
            report.longrepr = f"skipped, but nothing may be skipped here: {reason}"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip(f"external data is not here ({SHARED_DATA})")
    return SHARED_DATA


@pytest.fixture(scope="session")
def pico_tokenizer():
    from sharpen.models.pico import byte_tokenizer

    return byte_tokenizer()


@pytest.fixture(scope="session")
def pico_folder(tmp_path_factory) -> Path:
    from sharpen.models.pico import build_pico

    folder = tmp_path_factory.mktemp("models") / "pico"
    build_pico(folder)
    return folder


@pytest.fixture(scope="session")
def guesser(pico_folder, tmp_path_factory) -> Path:
    """A pico model that answers the questions of `guessing.py` at random."""
    from guessing import guesser

    return guesser(pico_folder, tmp_path_factory.mktemp("guesser"))


@pytest.fixture(scope="session")
def agent_data(tmp_path_factory) -> Path:
    """A small build of the three sets."""
    from sharpen.data.generate.build import Sizes, build_data

    folder = tmp_path_factory.mktemp("data") / "built"
    build_data(folder, 3, Sizes(dialogs=3, tasks=0.25, extended=0), workers=1)
    return folder


@pytest.fixture(scope="module")
def without_reports():
    """Drawing a run's curves takes longer than a pico model's run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sharpen.train.run.write_report", lambda folder: None)
        yield


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    from sharpen.models.find import find_model
    from sharpen.models.load import load_tokenizer

    find_model("smollm2-135m", pull=False)  # `make test` pulls it before the tests
    return load_tokenizer("smollm2-135m")


@pytest.fixture
def sharpen(monkeypatch, capsys):
    """Run the command in this process: returns (exit code, stdout, stderr)."""

    def run(*args: str) -> tuple[int, str, str]:
        from sharpen.cli.main import main

        monkeypatch.setattr(sys, "argv", ["sharpen", *args])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
