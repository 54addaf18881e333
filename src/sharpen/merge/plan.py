"""Recipe + model folders → the tensors to make, after everything that can be checked was checked.

Nothing is written here. A wrong model, shape, name or parameter is an error before any work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpen.merge.adapters import open_reference
from sharpen.merge.arrays import WORKING, is_float
from sharpen.merge.checkpoint import Model, Spec
from sharpen.merge.method import METHODS, Method, Parameter
from sharpen.merge.recipe import LayerSource, MergeConfig, Slice, check_recipe, value_of
from sharpen.merge.vocabulary import Vocabulary, align, tokenizer_notes
from sharpen.types import Json, SharpenError

LAYER = re.compile(r"(.*?\.)?(\d+)(\..+)")
EMBEDDINGS = re.compile(r"(embed_tokens|wte|wpe|word_embeddings|embed_in|embeddings?)\b")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True)
class Job:
    """One tensor to make: the same place in every input, the base first if there is one."""

    name: str
    inputs: tuple[tuple[Model, str], ...]
    method: Method
    values: Mapping[str, Any]
    work: str  # the dtype that steps are rounded to
    made: Spec

    @property
    def size(self) -> int:
        return self.made.rows * self.made.columns


@dataclass(frozen=True)
class Plan:
    jobs: tuple[Job, ...]
    config: Json
    donor: Path  # whose tokenizer and other small files are copied
    vocabulary: Vocabulary | None
    chat_template: str
    notes: tuple[str, ...]  # differences that do not prevent the merge

    @property
    def nbytes(self) -> int:
        return sum(job.made.nbytes for job in self.jobs)


@dataclass(frozen=True)
class Part:
    """A slice with its models opened and put in order."""

    recipe: MergeConfig
    slice: Slice
    sources: tuple[LayerSource, ...]
    models: tuple[Model, ...]
    prefixes: tuple[str, ...]  # of each model's layers
    based: bool

    @property
    def size(self) -> int:
        return self.sources[0].layer_range[1] - self.sources[0].layer_range[0]


def build_plan(recipe: MergeConfig) -> Plan:
    check_recipe(recipe)
    models = {name: open_reference(name, recipe.base_model) for name in recipe.references}
    check_architectures(models)
    notes = tokenizer_notes(models)
    source = recipe.tokenizer.source if recipe.tokenizer else recipe.tokenizer_source
    vocabulary = None
    if source:
        pad = recipe.tokenizer.pad_to_multiple_of if recipe.tokenizer else None
        models, vocabulary = align(models, recipe.base_model, source, pad)
    parts = [part_of(recipe, piece, models) for piece in slices_of(recipe, models)]
    jobs = tuple(jobs_of(parts))
    template = models[recipe.references[0]]
    config = output_config(template, parts, vocabulary)
    if any(job.name == "lm_head.weight" for job in jobs):
        config["tie_word_embeddings"] = False
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


def check_architectures(models: Mapping[str, Model]) -> None:
    first, *others = models.values()
    for key in ("architectures", "model_type"):
        for other in others:
            if other.config.get(key) != first.config.get(key):
                raise SharpenError(
                    f"{key} differ: {first.where} has {first.config.get(key)}, "
                    f"{other.where} has {other.config.get(key)}"
                )


def slices_of(recipe: MergeConfig, models: Mapping[str, Model]) -> list[Slice]:
    """The recipe's slices, or all layers of all its models as one."""
    if recipe.slices:
        return recipe.slices
    entries = [(entry.model, entry.parameters) for entry in recipe.models]
    if recipe.base_model and recipe.base_model not in dict(entries):
        entries.append((recipe.base_model, {}))
    sources = [
        LayerSource(model=name, parameters=settings, layer_range=(0, layer_count(models[name])))
        for name, settings in entries
    ]
    return [Slice(sources=sources)]


