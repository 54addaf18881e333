"""`sharpen data`: read foreign files, check rows, measure them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Check, preview and measure dialogs.")
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line.")]


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


def show_reasons(reasons: Mapping[str, int], most: int = 12) -> None:
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    for reason, count in ordered[:most]:
        print(f"  {count:>7}  {reason}")
    if len(ordered) > most:
        print(f"  {sum(count for _, count in ordered[most:]):>7}  for {len(ordered) - most} more reasons")
