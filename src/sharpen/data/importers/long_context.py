"""Finding one thing in a long text: LongEval lines and key–value retrieval."""

from __future__ import annotations

import json

from sharpen.data.importers import Importer, Rows, has
from sharpen.types import Json, RowError, Task


def convert_longeval(row: Json, where: str, side: None) -> Rows:
    metadata = {k: row[k] for k in ("num_lines", "token_size", "random_idx") if k in row}
    gold = {"answers": [str(row["expected_number"])]}
    yield Task("", row["prompt"], (), gold, "retrieval", metadata=metadata)


def convert_kv(row: Json, where: str, side: None) -> Rows:
    records, key = row["ordered_kv_records"], row["key"]
    if [key, row["value"]] not in records:
        raise RowError(where, "the key is not among the records")
    data = json.dumps(dict(records), ensure_ascii=False, indent=0)
    request = f"{data}\n\nWhich value does this JSON object hold for the key {key!r}?"
    metadata = {"keys": len(records), "position": records.index([key, row["value"]])}
    yield Task("", request, (), {"answers": [row["value"]]}, "retrieval", metadata=metadata)


IMPORTERS = (
    Importer("longeval", has("prompt", "expected_number"), convert_longeval),
    Importer("kv_retrieval", has("ordered_kv_records", "key"), convert_kv),
)
