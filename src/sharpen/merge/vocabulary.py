"""Models whose tokenizers differ: one vocabulary for all, and embedding rows put in its order.

As in mergekit, the row of a token that a model lacks is the base's, or the mean of all others'.
Called by `plan`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path

import numpy as np

from sharpen.merge import require
from sharpen.merge.checkpoint import Model
from sharpen.merge.tiles import compute_dtype, round_in_place
from sharpen.records import read_json
from sharpen.types import Json

# the properties of an added token that no tokenizer describes
_PLAIN_TOKEN = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": False,
}


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of the output."""

    tokenizer: Json  # the output's tokenizer.json
    donor: Path  # the model folder whose other tokenizer files belong to it
    size: int  # rows of the output's embedding


@dataclass(frozen=True)
class _RowOrder:
    """A model, and for every row of the output the model's own row with that token, or -1."""

    model: Model
    old_rows: np.ndarray


def _token_ids(tokenizer: Json) -> dict[str, int]:
    """Returns the id of every token of a tokenizer.json."""
    vocabulary = tokenizer.get("model", {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # of a unigram model: [token, score] in the order of ids
        vocabulary = {entry[0]: i for i, entry in enumerate(vocabulary)}
    ids = dict(vocabulary)
    for token in tokenizer.get("added_tokens", []):
        ids[token["content"]] = token["id"]
    return ids


def tokenizer_notes(models: Mapping[str, Model]) -> list[str]:
    """Returns what the tokenizers of the models disagree about, one sentence per model."""
    with_tokenizer = []
    for model in models.values():
        if (model.folder / "tokenizer.json").exists():
            with_tokenizer.append(model)
    notes: list[str] = []
    for other in with_tokenizer[1:]:
        first = with_tokenizer[0]
        first_file = first.folder / "tokenizer.json"
        other_file = other.folder / "tokenizer.json"
        if first_file.read_bytes() == other_file.read_bytes():
            continue
        first_ids = _token_ids(read_json(first_file))
        other_ids = _token_ids(read_json(other_file))
        differing = []
        for token in {**first_ids, **other_ids}:
            if first_ids.get(token) != other_ids.get(token):
                differing.append(token)
        if differing:
            where = f"{first.where} and {other.where}"
            examples = ", ".join(map(repr, differing[:3]))
            notes.append(f"tokenizers of {where} differ in {len(differing)} tokens: {examples}")
    return notes


def align(
    models: Mapping[str, Model], base: str | None, source: str, pad: int | None
) -> tuple[dict[str, Model], Vocabulary]:
    """Returns every model with its embedding rows in the order of one vocabulary.

    `source` is union, base, or a model; `pad` is what the number of rows is a multiple of.
    """
    donor = source
    if source in ("union", "base"):
        donor = base or next(iter(models))
    require(donor in models, f"tokenizer source {source}: is not one of {', '.join(models)}")
    tokenizers: dict[str, Json] = {}
    ids: dict[str, dict[str, int]] = {}
    for name, model in models.items():
        file = model.folder / "tokenizer.json"
        row_count = _vocabulary_rows(model)
        require(file.exists(), f"{model.where}: has no {file.name}, which tokenizer_source needs")
        tokenizers[name] = read_json(file)
        # a tokenizer can have ids beyond the embedding's last row
        all_ids = _token_ids(tokenizers[name])
        ids[name] = {token: i for token, i in all_ids.items() if i < row_count}
    tokenizer = tokenizers[donor]
    vocabulary = dict(ids[donor])
    if source == "union":
        added_tokens = _unite_added_tokens(tokenizer, vocabulary, tokenizers, ids)
        tokenizer = tokenizer | {"added_tokens": added_tokens}
    size = max(vocabulary.values(), default=-1) + 1
    if pad:
        size = -(-size // pad) * pad  # rounded up
    orders: dict[str, _RowOrder] = {}
    for name, model in models.items():
        old_rows = np.full(size, -1)
        for token, row in vocabulary.items():
            old_rows[row] = ids[name].get(token, -1)
        orders[name] = _RowOrder(model, old_rows)
    aligned = {name: _reorder_rows(name, orders, base) for name in models}
    return aligned, Vocabulary(tokenizer, models[donor].folder, size)


def _unite_added_tokens(
    tokenizer: Json,
    vocabulary: dict[str, int],
    tokenizers: Mapping[str, Json],
    ids: Mapping[str, dict[str, int]],
) -> list[Json]:
    """Returns the donor's added tokens and, at the end, the tokens that only other models have.

    The latter are added to `vocabulary` too.
    """
    known_entries: dict[str, Json] = {}
    for other in tokenizers.values():
        for entry in other.get("added_tokens", []):
            known_entries[entry["content"]] = entry
    entries = list(tokenizer.get("added_tokens", []))
    unused_ids = count(max(vocabulary.values(), default=-1) + 1)
    for ids_of_model in ids.values():
        missing = ids_of_model.keys() - vocabulary.keys()
        for token in sorted(missing, key=ids_of_model.__getitem__):
            vocabulary[token] = next(unused_ids)
            entry = known_entries.get(token, _PLAIN_TOKEN)
            entries.append(entry | {"content": token, "id": vocabulary[token]})
    return entries


def _vocabulary_rows(model: Model) -> int:
    """Returns how many rows a model's embedding has, from its config."""
    text_config = model.config.get("text_config") or {}
    size = model.config.get("vocab_size", text_config.get("vocab_size"))
    require(size, f"{model.where}: config.json does not say vocab_size")
    return int(size or 0)


def _reorder_rows(name: str, orders: Mapping[str, _RowOrder], base: str | None) -> Model:
    """Returns a model whose embedding and head have their rows in the new order."""
    model = orders[name].model
    old_rows = orders[name].old_rows
    row_count = _vocabulary_rows(model)
    tensors = dict(model.tensors)
    for tensor, spec in model.tensors.items():
        is_matrix = len(spec.shape) == 2 and spec.rows == row_count
        if is_matrix and re.search("emb|wte|lm_head", tensor):
            tensors[tensor] = replace(spec, shape=(len(old_rows), spec.columns))

    def read(tensor: str, start: int, stop: int) -> np.ndarray:
        if tensors[tensor] is model.tensors[tensor]:
            return model.read(tensor, start, stop)
        rows = _gather_rows(model, tensor, old_rows[start:stop])
        missing = np.flatnonzero(old_rows[start:stop] < 0)
        if len(missing):
            substitutes = _rows_of_others(tensor, missing + start, orders, base)
            rows[missing] = round_in_place(substitutes, tensors[tensor].dtype)
        return rows

    return replace(model, tensors=tensors, read=read)


def _rows_of_others(
    tensor: str, rows: np.ndarray, orders: Mapping[str, _RowOrder], base: str | None
) -> np.ndarray:
    """Returns rows from the base where it has them, otherwise the mean of the models that do."""
    values_of: dict[str, np.ndarray] = {}
    has_row: dict[str, np.ndarray] = {}
    for name, order in orders.items():
        if tensor in order.model.tensors:
            values_of[name] = _gather_rows(order.model, tensor, order.old_rows[rows])
            has_row[name] = order.old_rows[rows] >= 0
    counts = sum(has_row.values(), np.zeros(len(rows), dtype=np.float32)).clip(1)
    result = sum(values_of.values()) / counts[:, None]
    if base in values_of:
        result[has_row[base]] = values_of[base][has_row[base]]
    return result


def _gather_rows(model: Model, name: str, rows: np.ndarray) -> np.ndarray:
    """Read rows by number, zeros for -1; neighbouring rows are read together."""
    spec = model.tensors[name]
    values = np.zeros((len(rows), spec.columns), dtype=compute_dtype(spec.dtype))
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    for low, high in pairwise([0, *breaks.tolist(), len(rows)]):
        if high > low and rows[low] >= 0:
            first = int(rows[low])
            values[low:high] = model.read(name, first, first + high - low)
    return values
