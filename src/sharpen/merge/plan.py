"""Recipe + model folders → the tensors to make. Nothing is written here: a wrong model, shape, name
or parameter is an error before any work."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpen.merge import require
from sharpen.merge.adapters import open_reference
from sharpen.merge.checkpoint import Model, Spec
from sharpen.merge.method import METHODS, Method, Parameter
from sharpen.merge.recipe import LayerSource, MergeConfig, Settings, Slice, check_recipe, value_of
from sharpen.merge.tiles import WORKING
from sharpen.merge.vocabulary import Vocabulary, align, tokenizer_notes
from sharpen.types import Json, SharpenError

LAYER = re.compile(r"(.*?\.)?(\d+)(\..+)")
EMBEDDINGS = re.compile(r"(embed_tokens|wte|wpe|word_embeddings|embed_in|embeddings?)\b")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True)
class Job:
    """One tensor to make: the same place in every input, the base first if there is one."""

    name: str
    inputs: Sequence[tuple[Model, str]]
    method: Method
    values: Mapping[str, Any]
    work: str  # the dtype that steps are rounded to
    made: Spec


@dataclass(frozen=True)
class Plan:
    jobs: list[Job]
    config: Json
    donor: Path  # whose tokenizer and other small files are copied
    vocabulary: Vocabulary | None
    chat_template: str
    notes: list[str]  # differences that do not prevent the merge


@dataclass(frozen=True)
class Source:
    """One model's layers in a slice."""

    model: Model
    layers: range
    prefix: str  # what stands before a layer's number in the names of tensors
    settings: Settings


@dataclass(frozen=True)
class Part:
    """A slice with its models opened and put in order, the base first."""

    recipe: MergeConfig
    sources: list[Source]
    based: bool
    settings: tuple[Settings, Settings]  # of the slice, of the recipe


def build_plan(recipe: MergeConfig) -> Plan:
    check_recipe(recipe)
    models = {name: open_reference(name, recipe.base_model) for name in recipe.references}
    for key in ("architectures", "model_type"):
        found = [(model.where, model.config.get(key)) for model in models.values()]
        shown = ", ".join(f"{where} has {value}" for where, value in found)
        require(all(value == found[0][1] for _, value in found), f"{key} differ: {shown}")
    notes, vocabulary = tokenizer_notes(models), None
    if source := recipe.tokenizer.source if recipe.tokenizer else recipe.tokenizer_source:
        pad = recipe.tokenizer.pad_to_multiple_of if recipe.tokenizer else None
        models, vocabulary = align(models, recipe.base_model, source, pad)
    parts = [part_of(recipe, piece, models) for piece in slices_of(recipe, models)]
    jobs = list(jobs_of(parts))
    template = models[recipe.references[0]]
    config = output_config(template, parts, vocabulary)
    if any(job.name == "lm_head.weight" for job in jobs):
        config["tie_word_embeddings"] = False
    text = chat_template(recipe.chat_template or "")
    return Plan(jobs, config, template.folder, vocabulary, text, notes)


def chat_template(wanted: str) -> str:
    """A template as text, from a `.jinja` file, or from a model folder."""
    if not wanted or "{" in wanted:
        return wanted
    for place in (Path(wanted), Path(wanted) / "chat_template.jinja"):
        if place.is_file():
            return place.read_text(encoding="utf-8")
    expected = "a template's text, a .jinja file, or a model folder that has one"
    raise SharpenError(f"chat_template {wanted!r}: expected {expected}")


def slices_of(recipe: MergeConfig, models: Mapping[str, Model]) -> list[Slice]:
    """The recipe's slices, or all layers of all its models as one."""
    entries = [(entry.model, entry.parameters) for entry in recipe.models]
    if recipe.base_model and recipe.base_model not in dict(entries):
        entries.append((recipe.base_model, {}))
    layers = {name: (0, layer_count(model)) for name, model in models.items()}
    whole = [LayerSource(model=n, parameters=s, layer_range=layers[n]) for n, s in entries]
    return recipe.slices or [Slice(sources=whole)]


def part_of(recipe: MergeConfig, piece: Slice, models: Mapping[str, Model]) -> Part:
    method, base = METHODS[recipe.merge_method], piece.base_model or recipe.base_model
    names = [source.model for source in piece.sources]
    check_inputs(method, names, base)
    based = method.base != "ignored" and base in names
    sources = []
    for entry in sorted(piece.sources, key=lambda source: based and source.model != base):
        model, (low, high) = models[entry.model], entry.layer_range
        prefix, count = layer_prefix(model), layer_count(model)
        fits = 0 <= low < high <= count
        require(fits, f"layer_range [{low}, {high}] of {entry.model}: it has layers 0 to {count}")
        sources.append(Source(model, range(low, high), prefix, entry.parameters))
    counted = ", ".join(f"{source.model.where} has {len(source.layers)}" for source in sources)
    same = len({len(source.layers) for source in sources}) == 1
    require(same, f"the merged models differ in their number of layers: {counted}")
    return Part(recipe, sources, based, (piece.parameters, recipe.parameters))


def check_inputs(method: Method, names: Sequence[str], base: str | None) -> None:
    shown, count = ", ".join(names), len(names)
    for name in names:
        require(names.count(name) == 1, f"{name}: is named twice in one merge")
    among = f" among the merged ones ({shown})" if base else ""
    wanted = method.base != "required" or base in names
    require(wanted, f"{method.name} needs a base_model{among}")
    least, most = method.least, method.most or count
    bound = f"at least {least}" if count < least else f"at most {most}"
    bound = f"exactly {least}" if least == method.most else bound
    found = f"{bound} models, base included; found {count}: {shown}"
    require(least <= count <= most, f"{method.name} merges {found}")


