"""`sharpen data`: read foreign files, check rows, measure them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from sharpen.cli.build import build
from sharpen.cli.preview import preview

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Check, preview and measure dialogs."
)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line.")]


app.command()(build)
app.command()(preview)


@app.command("import")
def import_(
    format: Annotated[str, typer.Argument(help="A format's name, or `auto` to find it.")],
    path: Annotated[Path, typer.Argument(help="File or folder to read.")],
    out: Annotated[Path, typer.Argument(help="JSONL file to write.")],
    limit: Annotated[int | None, typer.Option(help="Stop after so many records.", min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a foreign file into dialogs, tasks or preference pairs.

    Example: sharpen data import auto glaive_toolcall_en.json dialogs.jsonl
    """
    from sharpen.data.importing import import_file

    report = import_file(format, path, out, limit)
    print(f"{report.format}: read {report.read}, kept {report.kept}", end=", ")
    print(f"quarantined {report.quarantined}; {report.rows} rows in {out}")
    show_reasons(report.reasons)
    if as_json:
        fields = ("format", "read", "kept", "quarantined", "rows", "reasons")
        print(json.dumps({name: getattr(report, name) for name in fields} | {"out": str(out)}))


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="JSONL files of rows.")],
    splits: Annotated[
        bool, typer.Option("--splits", help="The files are splits of one set: compare them.")
    ] = False,
    show: Annotated[int, typer.Option(help="Print at most so many bad rows.", min=0)] = 20,
    quarantine: Annotated[
        bool, typer.Option(help="Write bad rows to FILE.quarantine.jsonl beside each file.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Validate every row and every call; exit 1 when something is wrong.

    Example: sharpen data check --splits train.jsonl dev.jsonl test.jsonl
    """
    reports = []
    for file in files:
        reports.append(check_one(file, show, quarantine))
    bad = sum(report["bad"] for report in reports)
    leaks = []
    result: dict[str, object] = {"files": reports}
    if splits:
        from sharpen.data.overlap import compare, leaks_in

        result["splits"] = found = compare(files)
        leaks = leaks_in(found)
        for pair in found["pairs"]:
            names = " ↔ ".join(pair["splits"])
            print(f"{names}: {pair['verbatim']} verbatim, {pair['grams']} 13-grams,", end=" ")
            print(f"highest word overlap {pair['word_overlap']:.0%} ({', '.join(pair['closest'])})")
        for name, ratio in found["distinct"].items():
            print(f"{name}: {ratio:.1%} distinct with values masked")
        print("\n".join(f"leak: {leak}" for leak in leaks) or "splits: no leak")
        result["leaks"] = leaks
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    if bad or leaks:
        raise typer.Exit(1)


def check_one(path: Path, show: int, quarantine: bool) -> dict[str, object]:
    from sharpen.data.check import CheckReport, check_rows
    from sharpen.data.importing import Quarantine, reason_kind

    report, shown = CheckReport(str(path)), 0
    with ExitStack() as files:
        bad = Quarantine(path, files)
        for record, problems in check_rows(path, report):
            for problem in problems:
                report.reasons[reason_kind(problem)] += 1
            if problems and quarantine:
                bad.add(record.where, "; ".join(problems), record.raw or record.value)
            if problems and shown < show:
                shown += 1
                print(f"{record.where}: {'; '.join(problems)[:300]}")
    if quarantine:
        bad.finish()
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.kinds.items()) or "nothing"
    print(f"{path}: {report.rows} rows ({kinds}), {report.calls} calls, {report.bad} bad rows")
    show_reasons(report.reasons)
    fields = ("path", "rows", "bad", "calls", "kinds", "reasons")
    return {name: getattr(report, name) for name in fields}


@app.command()
def stats(
    files: Annotated[list[Path], typer.Argument(help="JSONL files of rows.")],
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 when a checklist line fails.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure what the rows teach, against the agent-training checklist.

    Example: sharpen data stats agent_sft/train.jsonl
    """
    from sharpen.data.stats import measure

    found = [measure(file) for file in files]
    for one in found:
        counts = ", ".join(f"{name} {count}" for name, count in one["counts"].items())
        print(f"{one['path']}: {counts}")
        print("  types: " + ", ".join(f"{name} {count}" for name, count in one["types"].items()))
        for line in one["checklist"]:
            bound = f"≥ {line['least']:.0%}" if "least" in line else f"≤ {line['most']:.0%}"
            verdict = "pass" if line["passed"] else "FAIL"
            print(f"  {verdict}  {line['name']:16} {line['value']:7.1%}  ({bound})")
    if as_json:
        print(json.dumps({"files": found}, ensure_ascii=False))
    if strict and not all(line["passed"] for one in found for line in one["checklist"]):
        raise typer.Exit(1)


def show_reasons(reasons: Mapping[str, int], most: int = 12) -> None:
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    for reason, count in ordered[:most]:
        print(f"  {count:>7}  {reason}")
    if rest := ordered[most:]:
        print(f"  {sum(count for _, count in rest):>7}  for {len(rest)} more reasons")
