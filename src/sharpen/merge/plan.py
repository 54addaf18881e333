"""Turns a recipe and its model folders into the list of tensors to make.

Nothing is written here: a wrong model, shape, name or parameter is an error before any work.
Called by `stream`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpen.merge import require
from sharpen.merge.adapters import open_reference
from sharpen.merge.checkpoint import Model, TensorSpec
from sharpen.merge.method import METHODS, Method, Parameter
from sharpen.merge.recipe import (
    LayerSource,
    MergeConfig,
    Settings,
    Slice,
    check_recipe,
    find_value,
)
from sharpen.merge.tiles import WORKING_DTYPES
from sharpen.merge.vocabulary import Vocabulary, align, tokenizer_notes
from sharpen.types import Json, SharpenError

_LAYER_NAME = re.compile(r"(.*?\.)?(\d+)(\..+)")  # prefix, number of the layer, rest
_EMBEDDING_NAME = re.compile(r"(embed_tokens|wte|wpe|word_embeddings|embed_in|embeddings?)\b")
_LAYER_COUNT_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_NO_LAYER = -1  # instead of a layer's number, for embeddings, the head and the last norm


@dataclass(frozen=True)
class TensorJob:
    """One tensor to make: the same tensor of every input, the base first if there is one."""

    name: str
    inputs: Sequence[tuple[Model, str]]  # each model and its name for the tensor
    method: Method
    values: Mapping[str, Any]  # the method's parameters for this tensor
    dtype: str  # the working dtype, which steps are rounded to
    output: TensorSpec


@dataclass(frozen=True)
class Plan:
    """All that is needed to write the merged model."""

    jobs: list[TensorJob]
    config: Json
    donor: Path  # the model folder whose tokenizer and other small files are copied
    vocabulary: Vocabulary | None
    chat_template: str
    notes: list[str]  # differences that do not prevent the merge


@dataclass(frozen=True)
class _Source:
    """One model's layers in a slice."""

    model: Model
    layers: range
    prefix: str  # what stands before a layer's number in the names of tensors
    settings: Settings


@dataclass(frozen=True)
class _OpenSlice:
    """A slice with its models opened and put in order, the base first."""

    recipe: MergeConfig
    sources: list[_Source]
    has_base: bool
    settings: tuple[Settings, Settings]  # of the slice, of the recipe


def build_plan(recipe: MergeConfig) -> Plan:
    """Open and check everything that the recipe names, and list the tensors to make."""
    check_recipe(recipe)
    models = {name: open_reference(name, recipe.base_model) for name in recipe.references}
    _check_same_architecture(models)
    notes = tokenizer_notes(models)
    vocabulary = None
    tokenizer_source = recipe.tokenizer_source
    pad = None
    if recipe.tokenizer:
        tokenizer_source = recipe.tokenizer.source
        pad = recipe.tokenizer.pad_to_multiple_of
    if tokenizer_source:
        models, vocabulary = align(models, recipe.base_model, tokenizer_source, pad)
    slices = [_open_slice(recipe, part, models) for part in _slices_of(recipe, models)]
    jobs = list(_list_jobs(slices))
    template = models[recipe.references[0]]
    config = _output_config(template, slices, vocabulary)
    if any(job.name == "lm_head.weight" for job in jobs):
        config["tie_word_embeddings"] = False
    chat_template = _read_chat_template(recipe.chat_template or "")
    return Plan(jobs, config, template.folder, vocabulary, chat_template, notes)


def _check_same_architecture(models: Mapping[str, Model]) -> None:
    """Raise if the models' configs name different architectures."""
    for key in ("architectures", "model_type"):
        values = [model.config.get(key) for model in models.values()]
        shown = ", ".join(f"{model.where} has {model.config.get(key)}" for model in models.values())
        require(all(value == values[0] for value in values), f"{key} differ: {shown}")


def _read_chat_template(setting: str) -> str:
    """Returns a template that is given as text, as a `.jinja` file, or as a model folder."""
    if not setting or "{" in setting:
        return setting
    for place in (Path(setting), Path(setting) / "chat_template.jinja"):
        if place.is_file():
            return place.read_text(encoding="utf-8")
    expected = "a template's text, a .jinja file, or a model folder that has one"
    raise SharpenError(f"chat_template {setting!r}: expected {expected}")


def _slices_of(recipe: MergeConfig, models: Mapping[str, Model]) -> list[Slice]:
    """Returns the recipe's slices, or one slice with all layers of all its models."""
    settings_of = [(entry.model, entry.parameters) for entry in recipe.models]
    if recipe.base_model and recipe.base_model not in dict(settings_of):
        settings_of.append((recipe.base_model, {}))
    layers_of = {name: (0, _layer_count(model)) for name, model in models.items()}
    sources = []
    for name, settings in settings_of:
        source = LayerSource(model=name, parameters=settings, layer_range=layers_of[name])
        sources.append(source)
    return recipe.slices or [Slice(sources=sources)]


