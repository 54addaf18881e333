"""JSONL, atomic files and run folders survive what happens to files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from sharpen.config import Config
from sharpen.records import (
    RunFolder,
    atomic_folder,
    atomic_write,
    read_jsonl,
    sha256_folder,
    write_jsonl,
)
from sharpen.types import RowError, SharpenError


class Settings(Config):
    rate: float = 0.1
    seed: int = 7


def test_round_trip(tmp_path):
    rows = [{"a": 1, "text": "é 中\u2028\n"}, {}]
    assert write_jsonl(tmp_path / "x.jsonl", rows) == 2
    assert [r.value for r in read_jsonl(tmp_path / "x.jsonl")] == rows


BAD_LINES = [
    (b'{"a": 1', "not JSON"),
    (b"[1, 2]", "expected an object, found list"),
    (b'{"a": "\xff"}', "not UTF-8"),
    (b'{"a": NaN}', "NaN is not a JSON number"),
    (b'{"a": "\x00"}', "not JSON"),
    (b'{"a":' * 10_000, "nested too deeply|not JSON"),
    (b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "nested too deeply"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_bad_lines_are_named_and_the_others_kept(tmp_path, line, reason):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\n\n' + line + b'\n{"n": 2}')
    bad = []
    started = time.process_time()
    rows = list(read_jsonl(path, on_bad=lambda error, raw: bad.append((error, raw))))
    assert time.process_time() - started < 1
    assert [r.value["n"] for r in rows] == [1, 2]
    assert rows[0].where == f"{path}:1" and rows[1].where == f"{path}:4"
    [(error, raw)] = bad
    assert error.where == f"{path}:3" and raw.rstrip(b"\n") == line
    with pytest.raises(RowError, match=reason):
        list(read_jsonl(path))


def test_overlong_line(tmp_path, monkeypatch):
    monkeypatch.setattr("sharpen.records.MAX_LINE_BYTES", 100)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n": 1}\n{"a": "' + b"x" * 1000 + b'"}\n{"n": 2}\n')
    bad = []
    rows = list(read_jsonl(path, on_bad=lambda error, raw: bad.append(error)))
    assert [r.where[-1] for r in rows] == ["1", "3"]
    assert bad[0].where == f"{path}:2" and "line over" in bad[0].reason


def test_missing_file_is_one_line():
    with pytest.raises(SharpenError, match=r"gone\.jsonl: No such file"):
        list(read_jsonl("gone.jsonl"))


def test_failed_writes_leave_the_old_file(tmp_path):
    path = tmp_path / "x.jsonl"
    write_jsonl(path, [{"a": 1}])
    with pytest.raises(ValueError, match="Out of range"):
        write_jsonl(path, [{"a": 2}, {"a": float("nan")}])
    assert [r.value for r in read_jsonl(path)] == [{"a": 1}]
    assert os.listdir(tmp_path) == ["x.jsonl"]


def test_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="No space"), atomic_write(path) as file:
        file.write(b"new")
        monkeypatch.setattr(
            os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left"))
        )
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x.txt"]


def test_atomic_folder_replaces_whole_or_not_at_all(tmp_path):
    target = tmp_path / "model"
    with atomic_folder(target) as work:
        (work / "a").write_text("1")
    with pytest.raises(RuntimeError), atomic_folder(target) as work:
        (work / "a").write_text("2")
        raise RuntimeError
    assert (target / "a").read_text() == "1"
    with atomic_folder(target) as work:
        (work / "b").write_text("3")
    assert set(sha256_folder(target)) == {"b"}
    assert os.listdir(tmp_path) == ["model"]


def test_killed_writer_leaves_the_old_file(tmp_path):
    """kill -9 in the middle of a write: the old content is still whole."""
    path = tmp_path / "x.txt"
    path.write_text("old")
    code = (
        "import sys, time\nfrom sharpen.records import atomic_write\n"
        f"with atomic_write({str(path)!r}) as f:\n"
        "    f.write(b'new' * 100000); f.flush(); print('now', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"now\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert path.read_text() == "old"


def test_run_folder_continues_and_refuses(tmp_path):
    run = RunFolder(tmp_path / "run", Settings(), {"data": "abc"})
    run.log({"step": 1, "loss": 2.0})
    with open(run.metrics_file, "ab") as file:
        file.write(b'{"step": 2, "lo')  # cut by a crash
    again = RunFolder(tmp_path / "run", Settings())
    assert again.metrics() == [{"step": 1, "loss": 2.0}]
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["inputs"] == {"data": "abc"} and manifest["seed"] == 7
    assert manifest["config_hash"] == Settings().hash()
    assert yaml.safe_load(run.config_file.read_text()) == {"rate": 0.1, "seed": 7}
    with pytest.raises(SharpenError, match=r"another config \(rate: 0.1 → 0.2\)"):
        RunFolder(tmp_path / "run", Settings(rate=0.2))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("!")
    with pytest.raises(SharpenError, match="not a run folder"):
        RunFolder(tmp_path / "other", Settings())
    assert os.listdir(tmp_path / "other") == ["thesis.tex"]


def test_a_run_of_an_older_version_is_refused_and_stays_readable(tmp_path):
    run = RunFolder(tmp_path / "run", Settings())
    run.log({"step": 1})
    manifest = json.loads((run.path / "manifest.json").read_text())
    del manifest["layout"]
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    run.config_file.write_text("checkpoint_every: 20\nseed: 7\n")
    with pytest.raises(SharpenError, match="another version of Sharpen, which cannot be") as caught:
        RunFolder(tmp_path / "run", Settings())
    assert "\n" not in str(caught.value)
    assert run.metrics() == [{"step": 1}]


def test_metrics_keep_odd_numbers_readable(tmp_path):
    run = RunFolder(tmp_path / "run", Settings())
    run.log({"loss": float("nan"), "norm": float("inf")})
    assert run.metrics() == [{"loss": None, "norm": None}]


def test_log_after_a_cut_line_stays_readable(tmp_path):
    run = RunFolder(tmp_path / "run", Settings())
    run.log({"step": 1})
    with open(run.metrics_file, "ab") as file:
        file.write(b'{"step": 2, "lo')
    run = RunFolder(tmp_path / "run", Settings())
    run.log({"step": 2})
    assert [row["step"] for row in run.metrics()] == [1, 2]
