"""References to models in recipes, LoRA adapters laid over a model, and adapters merged with SVD.

A reference is a model folder, `model+adapter`, `model+vector.safetensors`, or an adapter folder,
whose base model is the one that it names or the recipe's. Called by `plan`, `sharpen merge
adapters` and `sharpen merge vector`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sharpen.merge import require
from sharpen.merge.checkpoint import Model, open_files, open_model
from sharpen.merge.tiles import round_in_place
from sharpen.merge.vectors import apply_vector_file
from sharpen.records import atomic_folder, read_json, write_json
from sharpen.types import Json

_CONFIG_FILE = "adapter_config.json"
_WEIGHTS_FILE = "adapter_model.safetensors"


def open_reference(reference: str, base: str | None = None) -> Model:
    """Open the model that a reference names, with an adapter or task vector laid over it.

    `base` is the base model of an adapter folder whose own base is not a folder here.
    """
    if not Path(reference).exists() and "+" in reference:
        model, layer = reference.split("+", 1)
    elif (Path(reference) / _CONFIG_FILE).exists():
        model = _find_base_of_adapter(reference, base)
        layer = reference
    else:
        model = reference
        layer = ""
    if not layer:
        return open_model(model)
    if layer.endswith(".safetensors"):
        return apply_vector_file(open_model(model), Path(layer))
    return _apply_adapter(open_model(model), Path(layer))


def _find_base_of_adapter(reference: str, base: str | None) -> str:
    """Returns the base model that the adapter names, or else `base`, whichever is a folder."""
    named = read_json(Path(reference) / _CONFIG_FILE).get("base_model_name_or_path")
    folders = [name for name in (named, base) if name and Path(name).is_dir()]
    require(folders, f"{reference}: its base model {named!r} is not a folder here")
    return folders[0]


@dataclass(frozen=True)
class _LowRank:
    """up @ down, to be added to a weight; `magnitude` gives its rows their length (DoRA)."""

    up: np.ndarray  # [rows, rank]
    down: np.ndarray  # [rank, columns]
    magnitude: np.ndarray | None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight."""
        return self.up.shape[0], self.down.shape[1]


@dataclass(frozen=True)
class _Adapter:
    """A PEFT LoRA adapter folder."""

    stored: Model
    updates: Mapping[str, _LowRank]  # by module
    replaced: Mapping[str, str]  # tensor of the model → tensor of the adapter


def _open_adapter(folder: Path) -> _Adapter:
    """Open an adapter folder and read its low-rank updates."""
    for file in (_CONFIG_FILE, _WEIGHTS_FILE):
        exists = (folder / file).exists()
        require(exists, f"{folder}: has no {file}, so it is not an adapter folder")
    config = read_json(folder / _CONFIG_FILE)
    kind = config.get("peft_type")
    require(kind == "LORA", f"{folder}: {kind} is not a LoRA adapter")
    stored = open_files(folder, [folder / _WEIGHTS_FILE], config)
    stored_names: dict[str, str] = {}  # without PEFT's prefix → as stored
    for stored_name in stored.tensors:
        stored_names[stored_name.removeprefix("base_model.model.")] = stored_name
    updates: dict[str, _LowRank] = {}
    replaced: dict[str, str] = {}
    for name, stored_name in stored_names.items():
        if ".lora_" not in name:
            replaced[name.replace(".base_layer.", ".")] = stored_name
        elif ".lora_A." in name or ".lora_embedding_A" in name:
            module = name.split(".lora_")[0]
            updates[module] = _read_update(stored, module, name, stored_names)
        else:
            known = "_B" in name or ".lora_magnitude_vector" in name
            require(known, f"{folder / _WEIGHTS_FILE}: cannot merge {name}")
    return _Adapter(stored, updates, replaced)


