"""`sharpen data`: build sets, read foreign files, check rows, look at them and measure them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from sharpen.cli.shared import AsJson, end_with
from sharpen.types import Json, SharpenError

if TYPE_CHECKING:
    from rich.text import Text

    from sharpen.records import Row
    from sharpen.types import Datum

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Check, preview and measure dialogs."
)
_Files = Annotated[list[Path], Argument(help="JSONL files of rows.")]
_MAX_PROBLEM_LENGTH = 300  # characters of a row's problems that are printed
_MAX_REASONS = 12  # lines of reasons that are printed


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
        from sharpen.data.generate.user_tools import build_for_tools
        from sharpen.policy.find import load_policy

        if out is None:
            raise SharpenError("--tools needs --out: own sets do not replace the built ones")
        writer = load_policy(phrase_with) if phrase_with else None
        manifest = build_for_tools(tools, out, seed, rows, writer)
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
def _import(
    format: Annotated[str, Argument(help="A format's name, or `auto` to find it.")],
    path: Annotated[Path, Argument(help="File or folder to read.")],
    out: Annotated[Path, Argument(help="JSONL file to write.")],
    limit: Annotated[int | None, Option(help="Number of records to read.", min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a foreign file into dialogs, tasks or preference pairs.

    Example: sharpen data import auto glaive_toolcall_en.json dialogs.jsonl"""
    from sharpen.data.importing import import_file

    report = import_file(format, path, out, limit)
    print(f"{report.format}: read {report.read}, kept {report.kept}", end=", ")
    print(f"quarantined {report.quarantined}; {report.rows} rows in {out}")
    _print_reasons(report.reasons)
    end_with(vars(report) | {"out": str(out)}, as_json)


@app.command()
def check(
    files: _Files,
    splits: Annotated[bool, Option("--splits", help="Compare the files as splits.")] = False,
    show: Annotated[int, Option(help="Number of bad rows to print, at most.", min=0)] = 20,
    quarantine: Annotated[bool, Option(help="Write bad rows to FILE.quarantine.jsonl.")] = True,
    as_json: AsJson = False,
) -> None:
    """Validate every row and every call; exit 1 when something is wrong.

    Example: sharpen data check --splits train.jsonl dev.jsonl test.jsonl"""
    reports = [_check_file(file, show, quarantine) for file in files]
    result: Json = {"files": reports}
    leaks: list[str] = []
    if splits:
        from sharpen.data.overlap import compare_splits, find_leaks

        comparison = compare_splits(files)
        leaks = find_leaks(comparison)
        result["splits"] = comparison
        result["leaks"] = leaks
        _print_overlap(comparison, leaks)
    end_with(result, as_json)
    if leaks or any(report["bad"] for report in reports):
        raise typer.Exit(1)


def _check_file(path: Path, show: int, quarantine: bool) -> Json:
    """Check a file, print its first bad rows and copy all of them to its quarantine."""
    from sharpen.data.check import CheckReport, check_rows
    from sharpen.data.importing import quarantine_line, quarantine_path, strip_specifics
    from sharpen.records import atomic_write

    report = CheckReport(str(path))
    quarantine_file = None  # opened at the first bad row
    with ExitStack() as files:
        for record, problems in check_rows(path, report):
            report.reasons.update(map(strip_specifics, problems))
            problem_text = "; ".join(problems)
            if problems and report.bad <= show:
                print(f"{record.where}: {problem_text[:_MAX_PROBLEM_LENGTH]}")
            if problems and quarantine:
                if quarantine_file is None:
                    quarantine_file = files.enter_context(atomic_write(quarantine_path(path)))
                quarantine_file.write(quarantine_line(record, problem_text))
    if quarantine and not report.bad:
        quarantine_path(path).unlink(missing_ok=True)  # left by an earlier check of other rows
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.kinds.items()) or "nothing"
    print(f"{path}: {report.rows} rows ({kinds}), {report.calls} calls, {report.bad} bad rows")
    _print_reasons(report.reasons)
    return vars(report)


def _print_overlap(comparison: Json, leaks: list[str]) -> None:
    """Print what pairs of splits share, and whether that is a leak."""
    for pair in comparison["pairs"]:
        names = " ↔ ".join(pair["splits"])
        print(f"{names}: {pair['verbatim']} verbatim, {pair['grams']} 13-grams,", end=" ")
        print(f"highest word overlap {pair['word_overlap']:.0%} ({', '.join(pair['closest'])})")
    for name, ratio in comparison["distinct"].items():
        print(f"{name}: {ratio:.1%} distinct with values masked")
    for leak in leaks:
        print(f"leak: {leak}")
    if not leaks:
        print("splits: no leak")


