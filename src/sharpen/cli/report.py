"""`sharpen report`: write the page of a run or an evaluation again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument


def report(folder: Annotated[Path, Argument(help="A run or an evaluation.")]) -> None:
    """Write FOLDER/report.html from the files that are there.

    Example: sharpen report runs/sft"""
    from sharpen.report.runs import write_report

    print(write_report(folder))