def _read_update(
    stored: Model, module: str, a_name: str, stored_names: Mapping[str, str]
) -> _LowRank:
    """Read a module's A and B, with the adapter's scale multiplied into B."""
    b_name = a_name.replace("lora_A", "lora_B")
    b_name = b_name.replace("lora_embedding_A", "lora_embedding_B")
    require(b_name in stored_names, f"{stored.where}: has {a_name} but not {b_name}")
    down = stored.whole(stored_names[a_name])
    up = stored.whole(stored_names[b_name])
    is_matrix = down.ndim == up.ndim == 2
    require(is_matrix, f"{stored.where}: {module}: only matrices can be merged")
    is_embedding = "lora_embedding_" in a_name
    transposed = is_embedding or bool(stored.config.get("fan_in_fan_out"))
    if transposed:
        stored_down = down
        down = up.T
        up = stored_down.T
    rank = min(down.shape[0], up.shape[1])
    scale = _scale_of(stored.config, module, rank)
    magnitude = None
    for name, stored_name in stored_names.items():
        if magnitude is None and name.startswith(f"{module}.lora_magnitude"):
            problem = f"{stored.where}: {module}: DoRA is merged on linear layers only"
            require(not transposed, problem)
            magnitude = stored.whole(stored_name).reshape(-1, 1)
    return _LowRank(up * scale, down, magnitude)


def _scale_of(config: Json, module: str, rank: int) -> float:
    """Returns what PEFT multiplies a module's update with."""
    alpha = config.get("lora_alpha", rank)
    for ending, module_alpha in (config.get("alpha_pattern") or {}).items():
        if f".{module}".endswith(f".{ending}"):
            alpha = module_alpha
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _apply_adapter(model: Model, folder: Path) -> Model:
    """Returns the model with an adapter merged into what is read."""
    adapter = _open_adapter(folder)
    updates = {f"{module}.weight": update for module, update in adapter.updates.items()}
    tensors = dict(model.tensors)
    for name in [*updates, *adapter.replaced]:
        require(name in tensors, f"{folder}: adapts {name}, which {model.where} lacks")
    for name, stored_name in adapter.replaced.items():
        shape = adapter.stored.tensors[stored_name].shape
        tensors[name] = replace(tensors[name], shape=shape)
    for name, update in updates.items():
        shapes = f"{list(update.shape)} does not fit {list(tensors[name].shape)}"
        require(tensors[name].shape == update.shape, f"{folder}: {name}: {shapes}")

    def read(name: str, start: int, stop: int) -> np.ndarray:
        if name in adapter.replaced:
            rows = adapter.stored.read(adapter.replaced[name], start, stop)
            return round_in_place(rows, tensors[name].dtype)
        rows = model.read(name, start, stop)
        update = updates.get(name)
        if update is None:
            return rows
        rows += update.up[start:stop] @ update.down
        if update.magnitude is not None:
            rows *= update.magnitude[start:stop] / np.linalg.norm(rows, axis=1, keepdims=True)
        return round_in_place(rows, tensors[name].dtype)

    return replace(model, where=f"{model.where}+{folder}", tensors=tensors, read=read)


def merge_adapters(
    folders: Sequence[str | Path], out: str | Path, rank: int, weights: list[float] | None = None
) -> Json:
    """Write the adapter of rank `rank` that is nearest to the weighted sum of several adapters.

    Each module is approximated by SVD in the space that its updates span. Without weights, the
    result approximates the mean. The report says how much of the sum's energy is kept.
    """
    adapters = [_open_adapter(Path(folder)) for folder in folders]
    count = len(adapters)
    shares = list(weights or [1 / count] * count)
    require(len(shares) == count, f"{len(shares)} weights for {count} adapters")
    require(rank >= 1, f"rank {rank}: must be at least 1")
    config = adapters[0].stored.config
    transposed = bool(config.get("fan_in_fan_out"))
    tensors: dict[str, np.ndarray] = {}
    energies = np.zeros(2)  # kept, and of the whole sum
    updates_of = _group_by_module(adapters, shares)
    for module, updates in updates_of.items():
        same_shape = len({update.shape for update, _ in updates}) == 1
        require(same_shape, f"{module} of {', '.join(map(str, folders))}: shapes differ")
        down, up, module_energies = _approximate_sum(updates, rank)
        energies += module_energies
        tensors |= _name_tensors(module, down, up, transposed)
    _write_adapter(Path(out), config, tensors, rank, sorted(updates_of))
    energy_kept = float(energies[0] / energies[1]) if energies[1] else 1.0
    return {"modules": len(updates_of), "rank": rank, "energy_kept": energy_kept}


