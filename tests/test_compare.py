"""Methods are really trained and measured. A run that fails is shown; a complete one is kept."""

from __future__ import annotations

import json
import re

import pytest

from sharpen.evals.compare import (
    DEFAULT_METHODS,
    METHODS,
    CompareConfig,
    Comparison,
    MethodRun,
    comparison_rows,
    quick_config,
)
from sharpen.records import write_jsonl
from sharpen.types import SharpenError


def dialogs(count):
    kinds = ("tool_selection", "timing")
    return [
        {
            "messages": [
                {"role": "user", "content": f"Say {n}."},
                {"role": "assistant", "content": f"{n} it is, {'yes' * (n % 3)}."},
            ],
            "task_type": kinds[n % 2],
        }
        for n in range(count)
    ]


@pytest.fixture
def config(pico_folder, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", dialogs(24))
    write_jsonl(tmp_path / "dev.jsonl", dialogs(6))
    values = {
        "model": str(pico_folder),
        "train_data": str(tmp_path / "train.jsonl"),
        "dev_data": str(tmp_path / "dev.jsonl"),
        "train_rows": 20,
        "dev_rows": 0,
        "steps": 3,
        "settings": {"coreset_target_size": 8, "batch_size": 4, "gradient_accumulation": 1},
    }

    def make(**changes):
        return quick_config(**values | changes)

    return make


@pytest.mark.slow
def test_the_six_are_trained_and_shown(config, tmp_path):
    own = {"broken": {"coreset_strategy": "moon", "use_coreset_selection": True}}
    settings = config(methods=(*DEFAULT_METHODS, "broken"), own=own)
    rows = Comparison(settings, tmp_path / "out").run()
    *six, broken = rows
    assert [row["method"] for row in six] == list(DEFAULT_METHODS)
    assert all(row["metrics"]["dev_loss"]["count"] == 6 for row in six)
    assert six[0]["rows"] == 20 and six[1]["rows"] == 8
    assert "moon" in broken["failed"] and "exit code 2" in broken["failed"]
    losses = {row["metrics"]["dev_loss"]["mean"] for row in six}
    assert len(losses) > 3  # methods differ, as what they train on does
    page = (tmp_path / "out" / "report.html").read_text()
    assert "not a result" in page and "broken failed" in page and "<svg" in page
    assert not re.search(r"""(src|href)=["']?http|url\(http|@import|<script""", page)
    for name in ("bars_dev_loss", "curves", "pareto"):
        assert (tmp_path / "out" / f"{name}.png").is_file()
    # what is done is not done again
    before = (tmp_path / "out" / "A_baseline-0" / "cell.json").stat().st_mtime_ns
    again = Comparison(settings, tmp_path / "out").run()
    assert again[0] == rows[0]
    assert (tmp_path / "out" / "A_baseline-0" / "cell.json").stat().st_mtime_ns == before


def test_one_method_by_command(config, tmp_path, sharpen):
    settings = config(methods=("A_baseline",)).model_dump(mode="json")
    (tmp_path / "compare.yaml").write_text(json.dumps(settings))
    out = tmp_path / "out"
    options = ("--config", str(tmp_path / "compare.yaml"), "--method", "A_baseline")
    code, stdout, _ = sharpen("compare", *options, "--output", str(out), "--json")
    assert code == 0 and json.loads(stdout.splitlines()[-1])["rows"][0]["method"] == "A_baseline"
    report = (out / "A_baseline-0" / "run" / "report.html").read_text()
    assert "dev_loss" in report and "config.yaml" in report
    code, _, stderr = sharpen("compare", "--method", "moon", "--output", str(out))
    assert code == 2 and "method 'moon': expected one of A_baseline" in stderr


def test_the_table_pools_seeds_and_pairs_items():
    def make_run(method, seed, losses):
        figures = {"rows": 4, "peak_gib": 1.0 + seed}
        items = {"dev_loss": {str(number): loss for number, loss in enumerate(losses)}}
        return MethodRun(method, seed, figures, items, [(1, 2.0)], 10.0 + seed)

    runs = [
        make_run("A", 0, [1, 2, 3]),
        make_run("A", 1, [3, 4, 5]),
        make_run("B", 0, [0, 1, 2]),
        make_run("B", 1, [2, 3, 4]),
        MethodRun("C", 0, {}, {}, [], failed="out of memory"),
    ]
    a, b, c = comparison_rows(runs, ("A", "B", "C"))
    assert a["metrics"]["dev_loss"]["mean"] == 3 and a["metrics"]["dev_loss"]["seeds_std"] == 1
    assert a["seconds"] == 10.5 and a["peak_gib"] == 2.0
    assert b["metrics"]["dev_loss"]["change"]["difference"] == pytest.approx(-1)
    assert c == {"method": "C", "failed": "out of memory"}


def test_wrong_methods_are_named(tmp_path):
    with pytest.raises(SharpenError, match="method 'E': expected one of A_baseline"):
        Comparison(CompareConfig(methods=("E",)), tmp_path)
    assert set(DEFAULT_METHODS) < set(METHODS)