def part_of(recipe: MergeConfig, piece: Slice, models: Mapping[str, Model]) -> Part:
    """A slice whose models suit the method, the base first."""
    method, base = METHODS[recipe.merge_method], piece.base_model or recipe.base_model
    names = [source.model for source in piece.sources]
    check_inputs(method, names, base)
    based = method.base != "ignored" and base in names
    order = sorted(piece.sources, key=lambda source: based and source.model != base)
    opened = tuple(models[source.model] for source in order)
    prefixes = tuple(layer_prefix(model) for model in opened)
    for source, model in zip(order, opened, strict=True):
        low, high = source.layer_range
        if not 0 <= low < high <= layer_count(model):
            raise SharpenError(
                f"layer_range [{low}, {high}] of {source.model}: it has layers 0 to "
                f"{layer_count(model)}"
            )
    sizes = {source.model: source.layer_range[1] - source.layer_range[0] for source in order}
    if len(set(sizes.values())) > 1:
        counted = ", ".join(f"{model} has {size}" for model, size in sizes.items())
        raise SharpenError(f"the merged models differ in their number of layers: {counted}")
    return Part(recipe, piece, tuple(order), opened, prefixes, based)


def check_inputs(method: Method, names: Sequence[str], base: str | None) -> None:
    shown = ", ".join(names)
    for name in names:
        if names.count(name) > 1:
            raise SharpenError(f"{name}: is named twice in one merge")
    if method.base == "required" and base not in names:
        among = f" among the merged ones ({shown})" if base else ""
        raise SharpenError(f"{method.name} needs a base_model{among}")
    least, most = method.least, method.most or len(names)
    if not least <= len(names) <= most:
        bound = f"at most {most}" if len(names) > most else f"at least {least}"
        wanted = f"exactly {least}" if least == method.most else bound
        raise SharpenError(
            f"{method.name} merges {wanted} models, base included; found {len(names)}: {shown}"
        )


def jobs_of(parts: Sequence[Part]) -> Iterable[Job]:
    """Embeddings from the first slice, then all layers, then the rest from the last slice."""
    first, last = parts[0], parts[-1]
    for name in outer_names(first):
        if EMBEDDINGS.search(name):
            yield job_of(first, name, [name] * len(first.models), 0.0)
    made = 0
    for part in parts:
        for step in range(part.size):
            places = [
                f"{prefix}{source.layer_range[0] + step}"
                for prefix, source in zip(part.prefixes, part.sources, strict=True)
            ]
            depth = step / (part.size - 1) if part.size > 1 else 1.0
            for tail in layer_tails(part.models, places):
                name = f"{part.prefixes[0]}{made}{tail}"
                yield job_of(part, name, [place + tail for place in places], depth)
            made += 1
    for name in outer_names(last):
        if not EMBEDDINGS.search(name):
            yield job_of(last, name, [name] * len(last.models), 0.0)


def job_of(part: Part, name: str, names: Sequence[str], depth: float) -> Job:
    inputs = []
    for model, own in zip(part.models, names, strict=True):
        stored = stored_name(model, own)
        if stored is None:
            having = next(m for m, n in zip(part.models, names, strict=True) if n in m.tensors)
            raise SharpenError(f"{model.where}: has no tensor {name}, which {having.where} has")
        inputs.append((model, stored))
    specs = [model.tensors[stored] for model, stored in inputs]
    check_shapes(name, part.models, specs)
    if not is_float(specs[0].dtype):
        copy = METHODS["passthrough"]
        return Job(name, (inputs[0],), copy, {"scale": [None]}, specs[0].dtype, specs[0])
    recipe, method = part.recipe, METHODS[part.recipe.merge_method]
    work = recipe.dtype or common_dtype(specs, name)
    values = {p.name: setting(part, p, names, depth, name) for p in method.parameters.values()}
    made = Spec(recipe.out_dtype or work, specs[0].shape)
    return Job(name, tuple(inputs), method, values, work, made)


def setting(
    part: Part, parameter: Parameter, names: Sequence[str], depth: float, tensor: str
) -> Any:
    """A parameter for one tensor; settings of a model stand above those of its slice, these above
    the recipe's. `names` are the tensor's names in the inputs."""
    shared = [part.slice.parameters, part.recipe.parameters]
    if parameter.scope == "shared":
        return value_of(parameter, shared, tensor, depth)
    pairs = list(zip(part.sources, names, strict=True))
    pairs = pairs[1:] if part.based and parameter.scope == "tuned" else pairs
    return [value_of(parameter, [source.parameters, *shared], n, depth) for source, n in pairs]


