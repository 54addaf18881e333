"""Models whose tokenizers differ: one vocabulary for all, and embedding rows put in its order.
As in mergekit, the row of a token that a model lacks is the base's, or the mean of all others'."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path

import numpy as np

from sharpen.merge import require
from sharpen.merge.checkpoint import Model
from sharpen.merge.tiles import rounded, wide
from sharpen.records import read_json
from sharpen.types import Json

PLAIN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
Rows = Mapping[str, tuple[Model, np.ndarray]]  # model and, for every new row, its old one or -1


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
        where, shown = f"{having[0].where} and {other.where}", ", ".join(map(repr, odd[:3]))
        if odd:
            notes.append(f"tokenizers of {where} differ in {len(odd)} tokens: {shown}")
    return notes


def align(
    models: Mapping[str, Model], base: str | None, source: str, pad: int | None
) -> tuple[dict[str, Model], Vocabulary]:
    """Every model with its embedding rows in the order of one vocabulary."""
    donor = base or next(iter(models)) if source in ("union", "base") else source
    require(donor in models, f"tokenizer source {source}: is not one of {', '.join(models)}")
    tokenizers, ids = dict[str, Json](), dict[str, dict[str, int]]()
    for name, model in models.items():
        file, rows = model.folder / "tokenizer.json", vocabulary_rows(model)
        require(file.exists(), f"{model.where}: has no {file.name}, which tokenizer_source needs")
        tokenizers[name] = read_json(file)
        ids[name] = {token: i for token, i in token_ids(tokenizers[name]).items() if i < rows}
    merged, vocab = tokenizers[donor], dict(ids[donor])
    if source == "union":
        merged = merged | {"added_tokens": united(merged, vocab, tokenizers, ids)}
    size = max(vocab.values(), default=-1) + 1
    size = -(-size // pad) * pad if pad else size
    rows = {name: (model, np.full(size, -1)) for name, model in models.items()}
    for name, (_, order) in rows.items():
        for token, place in vocab.items():
            order[place] = ids[name].get(token, -1)
    found = {name: aligned(name, rows, base) for name in models}
    return found, Vocabulary(merged, models[donor].folder, size)


def united(
    tokenizer: Json, vocab: dict[str, int], tokenizers: Mapping[str, Json], ids: Mapping[str, dict]
) -> list[Json]:
    """The donor's added tokens and, at the end and in `vocab` too, what other tokenizers have."""
    added = {t["content"]: t for one in tokenizers.values() for t in one.get("added_tokens", [])}
    entries = list(tokenizer.get("added_tokens", []))
    unused = count(max(vocab.values(), default=-1) + 1)
    for one in ids.values():
        for token in sorted(one.keys() - vocab.keys(), key=one.__getitem__):
            vocab[token] = next(unused)
            entries.append(added.get(token, PLAIN) | {"content": token, "id": vocab[token]})
    return entries


def vocabulary_rows(model: Model) -> int:
    inner = model.config.get("text_config") or {}
    size = model.config.get("vocab_size", inner.get("vocab_size"))
    require(size, f"{model.where}: config.json does not say vocab_size")
    return int(size or 0)


def aligned(name: str, rows: Rows, base: str | None) -> Model:
    """A model whose embedding and head have their rows in another order."""
    model, order = rows[name]
    size = vocabulary_rows(model)
    tensors = dict(model.tensors)
    for tensor, spec in model.tensors.items():
        if len(spec.shape) == 2 and spec.rows == size and re.search("emb|wte|lm_head", tensor):
            tensors[tensor] = replace(spec, shape=(len(order), spec.columns))

    def read(tensor: str, start: int, stop: int) -> np.ndarray:
        if tensors[tensor] is model.tensors[tensor]:
            return model.read(tensor, start, stop)
        found = gather(model, tensor, order[start:stop])
        lost = np.flatnonzero(order[start:stop] < 0)
        if len(lost):
            others = borrowed(tensor, lost + start, rows, base)
            found[lost] = rounded(others, tensors[tensor].dtype)
        return found

    return replace(model, tensors=tensors, read=read)


def borrowed(tensor: str, places: np.ndarray, rows: Rows, base: str | None) -> np.ndarray:
    """Rows from the base where it has them, else the mean of the models that do."""
    having = {name: pair for name, pair in rows.items() if tensor in pair[0].tensors}
    found = {n: gather(model, tensor, order[places]) for n, (model, order) in having.items()}
    known = {n: order[places] >= 0 for n, (_, order) in having.items()}
    counts = sum(known.values(), np.zeros(len(places), dtype=np.float32)).clip(1)
    result = sum(found.values()) / counts[:, None]
    if base in having:
        result[known[base]] = found[base][known[base]]
    return result


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
