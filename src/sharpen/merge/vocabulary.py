"""Models whose tokenizers differ: one vocabulary for all, and embedding rows put in its order.

A token that a model lacks takes its row from the base if that has it, from the only model that has
it, or else the mean of those that do, as in mergekit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from sharpen.merge.arrays import rounded, wide
from sharpen.merge.checkpoint import Model
from sharpen.records import read_json
from sharpen.types import Json, SharpenError

PLAIN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)


@dataclass(frozen=True)
class Vocabulary:
    tokenizer: Json  # the output's tokenizer.json
    donor: Path  # whose other tokenizer files belong to it
    size: int  # rows of the output's embedding


def token_ids(tokenizer: Json) -> dict[str, int]:
    vocab = tokenizer.get("model", {}).get("vocab") or {}
    if isinstance(vocab, list):  # of a unigram model: [token, score] in the order of ids
        vocab = {entry[0]: i for i, entry in enumerate(vocab)}
    return vocab | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}


def read_tokenizer(model: Model) -> Json:
    path = model.folder / "tokenizer.json"
    if not path.exists():
        raise SharpenError(f"{model.where}: has no tokenizer.json, which tokenizer_source needs")
    return read_json(path)


def tokenizer_notes(models: Mapping[str, Model]) -> list[str]:
    """What the tokenizers of the models disagree about."""
    having = [m for m in models.values() if (m.folder / "tokenizer.json").exists()]
    notes: list[str] = []
    for other in having[1:]:
        files = [m.folder / "tokenizer.json" for m in (having[0], other)]
        if files[0].read_bytes() == files[1].read_bytes():
            continue
        ours, theirs = (token_ids(read_json(file)) for file in files)
        odd = [token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token)]
        if odd:
            shown = ", ".join(repr(token) for token in odd[:3])
            where = f"{having[0].where} and {other.where}"
            notes.append(f"tokenizers of {where} differ in {len(odd)} tokens: {shown}")
    return notes


def align(
    models: Mapping[str, Model], base: str | None, source: str, pad: int | None
) -> tuple[dict[str, Model], Vocabulary]:
    """Every model with its embedding rows in the order of one vocabulary."""
    main = base or next(iter(models))
    if source not in ("union", "base") and source not in models:
        raise SharpenError(f"tokenizer source {source}: is not one of {', '.join(models)}")
    donor = main if source in ("union", "base") else source
    tokenizers = {name: read_tokenizer(model) for name, model in models.items()}
    ids: dict[str, dict[str, int]] = {}
    for name, model in models.items():
        rows = vocabulary_rows(model)
        ids[name] = {token: i for token, i in token_ids(tokenizers[name]).items() if i < rows}
    merged, vocab = tokenizers[donor], dict(ids[donor])
    if source == "union":
        merged = merged | {"added_tokens": united(merged, vocab, tokenizers, ids)}
    size = max(vocab.values(), default=-1) + 1
    size = -(-size // pad) * pad if pad else size
    orders = {name: np.full(size, -1) for name in models}
    for name, order in orders.items():
        for token, place in vocab.items():
            order[place] = ids[name].get(token, -1)
    donors = {name: (model, orders[name]) for name, model in models.items()}
    found = {name: aligned(name, donors, base) for name in models}
    return found, Vocabulary(merged, models[donor].folder, size)


def united(
    tokenizer: Json, vocab: dict[str, int], tokenizers: Mapping[str, Json], ids: Mapping[str, dict]
) -> list[Json]:
    """The donor's added tokens and every token that another tokenizer has, at the end; they go into
    `vocab` too."""
    added = {t["content"]: t for one in tokenizers.values() for t in one.get("added_tokens", [])}
    entries = list(tokenizer.get("added_tokens", []))
    next_id = max(vocab.values(), default=-1) + 1
    for one in ids.values():
        for token in sorted(one, key=one.__getitem__):
            if token not in vocab:
                entries.append(added.get(token, PLAIN) | {"content": token, "id": next_id})
                vocab[token], next_id = next_id, next_id + 1
    return entries


def vocabulary_rows(model: Model) -> int:
    inner = model.config.get("text_config") or {}
    size = model.config.get("vocab_size", inner.get("vocab_size"))
    if not isinstance(size, int):
        raise SharpenError(f"{model.where}: config.json does not say vocab_size")
    return size


def aligned(name: str, donors: Mapping[str, tuple[Model, np.ndarray]], base: str | None) -> Model:
    """A model whose embedding and head have their rows in another order: `order[new]` is the old
    row, or -1."""
    model, order = donors[name]
    size = vocabulary_rows(model)
    tensors = dict(model.tensors)
    reordered = set()
    for tensor, spec in model.tensors.items():
        if len(spec.shape) == 2 and spec.rows == size and re.search("emb|wte|lm_head", tensor):
            tensors[tensor] = replace(spec, shape=(len(order), *spec.shape[1:]))
            reordered.add(tensor)

    def read(tensor: str, start: int, stop: int) -> np.ndarray:
        if tensor not in reordered:
            return model.read(tensor, start, stop)
        wanted = order[start:stop]
        found = gather(model, tensor, wanted)
        lost = np.flatnonzero(wanted < 0)
        if len(lost):
            rows = borrowed(tensor, lost + start)
            found[lost] = rounded(rows.astype(found.dtype), tensors[tensor].dtype)
        return found

    def borrowed(tensor: str, places: np.ndarray) -> np.ndarray:
        """Rows from the base where it has them, else the mean of the models that do."""
        having = {name: pair for name, pair in donors.items() if tensor in pair[0].tensors}
        rows = {n: gather(donor, tensor, order[places]) for n, (donor, order) in having.items()}
        known = {n: order[places] >= 0 for n, (_, order) in having.items()}
        counts = np.sum(list(known.values()), axis=0).clip(1)
        result = np.sum(list(rows.values()), axis=0) / counts[:, None]
        if base in having:
            result[known[base]] = rows[base][known[base]]
        return result

    return replace(model, tensors=tensors, read=read)


def gather(model: Model, name: str, wanted: np.ndarray) -> np.ndarray:
    """Rows by number, zeros for -1; neighbours are read together."""
    spec = model.tensors[name]
    found = np.zeros((len(wanted), spec.columns), dtype=wide(spec.dtype))
    breaks = np.flatnonzero(np.diff(wanted) != 1) + 1
    for low, high in pairwise([0, *breaks.tolist(), len(wanted)]):
        if high > low and wanted[low] >= 0:
            first = int(wanted[low])
            found[low:high] = model.read(name, first, first + high - low)
    return found
