"""Gorilla APIBench: an instruction and the library call that serves it. The `api/` files are
catalogues without instructions and are not recognised."""

from __future__ import annotations

import re

from sharpen.data.importers import Importer, Rows, has
from sharpen.types import Json, RowError, Task

REQUEST = re.compile(
    r"""(?:\#*\s*|\{['"]?)Instruction['"]?:\s*(.+?)(?:,\s*['"]?Output['"]?:|\n\#*\s*Output:|$)""",
    re.S,
)


def convert(row: Json, where: str, side: None) -> Rows:
    match = REQUEST.search(row["code"])
    if match is None:
        raise RowError(where, "code: no instruction in it")
    gold = {"call": row["api_call"], "api": row["api_data"]["api_name"]}
    metadata = {"provider": row["provider"], "api": row["api_data"]}
    request = match[1].strip().strip("'\"")
    yield Task("", request, (), gold, "api_call", metadata=metadata)


IMPORTERS = (Importer("gorilla", has("code", "api_call", "api_data"), convert),)
