"""`sharpen data preview`: a row as the model will see it, with the tokens that carry loss
marked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def preview(
    file: Annotated[Path, typer.Argument(help="JSONL file of dialogs.")],
    row: Annotated[int, typer.Option(help="Which row, counted from 1.", min=1)] = 1,
    model: Annotated[str, typer.Option(help="Whose tokenizer and template.")] = "smollm2-135m",
    template: Annotated[str, typer.Option(help="auto, model or hermes.")] = "auto",
    tokens: Annotated[bool, typer.Option("--tokens", help="Show token boundaries as ·.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object.")] = False,
) -> None:
    """Show a row with its trained tokens coloured, or between ⟦ and ⟧ where there is no colour.

    Example: sharpen data preview train.jsonl --row 3
    """
    from itertools import groupby, islice

    from rich.console import Console
    from rich.text import Text

    from sharpen.models.load import load_tokenizer
    from sharpen.records import read_jsonl
    from sharpen.render import Renderer
    from sharpen.rows import dialog_from_row
    from sharpen.types import SharpenError

    bad: list[str] = []
    rows = read_jsonl(file, on_bad=lambda error, raw: bad.append(str(error)))
    found = next(islice(rows, row - 1, None), None)
    for problem in bad:
        print(f"passed over {problem}", file=sys.stderr)
    if found is None:
        raise SharpenError(f"{file}: has no readable row {row}")
    tokenizer = load_tokenizer(model)
    datum = next(Renderer(tokenizer, template).render([dialog_from_row(found.value, found.where)]))
    console = Console(highlight=False, soft_wrap=True)
    shown = Text()
    numbered = zip(datum.ids.tolist(), datum.mask.tolist(), strict=True)
    for trained, group in groupby(numbered, key=lambda pair: pair[1]):
        ids = [token for token, _ in group]
        text = "·".join(tokenizer.decode([i]) for i in ids) if tokens else tokenizer.decode(ids)
        marked = f"⟦{text}⟧" if trained and not console.color_system else text
        shown.append(marked, style="bold black on green" if trained else "dim")
    console.print(shown)
    count, length = int(datum.mask.sum()), len(datum.ids)
    print(f"{found.where}: {length} tokens, {count} carry loss ({count / length:.0%})")
    if as_json:
        print(json.dumps({"where": found.where, "tokens": length, "trained": count}))
