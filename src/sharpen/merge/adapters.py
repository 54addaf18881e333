"""What can be laid over a model while it is read (a LoRA adapter or a task vector), and adapters
merged with each other. A reference in a recipe is a model folder, `model+adapter`,
`model+vector.safetensors`, or an adapter folder, whose base is the one it names or the recipe's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sharpen.merge import require
from sharpen.merge.checkpoint import Model, open_files, open_model
from sharpen.merge.tiles import rounded
from sharpen.merge.vectors import shifted
from sharpen.records import atomic_folder, read_json, write_json
from sharpen.types import Json

ADAPTER_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def open_reference(text: str, base: str | None = None) -> Model:
    model, layer = text, ""
    if not Path(text).exists() and "+" in text:
        model, layer = text.split("+", 1)
    elif (Path(text) / ADAPTER_CONFIG).exists():
        named = read_json(Path(text) / ADAPTER_CONFIG).get("base_model_name_or_path")
        found = [name for name in (named, base) if name and Path(name).is_dir()]
        require(found, f"{text}: its base model {named!r} is not a folder here")
        model, layer = found[0], text
    if not layer:
        return open_model(model)
    over = shifted if layer.endswith(".safetensors") else adapted
    return over(open_model(model), Path(layer))


@dataclass(frozen=True)
class LowRank:
    """up @ down, to be added to a weight; `magnitude` gives its rows their length (DoRA)."""

    up: np.ndarray  # [rows, rank]
    down: np.ndarray  # [rank, columns]
    magnitude: np.ndarray | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.up.shape[0], self.down.shape[1]


@dataclass(frozen=True)
class Adapter:
    """A PEFT LoRA adapter folder."""

    stored: Model
    updates: Mapping[str, LowRank]  # of modules
    replaced: Mapping[str, str]  # tensor of the model → tensor of the adapter


def open_adapter(folder: Path) -> Adapter:
    for file in (ADAPTER_CONFIG, WEIGHTS):
        found = (folder / file).exists()
        require(found, f"{folder}: has no {file}, so it is not an adapter folder")
    config = read_json(folder / ADAPTER_CONFIG)
    kind = config.get("peft_type")
    require(kind == "LORA", f"{folder}: {kind} is not a LoRA adapter")
    stored = open_files(folder, [folder / WEIGHTS], config)
    updates, replaced = dict[str, LowRank](), dict[str, str]()
    names = {n.removeprefix("base_model.model."): n for n in stored.tensors}
    for name, key in names.items():
        if ".lora_" not in name:
            replaced[name.replace(".base_layer.", ".")] = key
        elif ".lora_A." in name or ".lora_embedding_A" in name:
            updates[name.split(".lora_")[0]] = update_of(stored, name, names)
        else:
            known = "_B" in name or ".lora_magnitude_vector" in name
            require(known, f"{folder / WEIGHTS}: cannot merge {name}")
    return Adapter(stored, updates, replaced)


def update_of(stored: Model, name: str, names: Mapping[str, str]) -> LowRank:
    module, config = name.split(".lora_")[0], stored.config
    partner = name.replace("lora_A", "lora_B").replace("lora_embedding_A", "lora_embedding_B")
    require(partner in names, f"{stored.where}: has {name} but not {partner}")
    down, up = stored.whole(names[name]), stored.whole(names[partner])
    require(down.ndim == up.ndim == 2, f"{stored.where}: {module}: only matrices can be merged")
    turned = "lora_embedding_" in name or bool(config.get("fan_in_fan_out"))
    if turned:
        down, up = up.T, down.T
    rank = min(down.shape[0], up.shape[1])
    alphas = config.get("alpha_pattern") or {}  # by what a module's name ends with
    found = [alpha for end, alpha in alphas.items() if f".{module}".endswith(f".{end}")]
    alpha = found[0] if found else config.get("lora_alpha", rank)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    lengths = [k for n, k in names.items() if n.startswith(f"{module}.lora_magnitude")]
    plain = not (lengths and turned)
    require(plain, f"{stored.where}: {module}: DoRA is merged on linear layers only")
    return LowRank(up * scale, down, stored.whole(lengths[0]).reshape(-1, 1) if lengths else None)


def adapted(model: Model, folder: Path) -> Model:
    """A model with an adapter merged into what is read."""
    adapter = open_adapter(folder)
    updates = {f"{module}.weight": update for module, update in adapter.updates.items()}
    tensors = dict(model.tensors)
    for name in [*updates, *adapter.replaced]:
        require(name in tensors, f"{folder}: adapts {name}, which {model.where} lacks")
    for name, key in adapter.replaced.items():
        tensors[name] = replace(tensors[name], shape=adapter.stored.tensors[key].shape)
    for name, update in updates.items():
        shapes = f"{list(update.shape)} does not fit {list(tensors[name].shape)}"
        require(tensors[name].shape == update.shape, f"{folder}: {name}: {shapes}")

    def read(name: str, start: int, stop: int) -> np.ndarray:
        if name in adapter.replaced:
            found = adapter.stored.read(adapter.replaced[name], start, stop)
            return rounded(found, tensors[name].dtype)
        found, update = model.read(name, start, stop), updates.get(name)
        if update is None:
            return found
        found += update.up[start:stop] @ update.down
        if update.magnitude is not None:
            found *= update.magnitude[start:stop] / np.linalg.norm(found, axis=1, keepdims=True)
        return rounded(found, tensors[name].dtype)

    return replace(model, where=f"{model.where}+{folder}", tensors=tensors, read=read)


def merge_adapters(
    folders: Sequence[str | Path], out: str | Path, rank: int, weights: list[float] | None = None
) -> Json:
    """The adapter of a rank that is nearest to the weighted sum of several, module by module, by
    SVD in the space that they span. Returns how much of the sum's energy it keeps."""
    from safetensors.numpy import save_file

    adapters = [open_adapter(Path(folder)) for folder in folders]
    count, config = len(adapters), adapters[0].stored.config
    shares = list(weights or [1 / count] * count)
    require(len(shares) == count, f"{len(shares)} weights for {count} adapters")
    require(rank >= 1, f"rank {rank}: must be at least 1")
    parts: dict[str, list[tuple[LowRank, float]]] = {}
    for adapter, share in zip(adapters, shares, strict=True):
        odd = [m for m, update in adapter.updates.items() if update.magnitude is not None]
        odd, where = [*adapter.replaced, *odd], adapter.stored.where
        require(not odd, f"{where}: {odd[:1]}: only plain LoRA updates can be merged")
        for module, update in adapter.updates.items():
            parts.setdefault(module, []).append((update, share))
    tensors, energy = dict[str, np.ndarray](), np.zeros(2)
    for module, updates in parts.items():
        same = len({update.shape for update, _ in updates}) == 1
        require(same, f"{module} of {', '.join(map(str, folders))}: shapes differ")
        down, up, energies = nearest(updates, rank)
        energy += energies
        embedding = "embed" in module.rsplit(".", 1)[-1]
        if embedding or config.get("fan_in_fan_out"):
            down, up = up.T, down.T
        for side, tensor in (("A", down), ("B", up)):
            name = f"lora_embedding_{side}" if embedding else f"lora_{side}.weight"
            tensors[f"base_model.model.{module}.{name}"] = np.ascontiguousarray(tensor)
    config = config | {"r": rank, "lora_alpha": rank, "rank_pattern": {}, "alpha_pattern": {}}
    config |= {"target_modules": sorted({module.rsplit(".", 1)[-1] for module in parts})}
    config |= {"use_rslora": False}
    with atomic_folder(out) as folder:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        write_json(folder / ADAPTER_CONFIG, config)
    kept = float(energy[0] / energy[1]) if energy[1] else 1.0
    return {"modules": len(parts), "rank": rank, "energy_kept": kept}


def nearest(parts: Sequence[tuple[LowRank, float]], rank: int) -> tuple[np.ndarray, ...]:
    """down [rank, columns], up [rows, rank] of the best approximation; its energy and the sum's."""
    left, core_left = np.linalg.qr(np.hstack([update.up * share for update, share in parts]))
    right, core_right = np.linalg.qr(np.vstack([update.down for update, _ in parts]).T)
    u, s, v = np.linalg.svd(core_left @ core_right.T)
    root = np.sqrt(s[:rank])
    down, up = (v[:rank] * root[:, None]) @ right.T, left @ (u[:, :rank] * root)
    short = max(0, rank - len(root))  # every module has the same rank in PEFT: fill with zeros
    down, up = np.pad(down, ((0, short), (0, 0))), np.pad(up, ((0, 0), (0, short)))
    return down, up, np.array([(s[:rank] ** 2).sum(), (s**2).sum()])
