"""Compares the speed of `sharpen merge` with mergekit's on three random models.

The models have the shape of Qwen2.5-0.5B (or of a 7B model, for memory). The machine should do
nothing else meanwhile.

Example: python benchmarks/merge.py /some/folder --oracle .venv-oracle --repeat 2
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from sharpen.merge.checkpoint import ShardWriter, TensorSpec

MIN_SPEEDUP = {"linear": 4, "slerp": 4, "ties": 10, "dare_ties": 10, "task_arithmetic": 4}
BLOCK_ELEMENTS = 1 << 24
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen2 model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied_head: bool


SHAPES = {
    "0.5b": Shape(896, 4864, 24, 14, 2, 151_936, True),
    "7b": Shape(3584, 18_944, 28, 28, 4, 152_064, False),
}


def tensor_specs(shape: Shape) -> dict[str, TensorSpec]:
    """Returns all tensors of a Qwen2 model of this shape."""
    hidden = shape.hidden
    intermediate = shape.intermediate
    kv_width = hidden // shape.heads * shape.kv_heads
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name, width in (("q", hidden), ("k", kv_width), ("v", kv_width)):
            sizes[f"{prefix}self_attn.{name}_proj.weight"] = (width, hidden)
            sizes[f"{prefix}self_attn.{name}_proj.bias"] = (width,)
        sizes[prefix + "self_attn.o_proj.weight"] = (hidden, hidden)
        sizes[prefix + "mlp.gate_proj.weight"] = (intermediate, hidden)
        sizes[prefix + "mlp.up_proj.weight"] = (intermediate, hidden)
        sizes[prefix + "mlp.down_proj.weight"] = (hidden, intermediate)
        sizes[prefix + "input_layernorm.weight"] = (hidden,)
        sizes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    sizes["model.norm.weight"] = (hidden,)
    if not shape.tied_head:
        sizes["lm_head.weight"] = (shape.vocabulary, hidden)
    return {name: TensorSpec("bfloat16", size) for name, size in sizes.items()}


def make_model(folder: Path, shape_name: str, seed: int, base_seed: int = 0) -> None:
    """Write a model with random weights; for seed > 0, the base's weights with a small change."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    change_generator = torch.Generator().manual_seed(seed + 1)
    base_generator = torch.Generator().manual_seed(base_seed)
    block = torch.randn(BLOCK_ELEMENTS, generator=change_generator)
    specs = tensor_specs(SHAPES[shape_name])
    writer = ShardWriter(folder, specs, SHARD_BYTES)
    for name, spec in specs.items():
        step = max(1, BLOCK_ELEMENTS // spec.columns)
        for start in range(0, spec.rows, step):
            size = (min(step, spec.rows - start), spec.columns)
            if shape_name == "7b":  # for its size only: one block of numbers, again and again
                values = block.reshape(-1)[: size[0] * size[1]].reshape(size)
            else:
                values = torch.randn(size, generator=base_generator) * 0.02
                if seed:
                    values += torch.randn(size, generator=change_generator) * 0.002
            writer.write(name, start * spec.columns, values.numpy())
    writer.close()
    # config.json comes last: with it, the folder counts as complete
    (folder / "config.json").write_text(json.dumps(model_config(SHAPES[shape_name])))


def model_config(shape: Shape) -> dict[str, Any]:
    """Returns the config.json of a Qwen2 model of this shape."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied_head,
        "torch_dtype": "bfloat16",
    }


def link_model(source: Path, folder: Path) -> None:
    """Link the same files under another name: enough to measure memory, and saves 15 GB of disk."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if not (folder / file.name).exists():
            os.link(file, folder / file.name)


def recipes(base: str, first: str, second: str) -> dict[str, dict[str, Any]]:
    """Returns a recipe for each method, without the method's name."""
    tuned = [{"model": first}, {"model": second}]
    return {
        "linear": {"models": [{"model": base}, *tuned], "parameters": {"weight": 1.0}},
        "slerp": {"models": tuned, "base_model": first, "parameters": {"t": 0.4}},
        "ties": {
            "models": tuned,
            "base_model": base,
            "parameters": {"weight": 0.5, "density": 0.5},
        },
        "dare_ties": {
            "models": tuned,
            "base_model": base,
            "parameters": {"weight": 0.5, "density": 0.5},
        },
        "task_arithmetic": {"models": tuned, "base_model": base, "parameters": {"weight": 0.5}},
    }


def measure(command: list[str]) -> dict[str, float]:
    """Run a command; return its wall-clock time, processor time and largest memory in GB."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # both sides may cache their bytecode
    command = ["/usr/bin/time", "-v", *command]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        sys.exit(f"failed: {' '.join(command)}\n{result.stderr[-2000:]}")
    figures = dict(re.findall(r"\t(.+?)(?: \(.*\))?: ([\d:.]+)", result.stderr))
    seconds = 0.0
    for part in figures["Elapsed"].split(":"):  # h:mm:ss or m:ss
        seconds = seconds * 60 + float(part)
    return {
        "seconds": seconds,
        "cpu_seconds": float(figures["User time"]) + float(figures["System time"]),
        "gb": round(int(figures["Maximum resident set size"]) * 1024 / 1e9, 3),
    }


def best_of(runs: list[dict[str, float]]) -> dict[str, float]:
    """Returns the shortest times and the largest memory of several runs."""
    best = {}
    for key in runs[0]:
        values = [run[key] for run in runs]
        best[key] = max(values) if key == "gb" else min(values)
    return best


def make_models(folder: Path, shape_name: str) -> list[str]:
    """Make the base and two tuned models, and return their folders."""
    folders = [folder / shape_name / name for name in ("base", "one", "two")]
    for seed, model_folder in enumerate(folders):
        if shape_name == "7b" and seed:
            link_model(folders[0], model_folder)
        else:
            make_model(model_folder, shape_name, seed)
    return [str(model_folder) for model_folder in folders]


def compare(
    folder: Path, oracle: Path | None, methods: list[str], repeat: int, shape_name: str
) -> list[dict[str, Any]]:
    """Measure each method with Sharpen and, if `oracle` is given, with mergekit."""
    models = make_models(folder, shape_name)
    rows = []
    for method in methods:
        recipe = folder / f"{method}.yaml"
        recipe.write_text(yaml.safe_dump({"merge_method": method, **recipes(*models)[method]}))
        row = compare_method(method, recipe, folder / "out", oracle, repeat)
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def compare_method(
    method: str, recipe: Path, out: Path, oracle: Path | None, repeat: int
) -> dict[str, Any]:
    """Run one recipe `repeat` times with each program, and return the best figures."""
    sharpen = str(Path(sys.executable).with_name("sharpen"))
    sharpen_runs = []
    mergekit_runs = []
    for _ in range(repeat):  # in turn, so that whatever else the machine does affects both
        shutil.rmtree(out, ignore_errors=True)
        sharpen_runs.append(measure([sharpen, "merge", str(recipe), str(out), "--json"]))
        shutil.rmtree(out)
        if oracle:
            mergekit = str(oracle / "bin" / "mergekit-yaml")
            command = [mergekit, str(recipe), str(out), "--no-copy-tokenizer"]
            mergekit_runs.append(measure(command))
            shutil.rmtree(out)
    row: dict[str, Any] = {"method": method, **best_of(sharpen_runs)}
    if oracle:
        for key, value in best_of(mergekit_runs).items():
            row[f"mergekit_{key}"] = value
        row["times_faster"] = round(row["mergekit_seconds"] / row["seconds"], 2)
        row["times_less_cpu"] = round(row["mergekit_cpu_seconds"] / row["cpu_seconds"], 2)
    return row


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the figures of all methods, and the speedup that each should have."""
    heads = f"{'method':16} {'seconds':>8} {'GB':>6} {'mergekit':>9} {'GB':>6} {'faster':>7} wanted"
    print(f"\n{heads}")
    for row in rows:
        print(
            f"{row['method']:16} {row['seconds']:8.2f} {row['gb']:6.2f} "
            f"{row.get('mergekit_seconds', 0):9.2f} {row.get('mergekit_gb', 0):6.2f} "
            f"{row.get('times_faster', 0):6.1f}x {MIN_SPEEDUP[row['method']]:6}x"
        )


def main() -> None:
    """Run the comparison that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the models are made and kept")
    parser.add_argument("--oracle", type=Path, help="virtual environment with mergekit 0.1.5")
    parser.add_argument("--methods", nargs="*", default=list(MIN_SPEEDUP))
    parser.add_argument("--repeat", type=int, default=1, help="runs per program and method")
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    arguments = parser.parse_args()
    rows = compare(
        arguments.folder, arguments.oracle, arguments.methods, arguments.repeat, arguments.shape
    )
    print_table(rows)
    print(json.dumps({"cores": os.cpu_count(), "shape": arguments.shape, "rows": rows}))


if __name__ == "__main__":
    main()
