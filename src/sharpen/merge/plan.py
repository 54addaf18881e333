"""Recipe + model folders → the tensors to make, after everything that can be checked was checked.

Nothing is written here. A wrong model, shape, name or parameter is an error before any work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sharpen.merge.adapters import open_reference
from sharpen.merge.checkpoint import Spec, Weights
from sharpen.merge.method import METHODS, Method
from sharpen.merge.recipe import LayerSource, MergeConfig, Settings, Slice, check_recipe, resolve
from sharpen.merge.tiles import BITS
from sharpen.merge.vocabulary import Vocabulary, align, tokenizer_notes
from sharpen.types import Json, SharpenError

LAYER = re.compile(r"(.*?\.)?(\d+)(\..+)")
EMBEDDINGS = re.compile(r"(embed_tokens|wte|wpe|word_embeddings|embed_in|embeddings?)\b")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True)
class Job:
    """One tensor to make: the same place in every input, the base first if there is one."""

    name: str
    shape: tuple[int, ...]
    inputs: tuple[tuple[Weights, str], ...]
    method: Method
    values: Mapping[str, Any]
    work: torch.dtype
    out: torch.dtype


@dataclass(frozen=True)
class Plan:
    jobs: tuple[Job, ...]
    config: Json
    donor: Path  # whose tokenizer and other small files are copied
    vocabulary: Vocabulary | None
    chat_template: str
    notes: tuple[str, ...]  # differences that do not prevent the merge

    @cached_property
    def specs(self) -> dict[str, Spec]:
        return {job.name: Spec(job.out, job.shape) for job in self.jobs}

    @cached_property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())


@dataclass(frozen=True)
class Part:
    """A slice with its models opened and put in order."""

    slice: Slice
    sources: tuple[LayerSource, ...]
    models: tuple[Weights, ...]
    prefixes: tuple[str, ...]  # of each model's layers
    based: bool

    def settings(self, recipe: MergeConfig, i: int | None) -> list[Settings]:
        own = [] if i is None else [self.sources[i].parameters]
        return [*own, self.slice.parameters, recipe.parameters]


def build_plan(recipe: MergeConfig) -> Plan:
    check_recipe(recipe)
    models = {name: open_reference(name, recipe.base_model) for name in recipe.references}
    check_architectures(models)
    notes = tokenizer_notes(models)
    vocabulary = None
    if recipe.vocabulary_source:
        pad = recipe.tokenizer.pad_to_multiple_of if recipe.tokenizer else None
        models, vocabulary = align(models, recipe.base_model, recipe.vocabulary_source, pad)
    method = METHODS[recipe.merge_method]
    parts = [part_of(method, recipe, piece, models) for piece in slices_of(recipe, models)]
    jobs = tuple(jobs_of(recipe, method, parts))
    check_shapes(jobs)
    template = models[recipe.base_model or recipe.references[0]]
    config = output_config(recipe, template, parts, jobs, vocabulary)
    text = chat_template(recipe.chat_template or "")
    return Plan(jobs, config, template.folder, vocabulary, text, tuple(notes))


def chat_template(wanted: str) -> str:
    """A template as text, from a `.jinja` file, or from a model folder."""
    if not wanted or "{" in wanted:
        return wanted
    for place in (Path(wanted), Path(wanted) / "chat_template.jinja"):
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise SharpenError(
        f"chat_template {wanted!r}: expected a template's text, a .jinja file, or a model folder "
        "that has one"
    )


def check_architectures(models: Mapping[str, Weights]) -> None:
    first, *others = models.values()
    for key in ("architectures", "model_type"):
        for other in others:
            if other.config.get(key) != first.config.get(key):
                raise SharpenError(
                    f"{key} differ: {first.where} has {first.config.get(key)}, "
                    f"{other.where} has {other.config.get(key)}"
                )
    for model in models.values():
        layer_prefix(model)  # the config and the weights agree on the layers


def slices_of(recipe: MergeConfig, models: Mapping[str, Weights]) -> list[Slice]:
    """The recipe's slices, or all layers of all its models as one."""
    if recipe.slices:
        return recipe.slices
    named = [*recipe.models]
    if recipe.base_model and recipe.base_model not in [entry.model for entry in named]:
        named.append(type(named[0])(model=recipe.base_model))
    sources = [
        LayerSource(
            model=entry.model,
            parameters=entry.parameters,
            layer_range=(0, layer_count(models[entry.model])),
        )
        for entry in named
    ]
    return [Slice(sources=sources)]


