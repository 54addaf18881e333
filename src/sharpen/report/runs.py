"""A run folder → its `report.html`: figures, curves, samples and settings of a training run;
figures, breakdowns, errors and failures of an evaluation.

Called at the end of every run and evaluation, and by `sharpen report`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sharpen.records import read_json, read_jsonl
from sharpen.report.page import Page, escape, render_dialog
from sharpen.report.plots import Point, draw_bars, draw_lines
from sharpen.types import Json, SharpenError

_REPORT_NAME = "report.html"
_MAX_POINTS = 400  # per curve; longer curves are thinned out
_MAX_SHOWN = 20  # samples, failures or error kinds per page
_JOINT_CURVES = (("loss", "dev_loss"), ("reward", "metric"))  # drawn in one plot
_NOT_DRAWN = ("step", "tokens", "trained", "skipped")

_Curve = list[Point]


def write_report(folder: str | Path) -> Path:
    """Write the report of an evaluation or of a training run and return its path."""
    folder = Path(folder)
    if (folder / "results.json").is_file():
        page = _build_evaluation_page(folder)
    elif (folder / "metrics.jsonl").is_file():
        page = _build_run_page(folder)
    else:
        raise SharpenError(
            f"{folder}: neither a training run (no metrics.jsonl) nor an evaluation "
            "(no results.json); give the folder of one"
        )
    for name in ("config.yaml", "manifest.json"):
        if (folder / name).is_file():
            page.preformatted(name, (folder / name).read_text("utf-8"))
    page.save(folder / _REPORT_NAME)
    return folder / _REPORT_NAME


def _read_rows(path: Path) -> list[Json]:
    return [row.value for row in read_jsonl(path)]


# Training -----------------------------------------------------------------------------------------


def _build_run_page(folder: Path) -> Page:
    rows = _read_rows(folder / "metrics.jsonl")
    page = Page(f"Run {folder.resolve().name}")
    if not rows:
        page.text("No step is finished yet.", "note")
        return page
    last_values: Json = {}
    for row in rows:
        last_values |= {name: value for name, value in row.items() if value is not None}
    page.table([{"figure": name, "last": value} for name, value in last_values.items()])
    page.heading("Curves")
    page.plots(draw_lines(title, series) for title, series in _collect_curves(rows))
    if (folder / "samples.jsonl").is_file():
        page.heading("Samples, the newest first")
        newest = _read_rows(folder / "samples.jsonl")[-_MAX_SHOWN:]
        for sample in reversed(newest):
            title = f"step {sample.get('step')}: reward {sample.get('reward'):.3g}"
            title += f", {sample.get('stop')}"
            page.details(title, render_dialog(sample.get("messages", ())))
    return page


def _collect_curves(rows: Sequence[Json]) -> list[tuple[str, dict[str, _Curve]]]:
    """Returns title and curves per plot: every numeric column that changes, against the step."""
    columns: dict[str, _Curve] = {}
    for row in rows:
        for name, value in row.items():
            if name not in _NOT_DRAWN and _is_finite_number(value):
                columns.setdefault(name, []).append((row["step"], float(value)))
    curves: dict[str, _Curve] = {}
    for name, points in columns.items():
        distinct_values = {value for _, value in points}
        if len(distinct_values) > 1:
            curves[name] = _thin_out(points)
    plots = []
    for names in _JOINT_CURVES:
        joint = {name: curves.pop(name) for name in names if name in curves}
        if joint:
            plots.append((", ".join(joint), joint))
    for name, points in curves.items():
        plots.append((name, {name: points}))
    return plots


def _is_finite_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value)


def _thin_out(points: _Curve) -> _Curve:
    return points[:: max(1, len(points) // _MAX_POINTS)]


# Evaluation ---------------------------------------------------------------------------------------


def _build_evaluation_page(folder: Path) -> Page:
    results = read_json(folder / "results.json")
    rows = _read_rows(folder / "items.jsonl")
    page = Page(f"{results['model']} on {results['benchmark']}")
    comparison = results.get("comparison") or {}
    metrics = results["metrics"]
    if comparison.get("general_loss"):
        page.text(f"Worse than {comparison['with']} on items that need no tool.", "bad")
    page.table(_metric_rows(metrics, comparison.get("metrics") or {}))
    rates = {
        name: (figure["mean"], figure["low"], figure["high"])
        for name, figure in metrics.items()
        if figure["low"] >= 0 and figure["high"] <= 1
    }
    if rates:
        page.plots([draw_bars("with 95% intervals", rates)])
    if results.get("general"):
        page.heading("Items that need no tool")
        page.table(_metric_rows(results["general"], comparison.get("general") or {}))
    for grouping in ("parts", "categories", "difficulty"):
        if results.get(grouping):
            page.heading(f"By {grouping}")
            groups = results[grouping].items()
            page.table([_breakdown_row(name, figures, metrics) for name, figures in groups])
    _add_confusion(page, rows)
    _add_error_kinds(page, rows)
    _add_failures(page, rows)
    if comparison:
        _add_changed_items(page, rows, Path(comparison["with"]))
    return page


def _metric_rows(figures: Mapping[str, Json], changes: Mapping[str, Json]) -> list[Json]:
    """Returns one table row per metric, with its change if there is a comparison."""
    rows = []
    for name, figure in figures.items():
        row = {
            "metric": name,
            "mean": figure["mean"],
            "low": figure["low"],
            "high": figure["high"],
            "std": figure["std"],
            "items": figure["count"],
        }
        change = changes.get(name)
        if change:
            interval = f"[{change['low']:+.3f}, {change['high']:+.3f}]"
            row["change"] = f"{change['difference']:+.3f} {interval} p={change['p']:.3g}"
        rows.append(row)
    return rows


def _breakdown_row(group: str, figures: Mapping[str, Json], metrics: Mapping[str, Json]) -> Json:
    """Returns the table row of one group: its size, and the mean of every metric it has."""
    row: Json = {
        "": group or "(none)",
        "items": max((figure["count"] for figure in figures.values()), default=0),
    }
    for metric in metrics:
        if metric in figures:
            row[metric] = figures[metric]["mean"]
    return row


def _add_confusion(page: Page, rows: Sequence[Json]) -> None:
    """Add a confusion matrix of the first decision, if the items call for different ones."""
    pairs: Counter[tuple[str, str]] = Counter()
    for row in rows:
        if row.get("due"):
            pairs[row["due"], row["decision"] or "nothing"] += 1
    gold_decisions = sorted({gold for gold, _ in pairs})
    actual_decisions = sorted({actual for _, actual in pairs})
    if len(gold_decisions) < 2:
        return
    page.heading("Timing: gold decision (rows), actual decision (columns)")
    table = []
    for gold in gold_decisions:
        counts = {actual: pairs[gold, actual] for actual in actual_decisions}
        table.append({"due": gold} | counts)
    page.table(table)


def _is_solved(row: Json) -> bool:
    return row["value"] >= 1


def _failed_rows(rows: Sequence[Json]) -> list[Json]:
    return [row for row in rows if not _is_solved(row)]


def _add_error_kinds(page: Page, rows: Sequence[Json]) -> None:
    kinds: Counter[str] = Counter()
    for row in _failed_rows(rows):
        kind = f"{row['stop']}: {row['feedback'] or 'wrong'}"
        kinds[kind[:120]] += 1
    if kinds:
        page.heading("Errors by kind")
        most_common = kinds.most_common(_MAX_SHOWN)
        page.table([{"kind": kind, "items": count} for kind, count in most_common])


def _add_failures(page: Page, rows: Sequence[Json]) -> None:
    failures = _failed_rows(rows)
    failures.sort(key=lambda row: len(str(row["messages"])), reverse=True)
    if failures:
        page.heading("Failures, the longest first")
    for row in failures[:_MAX_SHOWN]:
        feedback = f"<p>{escape(row['feedback'])}</p>" if row["feedback"] else ""
        title = f"{row['id']} ({row['part']}): {row['value']:.3g}, {row['stop']}"
        page.details(title, feedback + render_dialog(row["messages"]))


def _add_changed_items(page: Page, rows: Sequence[Json], other_folder: Path) -> None:
    """Add items that are solved in only one of two evaluations, with both answers."""
    old_rows = {}
    for row in _read_rows(other_folder / "items.jsonl"):
        old_rows[row["suite"], row["id"]] = row
    gained = []
    lost = []
    for row in rows:
        old_row = old_rows.get((row["suite"], row["id"]))
        if old_row is None:
            continue
        if _is_solved(row) and not _is_solved(old_row):
            gained.append((old_row, row))
        elif _is_solved(old_row) and not _is_solved(row):
            lost.append((old_row, row))
    for title, pairs in (("Gained", gained), ("Lost", lost)):
        if pairs:
            page.heading(f"{title}: {len(pairs)} items")
        for before, after in pairs[:_MAX_SHOWN]:
            old_dialog = render_dialog(before["messages"])
            new_dialog = render_dialog(after["messages"])
            both = f"<p>before</p>{old_dialog}<p>after</p>{new_dialog}"
            page.details(f"{after['id']} ({after['part']})", both)
