"""`sharpen data`: build sets, read foreign files, check rows, look at them and measure them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from sharpen.cli.shared import AsJson, end_with
from sharpen.types import SharpenError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Check, preview and measure dialogs."
)
Files = Annotated[list[Path], Argument(help="JSONL files of rows.")]


@app.command()
def build(
    out: Annotated[Path | None, Option(help="Folder; else $SHARPEN_DATA or the cache.")] = None,
    seed: Annotated[int, Option(help="The same seed gives the same bytes.")] = 0,
    tools: Annotated[Path | None, Option(help="Own tools: .py of @tool, or openapi.json.")] = None,
    rows: Annotated[int | None, Option(help="Dialogs: 5000; own tools: 40 each.", min=20)] = None,
    extended: Annotated[int, Option(help="Fresh tasks a part, beside the splits.", min=0)] = 2000,
    workers: Annotated[int, Option(help="Processes; 0 is up to four.", min=0)] = 0,
    phrase_with: Annotated[str | None, Option(help="A model to word --tools' requests.")] = None,
    as_json: AsJson = False,
) -> None:
    """Build agent_tools, agent_sft and agent_benchmark. Own Python tools are really executed.

    Example: sharpen data build --out data --seed 0"""
    from sharpen.data.generate.build import Sizes, build_data
    from sharpen.data.sources import data_folder

    if tools is not None:
        from sharpen.data.generate.user_tools import build_own
        from sharpen.policy.find import load_policy

        if out is None:
            raise SharpenError("--tools needs --out: own sets do not replace the built ones")
        writer = load_policy(phrase_with) if phrase_with else None
        manifest = build_own(tools, out, seed, rows, writer)
    elif phrase_with:
        raise SharpenError("--phrase-with words requests for --tools, which is missing")
    else:
        out = out or data_folder()
        manifest = build_data(out, seed, Sizes(rows or 5000, extended=extended), workers)
    for path, count in manifest["rows"].items():
        print(f"{count:>7}  {path}")
    for name, reason in manifest.get("left_out", {}).items():
        print(f"left out: {name}: {reason}")
    print(f"built {sum(manifest['rows'].values())} rows in {out}")
    shown = {key: manifest[key] for key in ("seed", "rows", "files")}
    end_with({"out": str(out)} | shown, as_json)


@app.command("import")
def import_(
    format: Annotated[str, Argument(help="A format's name, or `auto` to find it.")],
    path: Annotated[Path, Argument(help="File or folder to read.")],
    out: Annotated[Path, Argument(help="JSONL file to write.")],
    limit: Annotated[int | None, Option(help="Stop after so many records.", min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a foreign file into dialogs, tasks or preference pairs.

    Example: sharpen data import auto glaive_toolcall_en.json dialogs.jsonl"""
    from sharpen.data.importing import import_file

    report = import_file(format, path, out, limit)
    print(f"{report.format}: read {report.read}, kept {report.kept}", end=", ")
    print(f"quarantined {report.quarantined}; {report.rows} rows in {out}")
    show_reasons(report.reasons)
    end_with(vars(report) | {"out": str(out)}, as_json)


@app.command()
def check(
    files: Files,
    splits: Annotated[bool, Option("--splits", help="Compare the files as splits.")] = False,
    show: Annotated[int, Option(help="Print at most so many bad rows.", min=0)] = 20,
    quarantine: Annotated[bool, Option(help="Write bad rows to FILE.quarantine.jsonl.")] = True,
    as_json: AsJson = False,
) -> None:
    """Validate every row and every call; exit 1 when something is wrong.

    Example: sharpen data check --splits train.jsonl dev.jsonl test.jsonl"""
    result: dict[str, Any] = {"files": [check_one(file, show, quarantine) for file in files]}
    if splits:
        from sharpen.data.overlap import compare, leaks_in

        result["splits"] = found = compare(files)
        result["leaks"] = leaks_in(found)
        for pair in found["pairs"]:
            names = " ↔ ".join(pair["splits"])
            print(f"{names}: {pair['verbatim']} verbatim, {pair['grams']} 13-grams,", end=" ")
            print(f"highest word overlap {pair['word_overlap']:.0%} ({', '.join(pair['closest'])})")
        for name, ratio in found["distinct"].items():
            print(f"{name}: {ratio:.1%} distinct with values masked")
        print("\n".join(f"leak: {leak}" for leak in result["leaks"]) or "splits: no leak")
    end_with(result, as_json)
    if result.get("leaks") or any(report["bad"] for report in result["files"]):
        raise typer.Exit(1)


