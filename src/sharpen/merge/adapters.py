"""What can be laid over a model while it is read: a LoRA adapter or a task vector; and adapters
merged with each other.

A reference in a recipe is a model folder, `model+adapter`, `model+vector.safetensors`, or an
adapter folder alone, whose base is the one it names or the recipe's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from sharpen.merge.checkpoint import Safetensors, Weights, open_model
from sharpen.merge.vectors import Shifted
from sharpen.records import atomic_folder, read_json, write_json
from sharpen.types import Json, SharpenError

ADAPTER_CONFIG = "adapter_config.json"


def open_reference(text: str, base: str | None = None) -> Weights:
    if Path(text).exists() or "+" not in text:
        if not (Path(text) / ADAPTER_CONFIG).exists():
            return open_model(text)
        named = read_json(Path(text) / ADAPTER_CONFIG).get("base_model_name_or_path")
        model = next((n for n in (named, base) if n and Path(n).is_dir()), None)
        if model is None:
            raise SharpenError(f"{text}: its base model {named!r} is not a folder here")
        return layered(open_model(model), Path(text))
    model, layer = text.split("+", 1)
    return layered(open_model(model), Path(layer))


def layered(model: Weights, layer: Path) -> Weights:
    if layer.suffix == ".safetensors":
        return Shifted(model, layer)
    return Adapted(model, Adapter(layer))


@dataclass(frozen=True)
class LowRank:
    """up @ down, to be added to a weight; `magnitude` gives its rows their length (DoRA)."""

    up: Tensor  # [rows, rank]
    down: Tensor  # [rank, columns]
    magnitude: Tensor | None = None


class Adapter:
    """A PEFT LoRA adapter folder: module → low-rank update, and whole tensors that it replaces."""

    def __init__(self, folder: Path):
        if not (folder / ADAPTER_CONFIG).exists():
            raise SharpenError(f"{folder}: has no {ADAPTER_CONFIG}, so it is not an adapter folder")
        self.folder, self.config = folder, read_json(folder / ADAPTER_CONFIG)
        if self.config.get("peft_type") != "LORA":
            raise SharpenError(f"{folder}: {self.config.get('peft_type')} is not a LoRA adapter")
        file = folder / "adapter_model.safetensors"
        if not file.exists():
            raise SharpenError(f"{folder}: has no adapter_model.safetensors")
        self.stored = Safetensors(folder, [file], self.config)
        self.updates: dict[str, LowRank] = {}
        self.replaced: dict[str, str] = {}  # tensor of the model → tensor of the adapter
        names = {n.removeprefix("base_model.model."): n for n in self.stored.tensors}
        for name, key in names.items():
            if ".lora_" not in name:
                self.replaced[name.replace(".base_layer.", ".")] = key
            elif ".lora_A." in name or ".lora_embedding_A" in name:
                self.updates[name.split(".lora_")[0]] = self.update(name, names)
            elif not any(part in name for part in (".lora_B.", "_B", ".lora_magnitude_vector")):
                raise SharpenError(f"{file}: cannot merge {name}")

    def read(self, key: str) -> Tensor:
        spec = self.stored.tensors[key]
        return self.stored.rows(key, 0, spec.rows).reshape(spec.shape).float()

    def update(self, name: str, names: Mapping[str, str]) -> LowRank:
        module = name.split(".lora_")[0]
        partner = name.replace("lora_A", "lora_B").replace("lora_embedding_A", "lora_embedding_B")
        if partner not in names:
            raise SharpenError(f"{self.folder}: has {name} but not {partner}")
        down, up = self.read(names[name]), self.read(names[partner])
        if down.dim() != 2 or up.dim() != 2:
            raise SharpenError(f"{self.folder}: {module}: only matrices can be merged")
        turned = "lora_embedding_" in name or bool(self.config.get("fan_in_fan_out"))
        if turned:
            down, up = up.T, down.T
        rank = min(down.shape[0], up.shape[1])
        alpha = pattern(
            self.config.get("alpha_pattern"), module, self.config.get("lora_alpha", rank)
        )
        scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        vector = next(
            (k for n, k in names.items() if n.startswith(f"{module}.lora_magnitude")), None
        )
        if vector and turned:
            raise SharpenError(f"{self.folder}: {module}: DoRA is merged on linear layers only")
        magnitude = self.read(vector).reshape(-1, 1) if vector else None
        return LowRank((up * scale).contiguous(), down.contiguous(), magnitude)


def pattern(table: Any, module: str, default: float) -> float:
    """The value of the entry that a module's name ends with, as PEFT looks it up."""
    for key, value in (table or {}).items():
        if module == key or module.endswith("." + key):
            return value
    return default