def _open_slice(recipe: MergeConfig, part: Slice, models: Mapping[str, Model]) -> _OpenSlice:
    """Check a slice's models and layers, and put the base first."""
    method = METHODS[recipe.merge_method]
    base = part.base_model or recipe.base_model
    names = [source.model for source in part.sources]
    _check_inputs(method, names, base)
    has_base = method.base != "ignored" and base in names
    entries = part.sources
    if has_base:
        entries = sorted(entries, key=lambda entry: entry.model != base)
    sources = []
    for entry in entries:
        model = models[entry.model]
        low, high = entry.layer_range
        prefix = _layer_prefix(model)
        count = _layer_count(model)
        fits = 0 <= low < high <= count
        require(fits, f"layer_range [{low}, {high}] of {entry.model}: it has layers 0 to {count}")
        sources.append(_Source(model, range(low, high), prefix, entry.parameters))
    counts = ", ".join(f"{source.model.where} has {len(source.layers)}" for source in sources)
    same = len({len(source.layers) for source in sources}) == 1
    require(same, f"the merged models differ in their number of layers: {counts}")
    return _OpenSlice(recipe, sources, has_base, (part.parameters, recipe.parameters))


def _check_inputs(method: Method, names: Sequence[str], base: str | None) -> None:
    """Raise if a model is named twice, the base is missing, or the number of models is wrong."""
    listed = ", ".join(names)
    count = len(names)
    for name in names:
        require(names.count(name) == 1, f"{name}: is named twice in one merge")
    among = f" among the merged ones ({listed})" if base else ""
    base_is_there = method.base != "required" or base in names
    require(base_is_there, f"{method.name} needs a base_model{among}")
    least = method.least
    most = method.most or count
    if least == method.most:
        bound = f"exactly {least}"
    elif count < least:
        bound = f"at least {least}"
    else:
        bound = f"at most {most}"
    expected = f"{bound} models, base included; found {count}: {listed}"
    require(least <= count <= most, f"{method.name} merges {expected}")


def _list_jobs(slices: Sequence[_OpenSlice]) -> Iterator[TensorJob]:
    """Yields the jobs of all layers, and of the tensors outside the layers.

    Of the latter, embeddings come from the first slice and all others from the last.
    """
    layers_before = 0  # in earlier slices
    for part in slices:
        count = len(part.sources[0].layers)
        by_layer = sorted(_tensors_by_place(part).items(), key=lambda item: item[0][0])
        for (layer, rest), names in by_layer:
            if layer != _NO_LAYER:
                name = f"{part.sources[0].prefix}{layers_before + layer}{rest}"
                depth = layer / (count - 1) if count > 1 else 1.0
                yield _plan_tensor(part, name, names, depth)
            else:
                from_slice = slices[0] if _EMBEDDING_NAME.search(rest) else slices[-1]
                if part is from_slice:
                    yield _plan_tensor(part, rest, names, 0.0)
        layers_before += count


def _tensors_by_place(part: _OpenSlice) -> dict[tuple[int, str], dict[int, str]]:
    """Returns for each place the tensor's name in each source that has it.

    A place is the layer's number in the slice (or `_NO_LAYER`) and the rest of the name.
    """
    names_at: dict[tuple[int, str], dict[int, str]] = {}
    for i, source in enumerate(part.sources):
        for name in source.model.tensors:
            place = (_NO_LAYER, name)
            match = _LAYER_NAME.fullmatch(name)
            if match and (match[1] or "") == source.prefix:
                layer = int(match[2])
                if layer not in source.layers:
                    continue
                place = (source.layers.index(layer), match[3])
            names_at.setdefault(place, {})[i] = name
    return names_at


def _plan_tensor(part: _OpenSlice, name: str, names: Mapping[int, str], depth: float) -> TensorJob:
    """Plan one tensor of the output. `names` are its names in the sources that have it."""
    inputs = _inputs_of_tensor(part, name, names)
    specs = [model.tensors[stored_name] for model, stored_name in inputs]
    _check_same_shape(name, inputs)
    first = specs[0]
    if "float" not in first.dtype:  # integers are copied from the first input
        method = METHODS["passthrough"]
        return TensorJob(name, inputs[:1], method, {"scale": [None]}, first.dtype, first)
    recipe = part.recipe
    dtype = recipe.dtype or _common_dtype(specs, name)
    # filters and messages use the name in each source, or the output's where a source lacks it
    source_names = [names.get(i, name) for i in range(len(inputs))]
    method = METHODS[recipe.merge_method]
    values = {}
    for parameter in method.parameters.values():
        values[parameter.name] = _value_for_tensor(part, parameter, source_names, depth, name)
    output = TensorSpec(recipe.out_dtype or dtype, first.shape)
    return TensorJob(name, inputs, method, values, dtype, output)


