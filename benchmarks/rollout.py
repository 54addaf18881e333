"""Sampling speed of our engine and of transformers, in one run on one device.

    python benchmarks/rollout.py --race ours ours-lora generate static --out race.json

The model has the shape of SmolLM2-135M and random weights (bf16 on a GPU). Each round samples 256
tokens after each of 128 prompts of 64 tokens, at temperature 1; no answer ends earlier. `ours-lora`
has an unmerged adapter with r=16 on all linear layers. `static` is `generate` with a static cache.
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
    """Returns a Llama model of one of `SHAPES` with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=8192, dtype=dtype)
    return LlamaForCausalLM(config).to(device, dtype).eval().requires_grad_(False)


class OurSampler:
    """Samples with one engine for all rounds; returns the number of sampled tokens."""

    def __init__(self, model: Any):
        self.model = model
        self.engine: Engine | None = None

    def __call__(self, prompts: list[list[int]], tokens: int, seed: int) -> int:
        if self.engine is None:  # in the first round, whose time includes it
            self.engine = Engine(self.model, None, frozenset(), len(prompts))
        for number, prompt in enumerate(prompts):
            sampling = Sampling(tokens, temperature=1.0, seed=seed + number)
            self.engine.submit(number, prompt, sampling)
        count = 0
        while not self.engine.idle:
            for _, sampled in self.engine.advance():
                count += len(sampled.ids)
        return count


class GenerateSampler:
    """Samples with transformers' `generate`; returns the number of sampled tokens."""

    def __init__(self, model: Any, static_cache: bool):
        self.model = model
        self.settings = {"cache_implementation": "static"} if static_cache else {}

    def __call__(self, prompts: list[list[int]], tokens: int, seed: int) -> int:
        torch.manual_seed(seed)
        prompt_ids = torch.tensor(prompts, device=self.model.device)
        ids = self.model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=True,
            pad_token_id=0,
            eos_token_id=1,
            **self.settings,
        )
        return ids[:, prompt_ids.shape[1] :].numel()


def measure_speeds(name: str, options: argparse.Namespace, rng: np.random.Generator) -> list[float]:
    """Returns tokens per second of each round; the first round is the warm-up."""
    model = make_model(options.shape, options.device)
    if name == "ours-lora":
        model = attach_lora(model, LoRAConfig(lora_r=16, lora_dropout=0.0))
    if name.startswith("ours"):
        sample = OurSampler(model)
    else:
        sample = GenerateSampler(model, static_cache=name == "static")
    speeds = []
    for number in range(options.repeat + 1):
        prompts = rng.integers(2, 4000, (options.batch, options.prompt)).tolist()
        started = time.perf_counter()
        count = sample(prompts, options.tokens, number)
        speeds.append(count / (time.perf_counter() - started))
    return speeds


def main() -> None:
    """Measure each competitor and print one JSON line for each."""
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
    rng = np.random.default_rng(0)
    rows = []
    for name in options.race:
        speeds = measure_speeds(name, options, rng)
        rows.append({"name": name, "first": speeds[0], "tokens_per_s": max(speeds[1:])})
        print(json.dumps(rows[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps({"device": options.device, "rows": rows}))


if __name__ == "__main__":
    main()