def common_dtype(specs: Sequence[Spec], name: str) -> str:
    """The narrowest dtype that holds what all inputs hold."""
    found = {spec.dtype for spec in specs}
    if not found <= set(WORKING):
        shown = " and ".join(sorted(found))
        raise SharpenError(f"{name}: cannot compute in {shown}; set dtype: bfloat16")
    return "float32" if found == {"bfloat16", "float16"} else max(found, key=WORKING.index)


def check_shapes(name: str, models: Sequence[Model], specs: Sequence[Spec]) -> None:
    if len({spec.shape for spec in specs}) > 1:
        head = EMBEDDINGS.search(name) or name.endswith("lm_head.weight")
        advice = "; vocabularies differ: set tokenizer_source: union (or base, or a model)"
        pairs = zip(models, specs, strict=True)
        shown = ", ".join(f"{model.where} {list(spec.shape)}" for model, spec in pairs)
        raise SharpenError(f"{name}: shapes differ: {shown}{advice if head else ''}")


def layer_count(model: Model) -> int:
    inner = model.config.get("text_config")
    for config in (model.config, inner if isinstance(inner, dict) else {}):
        for key in LAYER_COUNTS:
            if isinstance(config.get(key), int):
                return config[key]
    raise SharpenError(f"{model.where}: config.json does not say how many layers there are")


def layer_prefix(model: Model) -> str:
    """What stands before a layer's number in the names of tensors."""
    numbers: dict[str, set[int]] = {}
    for name in model.tensors:
        if match := LAYER.fullmatch(name):
            numbers.setdefault(match[1] or "", set()).add(int(match[2]))
    sizes = {prefix: len(seen) for prefix, seen in numbers.items()}
    count = layer_count(model)
    if count not in sizes.values():
        raise SharpenError(
            f"{model.where}: config.json says {count} layers, the weights have {sizes or 'none'}"
        )
    return next(prefix for prefix, size in sizes.items() if size == count)


def outer_names(part: Part) -> list[str]:
    """Names of the tensors that stand in no layer, of any of the models."""
    found: dict[str, None] = {}
    for model, prefix in zip(part.models, part.prefixes, strict=True):
        for name in model.tensors:
            match = LAYER.fullmatch(name)
            if match is None or (match[1] or "") != prefix:
                found[name] = None
    return list(found)


def layer_tails(models: Sequence[Model], places: Sequence[str]) -> list[str]:
    """What follows a layer's number, of any of the models."""
    found: dict[str, None] = {}
    for model, place in zip(models, places, strict=True):
        tails = [name.removeprefix(place) for name in model.tensors if name.startswith(place + ".")]
        found |= dict.fromkeys(tails)
    return list(found)


def stored_name(model: Model, name: str) -> str | None:
    """Where a model keeps a tensor: a head that is tied to the embedding is that embedding."""
    if name in model.tensors:
        return name
    tied = [n for n in model.tensors if re.search(r"(embed_tokens|wte)\.weight$", n)]
    return tied[0] if tied and name.endswith("lm_head.weight") else None


def output_config(template: Model, parts: Sequence[Part], vocabulary: Vocabulary | None) -> Json:
    """The base's config.json with what the merge changes."""
    config, recipe = dict(template.config), parts[0].recipe
    if dtype := recipe.out_dtype or recipe.dtype:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    if vocabulary:
        config["vocab_size"] = vocabulary.size
    if not recipe.slices:
        return config
    old = layer_count(template)
    if old not in [config.get(key) for key in LAYER_COUNTS]:
        raise SharpenError(f"{template.where}: slices of a model within a model cannot be made")
    taken = [layer for part in parts for layer in range(*part.sources[0].layer_range)]
    for key, value in config.items():
        if key in LAYER_COUNTS and value == old:
            config[key] = len(taken)
        elif isinstance(value, list) and len(value) == old:  # one entry a layer
            config[key] = [value[layer] for layer in taken]
    return config
