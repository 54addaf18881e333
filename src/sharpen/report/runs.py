"""A run folder's files → its `report.html`: figures, curves, settings, what was sampled; of an
evaluation also what went wrong, by kind, and the worst items first."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sharpen.records import read_json, read_jsonl
from sharpen.report.page import Page, dialog, escape
from sharpen.report.plots import draw_bars, draw_lines
from sharpen.report.rollouts import draw_rollouts
from sharpen.types import Json, SharpenError

REPORT = "report.html"
POINTS = 400  # of a curve: more are thinned out
SHOWN = 20  # failures and samples on a page
TOGETHER = (("loss", "dev_loss"), ("reward", "metric"))  # curves in one plot
DULL = ("step", "tokens", "trained", "skipped")


def write_report(folder: str | Path) -> Path:
    """Of whatever the folder holds: an evaluation, or a training run."""
    folder = Path(folder)
    if (folder / "results.json").is_file():
        page = evaluation_page(folder)
    elif (folder / "metrics.jsonl").is_file():
        page = run_page(folder)
    else:
        raise SharpenError(f"{folder}: neither a run (metrics.jsonl) nor an evaluation")
    for name in ("config.yaml", "manifest.json"):
        if (folder / name).is_file():
            page.preformatted(name, (folder / name).read_text("utf-8"))
    page.save(folder / REPORT)
    return folder / REPORT


# Training -----------------------------------------------------------------------------------------


def run_page(folder: Path) -> Page:
    rows = [row.value for row in read_jsonl(folder / "metrics.jsonl")]
    page = Page(f"Run {folder.resolve().name}")
    if not rows:
        page.text("no step is done yet", "note")
        return page
    last = {key: value for row in rows for key, value in row.items() if value is not None}
    page.table([{"figure": name, "last": value} for name, value in last.items()])
    page.heading("Curves")
    page.plots(draw_lines(title, series) for title, series in curves(rows))
    draw_rollouts(page, folder)
    return page


def curves(rows: Sequence[Json]) -> list[tuple[str, dict[str, list[tuple[float, float]]]]]:
    """Every numeric column that changes, against the step."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if number and math.isfinite(value) and name not in DULL:
                found[name].append((row["step"], float(value)))
    found = {name: points for name, points in found.items() if len({y for _, y in points}) > 1}
    joined = [{n: thinned(found.pop(n)) for n in names if n in found} for names in TOGETHER]
    plots = [(", ".join(series), series) for series in joined if series]
    return plots + [(name, {name: thinned(points)}) for name, points in found.items()]


def thinned(points: Sequence[Any]) -> list[Any]:
    return list(points[:: max(1, len(points) // POINTS)])


# Evaluation ---------------------------------------------------------------------------------------


def evaluation_page(folder: Path) -> Page:
    results = read_json(folder / "results.json")
    rows = [row.value for row in read_jsonl(folder / "items.jsonl")]
    page = Page(f"{results['model']} on {results['benchmark']}")
    change = results.get("comparison") or {}
    if change.get("general_loss"):
        page.text(f"Worse than {change['with']} on items that need no tool.", "bad")
    page.table(figure_rows(results["metrics"], change.get("metrics") or {}))
    rates = {n: f for n, f in results["metrics"].items() if f["low"] >= 0 and f["high"] <= 1}
    if rates:
        page.plots([draw_bars("with 95% intervals", {n: span(f) for n, f in rates.items()})])
    if results.get("general"):
        page.heading("Items that need no tool")
        page.table(figure_rows(results["general"], change.get("general") or {}))
    for name in ("parts", "categories", "difficulty"):
        if results.get(name):
            page.heading(f"By {name}")
            shown = results["metrics"]
            page.table([breakdown(key, all_, shown) for key, all_ in results[name].items()])
    confusion(page, rows)
    errors(page, rows)
    failures(page, rows)
    if change:
        before_after(page, rows, Path(change["with"]))
    return page


def figure_rows(figures: Mapping[str, Json], changes: Mapping[str, Json]) -> list[Json]:
    rows = []
    for name, found in figures.items():
        row = {"metric": name, "mean": found["mean"], "low": found["low"], "high": found["high"]}
        row |= {"std": found["std"], "items": found["count"]}
        if change := changes.get(name):
            ends = f"[{change['low']:+.3f}, {change['high']:+.3f}]"
            row["change"] = f"{change['difference']:+.3f} {ends} p={change['p']:.3g}"
        rows.append(row)
    return rows


def span(found: Json) -> tuple[float, float, float]:
    return found["mean"], found["low"], found["high"]


def breakdown(name: str, figures: Mapping[str, Json], shown: Mapping[str, Any]) -> Json:
    count = max((found["count"] for found in figures.values()), default=0)
    means = {key: figures[key]["mean"] for key in shown if key in figures}
    return {"": name or "(none)", "items": count} | means


def confusion(page: Page, rows: Sequence[Json]) -> None:
    """What should have been decided first against what was."""
    pairs = Counter((row["due"], row["decision"] or "nothing") for row in rows if row.get("due"))
    said = sorted({decision for _, decision in pairs})
    if len({due for due, _ in pairs}) > 1:
        page.heading("Timing: what was due (rows), what was done (columns)")
        dues = sorted({due for due, _ in pairs})
        page.table([{"due": due} | {name: pairs[due, name] for name in said} for due in dues])


def errors(page: Page, rows: Sequence[Json]) -> None:
    kinds = Counter(f"{row['stop']}: {row['feedback'] or 'wrong'}"[:120] for row in failed(rows))
    if kinds:
        page.heading("Errors by kind")
        page.table([{"kind": kind, "items": count} for kind, count in kinds.most_common(SHOWN)])


def failed(rows: Sequence[Json]) -> list[Json]:
    return [row for row in rows if row["value"] < 1]


def failures(page: Page, rows: Sequence[Json]) -> None:
    longest = sorted(failed(rows), key=lambda row: -len(str(row["messages"])))[:SHOWN]
    if longest:
        page.heading("Failures, the longest first")
    for row in longest:
        told = f"<p>{escape(row['feedback'])}</p>" if row["feedback"] else ""
        title = f"{row['id']} ({row['part']}): {row['value']:.3g}, {row['stop']}"
        page.details(title, told + dialog(row["messages"]))


def before_after(page: Page, rows: Sequence[Json], other: Path) -> None:
    """Items that changed sides, old answer and new."""
    old = {(r.value["suite"], r.value["id"]): r.value for r in read_jsonl(other / "items.jsonl")}
    pairs = [(old[key], row) for row in rows if (key := (row["suite"], row["id"])) in old]
    for title, way in (("Gained", 1), ("Lost", -1)):
        found = [(a, b) for a, b in pairs if (b["value"] >= 1) - (a["value"] >= 1) == way]
        if found:
            page.heading(f"{title}: {len(found)} items")
        for before, after in found[:SHOWN]:
            was, now = dialog(before["messages"]), dialog(after["messages"])
            both = f"<p>before</p>{was}<p>after</p>{now}"
            page.details(f"{after['id']} ({after['part']})", both)