def _inputs_of_tensor(
    part: _OpenSlice, name: str, names: Mapping[int, str]
) -> list[tuple[Model, str]]:
    """Returns every source's model with its name for the tensor; raises if a source has none."""
    inputs = []
    for i, source in enumerate(part.sources):
        stored_name = names.get(i) or _find_tied_head(source.model, name)
        if stored_name is None:
            lacking = source.model.where
            having = part.sources[min(names)].model.where
            raise SharpenError(f"{lacking}: has no tensor {name}, which {having} has")
        inputs.append((source.model, stored_name))
    return inputs


def _check_same_shape(name: str, inputs: Sequence[tuple[Model, str]]) -> None:
    """Raise if a tensor's shape differs between the inputs."""
    shapes = set()
    shown = []
    for model, stored_name in inputs:
        shape = model.tensors[stored_name].shape
        shapes.add(shape)
        shown.append(f"{model.where} {list(shape)}")
    problem = f"{name}: shapes differ: {', '.join(shown)}"
    if _EMBEDDING_NAME.search(name) or name.endswith("lm_head.weight"):
        problem += "; vocabularies differ: set tokenizer_source: union (or base, or a model)"
    require(len(shapes) == 1, problem)


def _value_for_tensor(
    part: _OpenSlice, parameter: Parameter, source_names: list[str], depth: float, tensor: str
) -> Any:
    """Returns a parameter's value for one tensor: one value, or one per model.

    The model's own setting comes first, then the slice's, then the recipe's.
    """
    if parameter.scope == "shared":
        return find_value(parameter, part.settings, tensor, depth)
    pairs = list(zip(part.sources, source_names, strict=True))
    if part.has_base and parameter.scope == "tuned":
        pairs = pairs[1:]
    values = []
    for source, source_name in pairs:
        settings = (source.settings, *part.settings)
        values.append(find_value(parameter, settings, source_name, depth))
    return values


def _common_dtype(specs: Sequence[TensorSpec], name: str) -> str:
    """Returns the narrowest dtype that holds what all inputs hold."""
    dtypes = {spec.dtype for spec in specs}
    shown = " and ".join(sorted(dtypes))
    can_compute = dtypes <= {*WORKING_DTYPES}
    require(can_compute, f"{name}: cannot compute in {shown}; set dtype: bfloat16")
    if dtypes == {"bfloat16", "float16"}:  # neither holds the other
        return "float32"
    return max(dtypes, key=WORKING_DTYPES.index)


def _layer_count(model: Model) -> int:
    """Returns the number of layers that a model's config states."""
    for config in (model.config, model.config.get("text_config") or {}):
        for key in _LAYER_COUNT_KEYS:
            if isinstance(config.get(key), int):
                return config[key]
    raise SharpenError(f"{model.where}: config.json does not say how many layers there are")


def _layer_prefix(model: Model) -> str:
    """Returns what stands before a layer's number: the prefix with as many numbers as layers."""
    numbers: dict[str, set[str]] = {}
    for name in model.tensors:
        match = _LAYER_NAME.fullmatch(name)
        if match:
            numbers.setdefault(match[1] or "", set()).add(match[2])
    count = _layer_count(model)
    sizes = {prefix: len(layers) for prefix, layers in numbers.items()}
    prefixes = [prefix for prefix, size in sizes.items() if size == count]
    shown = f"config.json says {count} layers, the weights have {sizes or 'none'}"
    require(prefixes, f"{model.where}: {shown}")
    return prefixes[0]


def _find_tied_head(model: Model, name: str) -> str | None:
    """Returns the name of the embedding for a head that a model does not store."""
    if not name.endswith("lm_head.weight"):
        return None
    for stored_name in model.tensors:
        if re.search(r"(embed_tokens|wte)\.weight$", stored_name):
            return stored_name
    return None


def _output_config(
    template: Model, slices: Sequence[_OpenSlice], vocabulary: Vocabulary | None
) -> Json:
    """Returns the template's config.json with what the merge changes."""
    config = dict(template.config)
    recipe = slices[0].recipe
    dtype = recipe.out_dtype or recipe.dtype
    if dtype:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    if vocabulary:
        config["vocab_size"] = vocabulary.size
    if not recipe.slices:
        return config
    old_count = _layer_count(template)
    states_count = old_count in [config.get(key) for key in _LAYER_COUNT_KEYS]
    require(states_count, f"{template.where}: slices of a model within a model cannot be made")
    taken_layers: list[int] = []
    for part in slices:
        taken_layers += part.sources[0].layers
    for key, value in config.items():
        if key in _LAYER_COUNT_KEYS and value == old_count:
            config[key] = len(taken_layers)
        elif isinstance(value, list) and len(value) == old_count:  # one entry per layer
            config[key] = [value[layer] for layer in taken_layers]
    return config
