"""`sharpen data build`: the three sets from the tool world, or sets for one's own tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Option


def build(
    out: Annotated[Path | None, Option(help="Folder; else $SHARPEN_DATA or the cache.")] = None,
    seed: Annotated[int, Option(help="The same seed gives the same bytes.")] = 0,
    tools: Annotated[Path | None, Option(help="Own tools: .py of @tool, or openapi.json.")] = None,
    rows: Annotated[int | None, Option(help="Dialogs: 5000; own tools: 40 each.", min=20)] = None,
    extended: Annotated[int, Option(help="Fresh tasks a part, beside the splits.", min=0)] = 2000,
    workers: Annotated[int, Option(help="Processes; 0 is up to four.", min=0)] = 0,
    phrase_with: Annotated[str | None, Option(help="A model to word --tools' requests.")] = None,
    as_json: Annotated[bool, Option("--json", help="End with one JSON object.")] = False,
) -> None:
    """Build agent_tools, agent_sft and agent_benchmark. Own Python tools are really executed.

    Example: sharpen data build --out data --seed 0
    """
    from sharpen.data.generate.build import Sizes, build_data
    from sharpen.data.sources import data_folder
    from sharpen.types import SharpenError

    if tools is not None:
        from sharpen.data.generate.own import build_own

        if out is None:
            raise SharpenError("--tools needs --out: own sets do not replace the built ones")
        manifest = build_own(tools, out, seed, rows, load_policy(phrase_with))
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
    if as_json:
        shown = {key: manifest[key] for key in ("seed", "rows", "files")}
        print(json.dumps({"out": str(out)} | shown))


def load_policy(model: str | None):
    if model is None:
        return None
    from sharpen.models.load import ModelConfig
    from sharpen.policy.local import LocalPolicy

    return LocalPolicy.load(ModelConfig(base_model=model))