def check_one(path: Path, show: int, quarantine: bool) -> dict[str, Any]:
    from sharpen.data.check import CheckReport, check_rows
    from sharpen.data.importing import kept_apart, quarantine_of, reason_kind
    from sharpen.records import atomic_write

    report, apart = CheckReport(str(path)), None
    with ExitStack() as files:
        for record, problems in check_rows(path, report):
            report.reasons.update(map(reason_kind, problems))
            if problems and report.bad <= show:
                print(f"{record.where}: {'; '.join(problems)[:300]}")
            if problems and quarantine:
                apart = apart or files.enter_context(atomic_write(quarantine_of(path)))
                apart.write(kept_apart(record, "; ".join(problems)))
    if quarantine and not report.bad:
        quarantine_of(path).unlink(missing_ok=True)  # an older one, of other rows
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.kinds.items()) or "nothing"
    print(f"{path}: {report.rows} rows ({kinds}), {report.calls} calls, {report.bad} bad rows")
    show_reasons(report.reasons)
    return vars(report)


def show_reasons(reasons: Mapping[str, int], most: int = 12) -> None:
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    for reason, count in ordered[:most]:
        print(f"  {count:>7}  {reason}")
    if rest := ordered[most:]:
        print(f"  {sum(count for _, count in rest):>7}  for {len(rest)} more reasons")


@app.command()
def stats(
    files: Files,
    strict: Annotated[bool, Option("--strict", help="Exit 1 when a checklist line fails.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure what the rows teach, against the agent-training checklist.

    Example: sharpen data stats agent_sft/train.jsonl"""
    from sharpen.data.check import measure

    found = [measure(file) for file in files]
    for one in found:
        counts = ", ".join(f"{name} {count}" for name, count in one["counts"].items())
        print(f"{one['path']}: {counts}")
        print("  types: " + ", ".join(f"{name} {count}" for name, count in one["types"].items()))
        for line in one["checklist"]:
            bound = f"≥ {line['least']:.0%}" if "least" in line else f"≤ {line['most']:.0%}"
            verdict = "pass" if line["passed"] else "FAIL"
            print(f"  {verdict}  {line['name']:16} {line['value']:7.1%}  ({bound})")
    end_with({"files": found}, as_json)
    if strict and not all(line["passed"] for one in found for line in one["checklist"]):
        raise typer.Exit(1)


@app.command()
def preview(
    file: Annotated[Path, Argument(help="JSONL file of dialogs.")],
    row: Annotated[int, Option(help="Which row, counted from 1.", min=1)] = 1,
    model: Annotated[str, Option(help="Whose tokenizer and template.")] = "smollm2-135m",
    template: Annotated[str, Option(help="auto, model or hermes.")] = "auto",
    tokens: Annotated[bool, Option("--tokens", help="Show token boundaries as ·.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a row with its trained tokens coloured, or between ⟦ and ⟧ where there is no colour.

    Example: sharpen data preview train.jsonl --row 3"""
    from itertools import groupby, islice

    from rich.console import Console
    from rich.text import Text

    from sharpen.models.load import load_tokenizer
    from sharpen.records import read_jsonl
    from sharpen.render import Renderer
    from sharpen.rows import dialog_from_row

    bad: list[str] = []
    rows = read_jsonl(file, on_bad=lambda error, raw: bad.append(str(error)))
    found = next(islice(rows, row - 1, None), None)
    for problem in bad:
        print(f"passed over {problem}", file=sys.stderr)
    if found is None:
        raise SharpenError(f"{file}: has no readable row {row}")
    tokenizer = load_tokenizer(model)
    datum = next(Renderer(tokenizer, template).render([dialog_from_row(found.value, found.where)]))
    console, shown = Console(highlight=False, soft_wrap=True), Text()
    numbered = zip(datum.ids.tolist(), datum.mask.tolist(), strict=True)
    for trained, group in groupby(numbered, key=lambda pair: pair[1]):
        ids = [token for token, _ in group]
        text = "·".join(tokenizer.decode([i]) for i in ids) if tokens else tokenizer.decode(ids)
        marked = f"⟦{text}⟧" if trained and not console.color_system else text
        shown.append(marked, style="bold black on green" if trained else "dim")
    console.print(shown)
    count, length = int(datum.mask.sum()), len(datum.ids)
    print(f"{found.where}: {length} tokens, {count} carry loss ({count / length:.0%})")
    end_with({"where": found.where, "tokens": length, "trained": count}, as_json)
