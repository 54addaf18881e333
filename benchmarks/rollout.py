"""Sampling speed of the engine and of transformers, in one run on one device.

    python benchmarks/rollout.py --race ours ours-lora generate static --out race.json

A model of SmolLM2-135M's shape with random weights (bf16 on a GPU), 128 prompts of 64 tokens, 256
tokens sampled behind each at temperature 1; nothing ends earlier. `ours-lora` has an unmerged
adapter of r=16 on all linear layers.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sft import SHAPES

from sharpen.models.load import LoRAConfig, attach_lora
from sharpen.policy.engine import Engine
from sharpen.types import Sampling


def make_model(shape: str, device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=8192, dtype=dtype)
    return LlamaForCausalLM(config).to(device, dtype).eval().requires_grad_(False)


def ours(model: Any, prompts: list[list[int]], tokens: int, seed: int) -> int:
    engine = model.__dict__.setdefault("engine", None) or Engine(
        model, None, frozenset(), len(prompts)
    )
    model.__dict__["engine"] = engine
    for number, prompt in enumerate(prompts):
        engine.submit(number, prompt, Sampling(tokens, temperature=1.0, seed=seed + number))
    count = 0
    while not engine.idle:
        count += sum(len(sampled.ids) for _, sampled in engine.advance())
    return count


def generate(model: Any, prompts: list[list[int]], tokens: int, seed: int, **more: Any) -> int:
    torch.manual_seed(seed)
    given = torch.tensor(prompts, device=model.device)
    found = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=True,
        pad_token_id=0,
        eos_token_id=1,
        **more,
    )
    return found[:, given.shape[1] :].numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--race", nargs="+", default=["ours", "ours-lora", "generate", "static"])
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chance = np.random.default_rng(0)
    rows = []
    for name in options.race:
        model = make_model(options.shape, options.device)
        if name == "ours-lora":
            model = attach_lora(model, LoRAConfig(lora_r=16, lora_dropout=0.0))
        run = ours if name.startswith("ours") else generate
        more = {"cache_implementation": "static"} if name == "static" else {}
        speeds = []
        for number in range(options.repeat + 1):  # the first one warms up
            prompts = chance.integers(2, 4000, (options.batch, options.prompt)).tolist()
            started = time.perf_counter()
            count = run(model, prompts, options.tokens, number, **more)
            speeds.append(count / (time.perf_counter() - started))
        rows.append({"name": name, "first": speeds[0], "tokens_per_s": max(speeds[1:])})
        print(json.dumps(rows[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps({"device": options.device, "rows": rows}))


if __name__ == "__main__":
    main()