def part_of(
    method: Method, recipe: MergeConfig, piece: Slice, models: Mapping[str, Weights]
) -> Part:
    """A slice whose models suit the method, the base first."""
    names = [source.model for source in piece.sources]
    shown = ", ".join(names)
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated:
        raise SharpenError(f"{repeated}: is named twice in one merge")
    base = piece.base_model or recipe.base_model
    if method.base == "required" and base not in names:
        raise SharpenError(
            f"{method.name} needs a base_model among the merged ones ({shown})"
            if base
            else f"{method.name} needs a base_model"
        )
    if len(names) < method.least or (method.most and len(names) > method.most):
        exact = "exactly" if method.least == method.most else "at least"
        exact = "at most" if method.most == 1 else exact
        wanted = method.least if exact != "at most" else 1
        raise SharpenError(
            f"{method.name} merges {exact} {wanted} models, base included; found {len(names)}: "
            + shown
        )
    based = method.base != "ignored" and base in names
    order = sorted(piece.sources, key=lambda s: s.model != base) if based else piece.sources
    sizes = {source.model: source.layer_range[1] - source.layer_range[0] for source in order}
    for source in order:
        low, high = source.layer_range
        if not 0 <= low < high <= layer_count(models[source.model]):
            raise SharpenError(
                f"layer_range [{low}, {high}] of {source.model}: it has layers 0 to "
                f"{layer_count(models[source.model])}"
            )
    if len(set(sizes.values())) > 1:
        counted = ", ".join(f"{model} has {size}" for model, size in sizes.items())
        raise SharpenError(f"the merged models differ in their number of layers: {counted}")
    opened = tuple(models[source.model] for source in order)
    return Part(piece, tuple(order), opened, tuple(layer_prefix(m) for m in opened), based)


def jobs_of(recipe: MergeConfig, method: Method, parts: Sequence[Part]) -> Iterable[Job]:
    """Embeddings from the first slice, then all layers, then the rest from the last slice."""
    for name in outer_names(parts[0]):
        if EMBEDDINGS.search(name):
            yield job_of(recipe, method, parts[0], name, [name] * len(parts[0].models), 0.0)
    made = 0
    for part in parts:
        count = part.sources[0].layer_range[1] - part.sources[0].layer_range[0]
        for step in range(count):
            places = [
                f"{prefix}{source.layer_range[0] + step}"
                for prefix, source in zip(part.prefixes, part.sources, strict=True)
            ]
            depth = step / (count - 1) if count > 1 else 1.0
            for tail in layer_tails(part.models, places):
                name = f"{part.prefixes[0]}{made}{tail}"
                yield job_of(recipe, method, part, name, [p + tail for p in places], depth)
            made += 1
    for name in outer_names(parts[-1]):
        if not EMBEDDINGS.search(name):
            yield job_of(recipe, method, parts[-1], name, [name] * len(parts[-1].models), 0.0)


def job_of(
    recipe: MergeConfig, method: Method, part: Part, name: str, names: Sequence[str], depth: float
) -> Job:
    stored = [stored_name(model, n) for model, n in zip(part.models, names, strict=True)]
    missing = [m for m, s in zip(part.models, stored, strict=True) if s is None]
    if missing:
        having = next(m for m in part.models if m not in missing)
        raise SharpenError(f"{missing[0].where}: has no tensor {name}, which {having.where} has")
    inputs = tuple((m, s or "") for m, s in zip(part.models, stored, strict=True))
    specs = [model.tensors[key] for model, key in inputs]
    work = specs[0].dtype
    if not work.is_floating_point:
        first = (inputs[0],)
        return Job(
            name, specs[0].shape, first, METHODS["passthrough"], {"scale": [None]}, work, work
        )
    for spec in specs[1:]:
        work = promote(work, spec.dtype, name)
    work = getattr(torch, recipe.dtype) if recipe.dtype else work
    out = getattr(torch, recipe.out_dtype) if recipe.out_dtype else work
    if work not in BITS:
        raise SharpenError(f"{name}: cannot compute in {work}; set dtype: bfloat16")
    values = resolve(method, lambda i: part.settings(recipe, i), names, part.based, depth, name)
    return Job(name, specs[0].shape, inputs, method, values, work, out)