def _print_reasons(reasons: Mapping[str, int]) -> None:
    """Print the most frequent reasons with their counts."""
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    for reason, count in ordered[:_MAX_REASONS]:
        print(f"  {count:>7}  {reason}")
    others = ordered[_MAX_REASONS:]
    if others:
        print(f"  {sum(count for _, count in others):>7}  for {len(others)} more reasons")


@app.command()
def stats(
    files: _Files,
    strict: Annotated[bool, Option("--strict", help="Exit 1 when a checklist line fails.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure what the rows teach, against the agent-training checklist.

    Example: sharpen data stats agent_sft/train.jsonl"""
    from sharpen.data.check import measure

    reports = [measure(file) for file in files]
    all_passed = True
    for report in reports:
        print(f"{report['path']}: {_format_counts(report['counts'])}")
        print(f"  types: {_format_counts(report['types'])}")
        for line in report["checklist"]:
            bound = f"≥ {line['least']:.0%}" if "least" in line else f"≤ {line['most']:.0%}"
            verdict = "pass" if line["passed"] else "FAIL"
            print(f"  {verdict}  {line['name']:16} {line['value']:7.1%}  ({bound})")
            all_passed = all_passed and line["passed"]
    end_with({"files": reports}, as_json)
    if strict and not all_passed:
        raise typer.Exit(1)


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


@app.command()
def preview(
    file: Annotated[Path, Argument(help="JSONL file of dialogs.")],
    row: Annotated[int, Option(help="Number of the row, from 1.", min=1)] = 1,
    model: Annotated[
        str, Option(help="Model whose tokenizer and template to use.")
    ] = "smollm2-135m",
    template: Annotated[str, Option(help="auto, model or hermes.")] = "auto",
    tokens: Annotated[bool, Option("--tokens", help="Show token boundaries as ·.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a row with its trained tokens coloured, or between ⟦ and ⟧ where there is no colour.

    Example: sharpen data preview train.jsonl --row 3"""
    from rich.console import Console

    from sharpen.models.load import load_tokenizer
    from sharpen.render import Renderer
    from sharpen.rows import dialog_from_row

    record = _read_nth_row(file, row)
    tokenizer = load_tokenizer(model)
    dialog = dialog_from_row(record.value, record.where)
    datum = next(Renderer(tokenizer, template).render([dialog]))
    console = Console(highlight=False, soft_wrap=True)
    console.print(_mark_trained(datum, tokenizer, tokens, has_color=bool(console.color_system)))
    length = len(datum.ids)
    trained = int(datum.mask.sum())
    print(f"{record.where}: {length} tokens, {trained} carry loss ({trained / length:.0%})")
    end_with({"where": record.where, "tokens": length, "trained": trained}, as_json)


def _read_nth_row(file: Path, number: int) -> Row:
    """Returns the n-th readable row of a file; rows that cannot be read are printed."""
    from sharpen.records import read_jsonl

    bad_rows: list[str] = []

    def remember(error: Exception, raw: bytes) -> None:
        bad_rows.append(str(error))

    record = next(islice(read_jsonl(file, on_bad=remember), number - 1, None), None)
    for problem in bad_rows:
        print(f"passed over {problem}", file=sys.stderr)
    if record is None:
        raise SharpenError(f"{file}: has no readable row {number}")
    return record


def _mark_trained(datum: Datum, tokenizer: Any, show_tokens: bool, has_color: bool) -> Text:
    """Returns the text of a row with its trained tokens marked."""
    from rich.text import Text

    text = Text()
    tokens: Iterable[tuple[int, bool]] = zip(datum.ids.tolist(), datum.mask.tolist(), strict=True)
    for is_trained, group in groupby(tokens, key=lambda token: token[1]):
        ids = [token_id for token_id, _ in group]
        if show_tokens:
            part = "·".join(tokenizer.decode([token_id]) for token_id in ids)
        else:
            part = tokenizer.decode(ids)
        if is_trained and not has_color:
            part = f"⟦{part}⟧"
        text.append(part, style="bold black on green" if is_trained else "dim")
    return text