def jobs_of(parts: Sequence[Part]) -> Iterable[Job]:
    """All layers; of the rest, embeddings from the first slice, the others from the last."""
    made = 0
    for part in parts:
        count = len(part.sources[0].layers)
        for (layer, tail), names in sorted(places(part).items(), key=lambda place: place[0][0]):
            if layer >= 0:
                name = f"{part.sources[0].prefix}{made + layer}{tail}"
                yield job_of(part, name, names, layer / (count - 1) if count > 1 else 1.0)
            elif part is parts[0 if EMBEDDINGS.search(tail) else -1]:
                yield job_of(part, tail, names, 0.0)
        made += count


def places(part: Part) -> dict[tuple[int, str], dict[int, str]]:
    """Layer of the slice (or -1) and rest of the name → the tensor's name in each source."""
    found: dict[tuple[int, str], dict[int, str]] = {}
    for i, source in enumerate(part.sources):
        for name in source.model.tensors:
            match = LAYER.fullmatch(name)
            place = -1, name
            if match and (match[1] or "") == source.prefix:
                if int(match[2]) not in source.layers:
                    continue
                place = source.layers.index(int(match[2])), match[3]
            found.setdefault(place, {})[i] = name
    return found


def job_of(part: Part, name: str, names: Mapping[int, str], depth: float) -> Job:
    """`names` are the tensor's names in the sources that have it."""
    inputs = []
    for i, source in enumerate(part.sources):
        stored = names.get(i) or tied_head(source.model, name)
        if stored is None:
            where, having = source.model.where, part.sources[min(names)].model.where
            raise SharpenError(f"{where}: has no tensor {name}, which {having} has")
        inputs.append((source.model, stored))
    specs = [model.tensors[stored] for model, stored in inputs]
    shown = ", ".join(f"{model.where} {list(model.tensors[n].shape)}" for model, n in inputs)
    if EMBEDDINGS.search(name) or name.endswith("lm_head.weight"):
        shown += "; vocabularies differ: set tokenizer_source: union (or base, or a model)"
    require(len({spec.shape for spec in specs}) == 1, f"{name}: shapes differ: {shown}")
    first, recipe, method = specs[0], part.recipe, METHODS[part.recipe.merge_method]
    if "float" not in first.dtype:
        copy = METHODS["passthrough"]
        return Job(name, inputs[:1], copy, {"scale": [None]}, first.dtype, first)
    work = recipe.dtype or common_dtype(specs, name)
    own = [names.get(i, name) for i in range(len(inputs))]
    values = {p.name: setting(part, p, own, depth, name) for p in method.parameters.values()}
    return Job(name, inputs, method, values, work, Spec(recipe.out_dtype or work, first.shape))


def setting(part: Part, parameter: Parameter, names: list[str], depth: float, tensor: str) -> Any:
    """A parameter for one tensor: as its model says, else its slice, else the recipe."""
    if parameter.scope == "shared":
        return value_of(parameter, part.settings, tensor, depth)
    pairs = list(zip(part.sources, names, strict=True))
    pairs = pairs[1:] if part.based and parameter.scope == "tuned" else pairs
    return [value_of(parameter, (s.settings, *part.settings), n, depth) for s, n in pairs]


def common_dtype(specs: Sequence[Spec], name: str) -> str:
    """The narrowest dtype that holds what all inputs hold."""
    found = {spec.dtype for spec in specs}
    shown = " and ".join(sorted(found))
    require(found <= {*WORKING}, f"{name}: cannot compute in {shown}; set dtype: bfloat16")
    return "float32" if found == {"bfloat16", "float16"} else max(found, key=WORKING.index)


def layer_count(model: Model) -> int:
    for config in (model.config, model.config.get("text_config") or {}):
        for key in LAYER_COUNTS:
            if isinstance(config.get(key), int):
                return config[key]
    raise SharpenError(f"{model.where}: config.json does not say how many layers there are")


def layer_prefix(model: Model) -> str:
    numbers: dict[str, set[str]] = {}
    for match in filter(None, map(LAYER.fullmatch, model.tensors)):
        numbers.setdefault(match[1] or "", set()).add(match[2])
    count, sizes = layer_count(model), {prefix: len(seen) for prefix, seen in numbers.items()}
    found = [prefix for prefix, size in sizes.items() if size == count]
    shown = f"config.json says {count} layers, the weights have {sizes or 'none'}"
    require(found, f"{model.where}: {shown}")
    return found[0]


def tied_head(model: Model, name: str) -> str | None:
    """A head that a model does not store is its embedding."""
    tied = (n for n in model.tensors if re.search(r"(embed_tokens|wte)\.weight$", n))
    return next(tied, None) if name.endswith("lm_head.weight") else None


def output_config(template: Model, parts: Sequence[Part], vocabulary: Vocabulary | None) -> Json:
    """The base's config.json with what the merge changes."""
    config, recipe = dict(template.config), parts[0].recipe
    if dtype := recipe.out_dtype or recipe.dtype:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    if vocabulary:
        config["vocab_size"] = vocabulary.size
    old, taken = layer_count(template), [n for part in parts for n in part.sources[0].layers]
    own = not recipe.slices or old in [config.get(key) for key in LAYER_COUNTS]
    require(own, f"{template.where}: slices of a model within a model cannot be made")
    for key, value in config.items() if recipe.slices else ():
        if key in LAYER_COUNTS and value == old:
            config[key] = len(taken)
        elif isinstance(value, list) and len(value) == old:  # one entry a layer
            config[key] = [value[layer] for layer in taken]
    return config
