"""LoRA SFT speed on a 7B shape with random weights, ours and TRL in one run on one GPU.

    python benchmarks/sft.py --race ours ours:activation_share=0.5 trl trl-liger --out race.json

The rows are the same for all: lengths lognormal (median 600, 64 to 4,096), every token trained,
LoRA r=64 on all linear layers without dropout, AdamW, bf16. The figure is useful tokens (padding
not counted) per second after warm-up.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharpen.models.load import LoRAConfig, attach_lora
from sharpen.train.config.learner import LearnerConfig
from sharpen.train.learner import Learner
from sharpen.train.sft import token_mean
from sharpen.types import Datum

SHAPES = {
    "7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "tie_word_embeddings": False,
    },
    "135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "tie_word_embeddings": True,
    },
    "10m": {
        "vocab_size": 4096,
        "hidden_size": 320,
        "num_hidden_layers": 6,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "intermediate_size": 1024,
        "tie_word_embeddings": True,
    },
}
# how TRL's SFTTrainer is set up for each of its racers
TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl-liger": {"use_liger_kernel": True},
    "trl-best": {
        "use_liger_kernel": True,
        "train_sampling_strategy": "group_by_length",
        "per_device_train_batch_size": 16,
    },
}


def make_rows(count: int, vocabulary: int, seed: int = 0) -> list[np.ndarray]:
    """Draw the ids of the rows."""
    generator = np.random.default_rng(seed)
    lengths = np.exp(generator.normal(np.log(600), 0.8, count))
    lengths = np.clip(lengths, 64, 4096).astype(int)
    return [generator.integers(0, vocabulary, length).astype(np.int32) for length in lengths]


def make_model(shape: str, device: str) -> Any:
    """Make a model of this shape with random weights, in bf16 on a GPU."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen2ForCausalLM(Qwen2Config(**SHAPES[shape], max_position_embeddings=8192))
    finally:
        torch.set_default_dtype(torch.float32)
    return model


def run_ours(
    options: argparse.Namespace, rows: list[np.ndarray], settings: dict[str, Any]
) -> dict[str, float]:
    """Train with our learner and measure its speed."""
    model = make_model(options.shape, options.device)
    if options.full:
        model.requires_grad_(True)
    else:
        model = attach_lora(model, LoRAConfig(lora_dropout=0.0))
    learner = Learner(model, LearnerConfig(warmup_ratio=0, **settings), 1000)
    datums = [Datum(ids, np.ones(len(ids), bool)) for ids in rows]
    steps = []
    for start in range(0, len(datums), options.batch):
        steps.append(datums[start : start + options.batch])
    for step in steps[: options.warmup]:
        learner.step(step, token_mean)
    started = read_clock(options.device)
    tokens = 0
    for step in steps[options.warmup :]:
        tokens += learner.step(step, token_mean).tokens
    tokens_per_s = tokens / (read_clock(options.device) - started)
    if options.profile:
        print_profile(learner, steps[-1], options.device)
    return {"tokens_per_s": tokens_per_s}


def print_profile(learner: Learner, step: list[Datum], device: str) -> None:
    """Show where the time of one step goes."""
    with torch.profiler.profile() as profile:
        learner.step(step, token_mean)
    key = f"self_{device}_time_total"
    print(profile.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60))


