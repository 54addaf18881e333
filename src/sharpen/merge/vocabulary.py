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
import torch
from torch import Tensor

from sharpen.merge.checkpoint import Weights
from sharpen.records import read_json
from sharpen.types import Json, SharpenError


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


def read_tokenizer(model: Weights) -> Json:
    path = model.folder / "tokenizer.json"
    if not path.exists():
        raise SharpenError(f"{model.where}: has no tokenizer.json, which tokenizer_source needs")
    return read_json(path)


def tokenizer_notes(models: Mapping[str, Weights]) -> list[str]:
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
    models: Mapping[str, Weights], base: str | None, source: str, pad: int | None
) -> tuple[dict[str, Weights], Vocabulary]:
    """Every model with its embedding rows in the order of one vocabulary."""
    main = base or next(iter(models))
    if source not in ("union", "base") and source not in models:
        raise SharpenError(f"tokenizer source {source}: is not one of {', '.join(models)}")
    donor = models[main if source in ("union", "base") else source]
    tokenizers = {name: read_tokenizer(model) for name, model in models.items()}
    ids = {
        name: {
            token: i
            for token, i in token_ids(tokenizers[name]).items()
            if i < vocabulary_rows(model)
        }
        for name, model in models.items()
    }
    merged = read_tokenizer(donor)
    vocab = dict(next(ids[name] for name, model in models.items() if model is donor))
    if source == "union":
        merged, vocab = union(merged, vocab, tokenizers, ids)
    size = max(vocab.values(), default=-1) + 1
    size = -(-size // pad) * pad if pad else size
    rows = {name: np.full(size, -1, dtype=np.int64) for name in models}
    for name, order in rows.items():
        for token, place in vocab.items():
            order[place] = ids[name].get(token, -1)
    donors = [(models[name], rows[name]) for name in models]
    chief = (models[base], rows[base]) if base else None
    aligned: dict[str, Weights] = {
        name: Aligned(model, rows[name], donors, chief) for name, model in models.items()
    }
    return aligned, Vocabulary(merged, donor.folder, size)


def union(
    tokenizer: Json, vocab: dict[str, int], tokenizers: Mapping[str, Json], ids: Mapping[str, dict]
) -> tuple[Json, dict[str, int]]:
    """The donor's tokenizer with every token that another one has, as added tokens at the end."""
    added = {t["content"]: t for one in tokenizers.values() for t in one.get("added_tokens", [])}
    plain = {"single_word": False, "lstrip": False, "rstrip": False}
    plain |= {"normalized": False, "special": False}
    entries, vocab = list(tokenizer.get("added_tokens", [])), dict(vocab)
    next_id = max(vocab.values(), default=-1) + 1
    for one in ids.values():
        for token in sorted(one, key=one.__getitem__):
            if token not in vocab:
                entries.append(added.get(token, plain) | {"content": token, "id": next_id})
                vocab[token], next_id = next_id, next_id + 1
    return tokenizer | {"added_tokens": entries}, vocab


def vocabulary_rows(model: Weights) -> int:
    inner = model.config.get("text_config") or {}
    size = model.config.get("vocab_size", inner.get("vocab_size"))
    if not isinstance(size, int):
        raise SharpenError(f"{model.where}: config.json does not say vocab_size")
    return size


Donor = tuple[Weights, np.ndarray]


class Aligned:
    """A model whose embedding and head have their rows in another order; `order[new]` is the old
    row, or -1."""

    def __init__(self, model: Weights, order: np.ndarray, donors: list[Donor], chief: Donor | None):
        self.where, self.folder, self.config = model.where, model.folder, model.config
        self.model, self.order, self.donors, self.chief = model, order, donors, chief
        size = vocabulary_rows(model)
        self.vocabulary = {
            name
            for name, spec in model.tensors.items()
            if len(spec.shape) == 2 and spec.rows == size and re.search("emb|wte|lm_head", name)
        }
        self.tensors = {
            name: replace(spec, shape=(len(order), *spec.shape[1:]))
            if name in self.vocabulary
            else spec
            for name, spec in model.tensors.items()
        }

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self.vocabulary:
            return self.model.rows(name, start, stop)
        wanted = self.order[start:stop]
        found = gather(self.model, name, wanted)
        lost = np.nonzero(wanted < 0)[0]
        if len(lost):
            found[torch.from_numpy(lost)] = self.borrowed(name, lost + start).to(found.dtype)
        return found

    def borrowed(self, name: str, places: np.ndarray) -> Tensor:
        """Rows from the base where it has them, else the mean of the models that do."""
        having = [d for d in self.donors if name in d[0].tensors]
        table = torch.stack([gather(m, name, order[places]).float() for m, order in having])
        known = torch.from_numpy(np.stack([order[places] >= 0 for _, order in having]))
        mean = table.sum(0) / known.sum(0).clamp(min=1).unsqueeze(-1)
        if self.chief is None or self.chief not in having:
            return mean
        first = having.index(self.chief)
        return torch.where(known[first].unsqueeze(-1), table[first], mean)


def gather(model: Weights, name: str, wanted: np.ndarray) -> Tensor:
    """Rows by number, zeros for -1; neighbours are read together."""
    spec = model.tensors[name]
    found = torch.zeros(len(wanted), spec.columns, dtype=spec.dtype)
    breaks = np.nonzero(np.diff(wanted) != 1)[0] + 1
    for low, high in pairwise([0, *breaks.tolist(), len(wanted)]):
        if high > low and wanted[low] >= 0:
            first = int(wanted[low])
            found[low:high] = model.rows(name, first, first + high - low)
    return found