class Adapted:
    """A model with an adapter merged into what is read."""

    def __init__(self, model: Weights, adapter: Adapter):
        self.where, self.folder = f"{model.where}+{adapter.folder}", model.folder
        self.config, self.model, self.adapter = model.config, model, adapter
        for name in [*(f"{m}.weight" for m in adapter.updates), *adapter.replaced]:
            if name not in model.tensors:
                raise SharpenError(f"{adapter.folder}: adapts {name}, which {model.where} lacks")
        self.tensors = dict(model.tensors)
        for name, key in adapter.replaced.items():
            shape = adapter.stored.tensors[key].shape
            self.tensors[name] = replace(model.tensors[name], shape=shape)
        for module, update in adapter.updates.items():
            shape = model.tensors[f"{module}.weight"].shape
            if shape != (update.up.shape[0], update.down.shape[1]):
                raise SharpenError(
                    f"{adapter.folder}: {module}: {update.up.shape[0]} x {update.down.shape[1]} "
                    f"does not fit the model's {list(shape)}"
                )

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        if name in self.adapter.replaced:
            key = self.adapter.replaced[name]
            return self.adapter.stored.rows(key, start, stop).to(self.tensors[name].dtype)
        found = self.model.rows(name, start, stop)
        update = self.adapter.updates.get(name.removesuffix(".weight"))
        if update is None or not name.endswith(".weight"):
            return found
        result = torch.addmm(found.float(), update.up[start:stop], update.down)
        if update.magnitude is not None:
            result *= update.magnitude[start:stop] / result.norm(dim=1, keepdim=True)
        return result.to(found.dtype)


def merge_adapters(
    folders: Sequence[str | Path],
    out: str | Path,
    rank: int,
    weights: Sequence[float] | None = None,
) -> Json:
    """The adapter of rank `rank` nearest to the weighted sum of several, module by module (by SVD
    in the space that they span). Returns how much of the sum's energy it keeps."""
    adapters = [Adapter(Path(folder)) for folder in folders]
    shares = list(weights or [1 / len(adapters)] * len(adapters))
    if len(shares) != len(adapters):
        raise SharpenError(f"{len(shares)} weights for {len(adapters)} adapters")
    if rank < 1:
        raise SharpenError(f"rank {rank}: must be at least 1")
    for adapter in adapters:
        odd = [
            *adapter.replaced,
            *(m for m, u in adapter.updates.items() if u.magnitude is not None),
        ]
        if odd:
            raise SharpenError(f"{adapter.folder}: {odd[0]}: only plain LoRA updates can be merged")
    tensors: dict[str, Tensor] = {}
    kept = whole = 0.0
    for module in dict.fromkeys(m for adapter in adapters for m in adapter.updates):
        parts = [
            (a.updates[module], w)
            for a, w in zip(adapters, shares, strict=True)
            if module in a.updates
        ]
        up, down, energies = nearest(parts, rank, f"{module} of {', '.join(map(str, folders))}")
        kept, whole = kept + energies[0], whole + energies[1]
        embedding = "embed" in module.rsplit(".", 1)[-1]
        names = (
            ("lora_embedding_A", "lora_embedding_B")
            if embedding
            else ("lora_A.weight", "lora_B.weight")
        )
        pair = (
            (up.T, down.T) if embedding or adapters[0].config.get("fan_in_fan_out") else (down, up)
        )
        for name, tensor in zip(names, pair, strict=True):
            tensors[f"base_model.model.{module}.{name}"] = tensor.contiguous()
    config = adapters[0].config | {"r": rank, "lora_alpha": rank, "use_rslora": False}
    config |= {"rank_pattern": {}, "alpha_pattern": {}}
    config["target_modules"] = sorted({m.rsplit(".", 1)[-1] for a in adapters for m in a.updates})
    with atomic_folder(out) as folder:
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(folder / ADAPTER_CONFIG, config)
    return {
        "modules": len(tensors) // 2,
        "rank": rank,
        "energy_kept": kept / whole if whole else 1.0,
    }


def nearest(
    parts: Sequence[tuple[LowRank, float]], rank: int, where: str
) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """up [rows, rank] and down [rank, columns] of the best approximation; its energy and the
    sum's."""
    if len({(u.up.shape[0], u.down.shape[1]) for u, _ in parts}) > 1:
        raise SharpenError(f"{where}: shapes differ")
    left, core_left = torch.linalg.qr(torch.cat([u.up * w for u, w in parts], dim=1))
    right, core_right = torch.linalg.qr(torch.cat([u.down for u, _ in parts]).T)
    u, s, v = torch.linalg.svd(core_left @ core_right.T)
    root = s[:rank].sqrt()
    up, down = left @ (u[:, :rank] * root), (v[:rank] * root[:, None]) @ right.T
    short = rank - up.shape[1]  # every module has the same rank in PEFT: fill up with zeros
    if short > 0:
        up, down = pad(up, (0, short)), pad(down, (0, 0, 0, short))
    return up, down, (float(s[:rank].square().sum()), float(s.square().sum()))