def run_trl(
    options: argparse.Namespace, rows: list[np.ndarray], settings: dict[str, Any]
) -> dict[str, float]:
    """Train with TRL's SFTTrainer on the same ids and measure its speed. It runs as shipped, except
    for what makes the race fair: bf16, no dropout, no saving."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from sharpen.models.pico import byte_tokenizer

    times: list[float] = []  # after the warm-up and after the last step

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (options.trl_warmup, state.max_steps):
                times.append(read_clock(options.device))

    settings = dict(settings)
    rows_per_step = settings.pop("per_device_train_batch_size", 4)
    used_rows = rows[: options.trl_rows]
    arguments = SFTConfig(
        output_dir="/tmp/trl",
        per_device_train_batch_size=rows_per_step,
        max_length=4096,
        num_train_epochs=1,
        bf16=options.device == "cuda",
        use_cpu=options.device == "cpu",
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        shuffle_dataset=False,
        **settings,
    )
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer()
    lora = LoraConfig(
        r=64, lora_alpha=128, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    trainer = SFTTrainer(
        model=make_model(options.shape, options.device),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": [ids.tolist() for ids in used_rows]}),
        processing_class=tokenizer,
        peft_config=None if options.full else lora,
        callbacks=[Clock()],
    )

    def in_order(*args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(trainer.train_dataset)

    trainer._get_train_sampler = in_order
    trainer.train()
    measured_rows = used_rows[options.trl_warmup * rows_per_step :]
    tokens = sum(len(ids) for ids in measured_rows)
    return {"tokens_per_s": tokens / (times[-1] - times[0])}


def read_clock(device: str) -> float:
    """Return the time in seconds, when the GPU has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run_racer(name: str, options: argparse.Namespace, rows: list[np.ndarray]) -> dict[str, float]:
    """Run a racer: one of TRL's, or `ours` with settings after a colon
    (`ours:token_budget=8192,compile=false`)."""
    if name in TRL_SETTINGS:
        return run_trl(options, rows, TRL_SETTINGS[name])
    kind, _, overrides = name.partition(":")
    if kind != "ours":
        raise SystemExit(f"no such racer: {name}; known are ours, {', '.join(TRL_SETTINGS)}")
    settings: dict[str, Any] = {
        "token_budget": options.budget,
        "compile": options.device == "cuda",
    }
    for override in overrides.split(","):
        if override:
            key, value = override.split("=")
            settings[key] = value
    return run_ours(options, rows, settings)


def measure_racer(name: str, options: argparse.Namespace, rows: list[np.ndarray]) -> dict[str, Any]:
    """Run a racer and return its speed and peak memory, or why it failed."""
    on_gpu = options.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    result: dict[str, Any]
    try:
        result = dict(run_racer(name, options, rows))
    except Exception as error:  # one racer's failure is a result of the race, shown as such
        result = {"failed": f"{type(error).__name__}: {error}"[:300]}
    if on_gpu:
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    print(name, json.dumps(result), flush=True)
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return result


def print_ratios(results: dict[str, dict[str, Any]]) -> None:
    """Compare all racers with TRL as shipped, if it took part."""
    trl_speed = results.get("trl", {}).get("tokens_per_s")
    if trl_speed is None:
        return
    for name, result in results.items():
        if "tokens_per_s" in result:
            print(f"{name}: {result['tokens_per_s'] / trl_speed:.2f} × TRL as shipped")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--race", nargs="+", default=["ours", "trl"], help="the racers, in order")
    parser.add_argument("--shape", default="7b", choices=SHAPES, help="the model's shape")
    parser.add_argument("--device", default=default_device)
    parser.add_argument("--full", action="store_true", help="train every weight, not an adapter")
    parser.add_argument("--rows", type=int, default=640, help="number of rows")
    parser.add_argument("--batch", type=int, default=64, help="rows per step of ours")
    parser.add_argument("--warmup", type=int, default=3, help="steps of ours before measuring")
    parser.add_argument("--trl-rows", type=int, default=96, help="number of rows for TRL")
    parser.add_argument("--trl-warmup", type=int, default=4, help="steps of TRL before measuring")
    parser.add_argument("--budget", type=int, default=16384, help="micro-batch size in tokens")
    parser.add_argument("--profile", action="store_true", help="show where a step's time goes")
    parser.add_argument("--out", help="JSON file for the results")
    return parser.parse_args()


def main() -> None:
    """Run the racers one after the other."""
    options = parse_options()
    rows = make_rows(options.rows, SHAPES[options.shape]["vocab_size"])
    results = {}
    for name in options.race:
        results[name] = measure_racer(name, options, rows)
        if options.out:
            Path(options.out).write_text(json.dumps(results, indent=2))
    print_ratios(results)


if __name__ == "__main__":
    main()