def _group_by_module(
    adapters: Sequence[_Adapter], shares: Sequence[float]
) -> dict[str, list[tuple[_LowRank, float]]]:
    """Returns for each module the updates of all adapters with the adapters' weights."""
    updates_of: dict[str, list[tuple[_LowRank, float]]] = {}
    for adapter, share in zip(adapters, shares, strict=True):
        not_plain = list(adapter.replaced)
        for module, update in adapter.updates.items():
            if update.magnitude is not None:
                not_plain.append(module)
        where = adapter.stored.where
        problem = f"{where}: {not_plain[:1]}: only plain LoRA updates can be merged"
        require(not not_plain, problem)
        for module, update in adapter.updates.items():
            updates_of.setdefault(module, []).append((update, share))
    return updates_of


def _approximate_sum(
    updates: Sequence[tuple[_LowRank, float]], rank: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Approximate the weighted sum of updates by one of rank `rank`.

    Returns down [rank, columns], up [rows, rank], and two energies (sums of squared singular
    values): of the approximation and of the sum.
    """
    left, core_left = np.linalg.qr(np.hstack([update.up * share for update, share in updates]))
    right, core_right = np.linalg.qr(np.vstack([update.down for update, _ in updates]).T)
    u, s, v = np.linalg.svd(core_left @ core_right.T)
    root = np.sqrt(s[:rank])
    down = (v[:rank] * root[:, None]) @ right.T
    up = left @ (u[:, :rank] * root)
    missing = max(0, rank - len(root))  # every module has the same rank in PEFT: fill with zeros
    down = np.pad(down, ((0, missing), (0, 0)))
    up = np.pad(up, ((0, 0), (0, missing)))
    return down, up, np.array([(s[:rank] ** 2).sum(), (s**2).sum()])


def _name_tensors(
    module: str, down: np.ndarray, up: np.ndarray, transposed: bool
) -> dict[str, np.ndarray]:
    """Returns a module's A and B under the names, and in the orientation, that PEFT reads."""
    is_embedding = "embed" in module.rsplit(".", 1)[-1]
    a_matrix = down
    b_matrix = up
    if is_embedding or transposed:
        a_matrix = up.T
        b_matrix = down.T
    a_name = "lora_embedding_A" if is_embedding else "lora_A.weight"
    b_name = "lora_embedding_B" if is_embedding else "lora_B.weight"
    prefix = f"base_model.model.{module}"
    return {
        f"{prefix}.{a_name}": np.ascontiguousarray(a_matrix),
        f"{prefix}.{b_name}": np.ascontiguousarray(b_matrix),
    }


def _write_adapter(
    out: Path, config: Json, tensors: dict[str, np.ndarray], rank: int, modules: Sequence[str]
) -> None:
    """Write an adapter folder whose scale is 1: alpha equals the rank."""
    from safetensors.numpy import save_file

    config = config | {"r": rank, "lora_alpha": rank, "rank_pattern": {}, "alpha_pattern": {}}
    config |= {"target_modules": sorted({module.rsplit(".", 1)[-1] for module in modules})}
    config |= {"use_rslora": False}
    with atomic_folder(out) as folder:
        save_file(tensors, folder / _WEIGHTS_FILE, metadata={"format": "pt"})
        write_json(folder / _CONFIG_FILE, config)
