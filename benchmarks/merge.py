"""Races `sharpen merge` against mergekit on three random models of Qwen2.5-0.5B's shape.

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
from pathlib import Path

import torch
import yaml

from sharpen.merge.checkpoint import ShardWriter, TensorSpec

SHAPES = {  # hidden, inner, layers, heads, key-value heads, vocabulary, tied head
    "0.5b": (896, 4864, 24, 14, 2, 151_936, True),
    "7b": (3584, 18_944, 28, 28, 4, 152_064, False),
}
WANTED = {"linear": 4, "slerp": 4, "ties": 10, "dare_ties": 10, "task_arithmetic": 4}


def specs(shape: str) -> dict[str, TensorSpec]:
    hidden, inner, layers, heads, groups, vocabulary, tied = SHAPES[shape]
    narrow = hidden // heads * groups
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        at = f"model.layers.{i}."
        for name, out in (("q", hidden), ("k", narrow), ("v", narrow)):
            sizes[f"{at}self_attn.{name}_proj.weight"] = (out, hidden)
            sizes[f"{at}self_attn.{name}_proj.bias"] = (out,)
        sizes[at + "self_attn.o_proj.weight"] = (hidden, hidden)
        sizes[at + "mlp.gate_proj.weight"] = sizes[at + "mlp.up_proj.weight"] = (inner, hidden)
        sizes[at + "mlp.down_proj.weight"] = (hidden, inner)
        sizes[at + "input_layernorm.weight"] = (hidden,)
        sizes[at + "post_attention_layernorm.weight"] = (hidden,)
    sizes["model.norm.weight"] = (hidden,)
    if not tied:
        sizes["lm_head.weight"] = (vocabulary, hidden)
    return {name: TensorSpec("bfloat16", size) for name, size in sizes.items()}


def make_model(folder: Path, shape: str, seed: int, base_seed: int = 0) -> None:
    """Random weights, and for seed > 0 a small random change of the base's."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    random, base = torch.Generator().manual_seed(seed + 1), torch.Generator().manual_seed(base_seed)
    block = torch.randn(1 << 24, generator=random)
    wanted = specs(shape)
    writer = ShardWriter(folder, wanted, 5_000_000_000)
    for name, spec in wanted.items():
        step = max(1, (1 << 24) // spec.columns)
        for start in range(0, spec.rows, step):
            size = (min(step, spec.rows - start), spec.columns)
            if shape == "7b":  # for its size only: one block of numbers, again and again
                values = block.reshape(-1)[: size[0] * size[1]].reshape(size)
            else:
                values = torch.randn(size, generator=base) * 0.02
                if seed:
                    values += torch.randn(size, generator=random) * 0.002
            writer.write(name, start * spec.columns, values.numpy())
    writer.close()
    hidden, inner, layers, heads, groups, vocabulary, tied = SHAPES[shape]
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def link_model(source: Path, folder: Path) -> None:
    """The same files under another name: enough to measure memory, without 15 GB more of disk."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if not (folder / file.name).exists():
            os.link(file, folder / file.name)


def recipes(base: str, one: str, two: str) -> dict[str, dict]:
    both = [{"model": one}, {"model": two}]
    return {
        "linear": {"models": [{"model": base}, *both], "parameters": {"weight": 1.0}},
        "slerp": {"models": both, "base_model": one, "parameters": {"t": 0.4}},
        "ties": {"models": both, "base_model": base, "parameters": {"weight": 0.5, "density": 0.5}},
        "dare_ties": {
            "models": both,
            "base_model": base,
            "parameters": {"weight": 0.5, "density": 0.5},
        },
        "task_arithmetic": {"models": both, "base_model": base, "parameters": {"weight": 0.5}},
    }


def timed(command: list[str]) -> dict[str, float]:
    """Wall clock, processor time and largest resident size, by /usr/bin/time."""
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = ["/usr/bin/time", "-v", *command]
    done = subprocess.run(command, capture_output=True, text=True, env=plain)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}\n{done.stderr[-2000:]}")
    found = dict(re.findall(r"\t(.+?)(?: \(.*\))?: ([\d:.]+)", done.stderr))
    parts = [float(part) for part in found["Elapsed"].split(":")]
    return {
        "seconds": sum(part * 60**i for i, part in enumerate(reversed(parts))),
        "cpu_seconds": float(found["User time"]) + float(found["System time"]),
        "gb": round(int(found["Maximum resident set size"]) * 1024 / 1e9, 3),
    }


def best(runs: list[dict[str, float]]) -> dict[str, float]:
    """The shortest times and the largest size."""
    return {key: (max if key == "gb" else min)(run[key] for run in runs) for key in runs[0]}


def race(
    folder: Path, oracle: Path | None, methods: list[str], repeat: int, shape: str
) -> list[dict]:
    names = [str(folder / shape / name) for name in ("base", "one", "two")]
    for seed, name in enumerate(names):
        if shape == "7b" and seed:
            link_model(Path(names[0]), Path(name))
        else:
            make_model(Path(name), shape, seed)
    rows = []
    for method in methods:
        recipe = folder / f"{method}.yaml"
        recipe.write_text(yaml.safe_dump({"merge_method": method, **recipes(*names)[method]}))
        ours, theirs = [], []
        for _ in range(repeat):  # in turn, so that whatever else the machine does strikes both
            out = str(folder / "out")
            shutil.rmtree(out, ignore_errors=True)
            sharpen = str(Path(sys.executable).with_name("sharpen"))
            ours.append(timed([sharpen, "merge", str(recipe), out, "--json"]))
            shutil.rmtree(out)
            if oracle:
                command = str(oracle / "bin" / "mergekit-yaml")
                theirs.append(timed([command, str(recipe), out, "--no-copy-tokenizer"]))
                shutil.rmtree(out)
        row: dict = {"method": method, **best(ours)}
        if oracle:
            row |= {f"mergekit_{key}": value for key, value in best(theirs).items()}
            row["times_faster"] = round(row["mergekit_seconds"] / row["seconds"], 2)
            row["times_less_cpu"] = round(row["mergekit_cpu_seconds"] / row["cpu_seconds"], 2)
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the models are made and kept")
    parser.add_argument("--oracle", type=Path, help="virtual environment with mergekit 0.1.5")
    parser.add_argument("--methods", nargs="*", default=list(WANTED))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    arguments = parser.parse_args()
    rows = race(
        arguments.folder, arguments.oracle, arguments.methods, arguments.repeat, arguments.shape
    )
    print(
        f"\n{'method':16} {'seconds':>8} {'GB':>6} {'mergekit':>9} {'GB':>6} {'faster':>7} wanted"
    )
    for row in rows:
        print(
            f"{row['method']:16} {row['seconds']:8.2f} {row['gb']:6.2f} "
            f"{row.get('mergekit_seconds', 0):9.2f} {row.get('mergekit_gb', 0):6.2f} "
            f"{row.get('times_faster', 0):6.1f}x {WANTED[row['method']]:6}x"
        )
    print(json.dumps({"cores": os.cpu_count(), "shape": arguments.shape, "rows": rows}))


if __name__ == "__main__":
    main()