def promote(a: torch.dtype, b: torch.dtype, name: str) -> torch.dtype:
    try:
        return torch.promote_types(a, b)
    except RuntimeError:
        raise SharpenError(f"{name}: {a} and {b} have no common dtype; set dtype") from None


def check_shapes(jobs: Iterable[Job]) -> None:
    for job in jobs:
        shapes = {model.where: list(model.tensors[name].shape) for model, name in job.inputs}
        if len({tuple(shape) for shape in shapes.values()}) > 1:
            advice = (
                "; vocabularies differ: set tokenizer_source: union (or base, or a model)"
                if EMBEDDINGS.search(job.name) or job.name.endswith("lm_head.weight")
                else ""
            )
            shown = ", ".join(f"{where} {shape}" for where, shape in shapes.items())
            raise SharpenError(f"{job.name}: shapes differ: {shown}{advice}")


def layer_count(model: Weights) -> int:
    inner = model.config.get("text_config")
    for config in (model.config, inner if isinstance(inner, dict) else {}):
        for key in LAYER_COUNTS:
            if isinstance(config.get(key), int):
                return config[key]
    raise SharpenError(f"{model.where}: config.json does not say how many layers there are")


def layer_prefix(model: Weights) -> str:
    """What stands before a layer's number in the names of tensors."""
    numbers: dict[str, set[int]] = {}
    for name in model.tensors:
        if match := LAYER.fullmatch(name):
            numbers.setdefault(match[1] or "", set()).add(int(match[2]))
    count = layer_count(model)
    found = [prefix for prefix, seen in numbers.items() if len(seen) == count]
    if not found:
        sizes = {prefix: len(seen) for prefix, seen in numbers.items()}
        raise SharpenError(
            f"{model.where}: config.json says {count} layers, the weights have {sizes or 'none'}"
        )
    return found[0]


def outer_names(part: Part) -> list[str]:
    """Names of the tensors that stand in no layer, of any of the models."""
    found: dict[str, None] = {}
    for model, prefix in zip(part.models, part.prefixes, strict=True):
        for name in model.tensors:
            match = LAYER.fullmatch(name)
            if match is None or (match[1] or "") != prefix:
                found[name] = None
    return list(found)


def layer_tails(models: Sequence[Weights], places: Sequence[str]) -> list[str]:
    return list(
        dict.fromkeys(
            name.removeprefix(place)
            for model, place in zip(models, places, strict=True)
            for name in model.tensors
            if name.startswith(place + ".")
        )
    )


def stored_name(model: Weights, name: str) -> str | None:
    """Where a model keeps a tensor: a head that is tied to the embedding is that embedding."""
    if name in model.tensors:
        return name
    if name.endswith("lm_head.weight"):
        return next(
            (n for n in model.tensors if re.search(r"(embed_tokens|wte)\.weight$", n)), None
        )
    return None


def output_config(
    recipe: MergeConfig,
    template: Weights,
    parts: Sequence[Part],
    jobs: Sequence[Job],
    vocabulary: Vocabulary | None,
) -> Json:
    """The base's config.json with what the merge changes."""
    config = dict(template.config)
    if recipe.dtype or recipe.out_dtype:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = (
            recipe.out_dtype or recipe.dtype
        )
    if vocabulary:
        config["vocab_size"] = vocabulary.size
    if recipe.slices:
        old = layer_count(template)
        if old not in [config.get(key) for key in LAYER_COUNTS]:
            raise SharpenError(f"{template.where}: slices of a model within a model cannot be made")
        taken = [layer for part in parts for layer in range(*(part.sources[0].layer_range))]
        for key, value in config.items():
            if key in LAYER_COUNTS and value == old:
                config[key] = len(taken)
            elif isinstance(value, list) and len(value) == old:  # one entry a layer
                config[key] = [value[layer] for layer in taken]
    if any(job.name == "lm_head.weight" for job in jobs):
        config["tie_word_embeddings"] = False
    return config
