"""LoRA SFT speed on a 7B shape with random weights, ours and TRL in one run on one GPU.

    python benchmarks/sft.py --race ours ours:activation_share=0.5 trl trl-liger --out race.json

Rows are the same for all: lengths lognormal (median 600, 64 to 4,096), every token trained, LoRA
r=64 on all linear layers without dropout, AdamW, bf16. A figure is useful tokens (padding not
counted) a second after warm-up.
"""

from __future__ import annotations

import argparse
import gc
import json
import time

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


def make_rows(count: int, vocabulary: int, seed: int = 0) -> list[np.ndarray]:
    chance = np.random.default_rng(seed)
    lengths = np.clip(np.exp(chance.normal(np.log(600), 0.8, count)), 64, 4096).astype(int)
    return [chance.integers(0, vocabulary, n).astype(np.int32) for n in lengths]


def make_model(shape: str, device: str):
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


def run_ours(options, rows: list[np.ndarray], **settings) -> dict:
    model = make_model(options.shape, options.device)
    if options.full:
        model.requires_grad_(True)
    else:
        model = attach_lora(model, LoRAConfig(lora_dropout=0.0))
    learner = Learner(model, LearnerConfig(warmup_ratio=0, **settings), 1000)
    data = [Datum(ids, np.ones(len(ids), bool)) for ids in rows]
    steps = [data[i : i + options.batch] for i in range(0, len(data), options.batch)]
    for step in steps[: options.warmup]:
        learner.step(step, token_mean)
    started, tokens = clock(options.device), 0
    for step in steps[options.warmup :]:
        tokens += learner.step(step, token_mean).tokens
    speed = tokens / (clock(options.device) - started)
    if options.profile:
        with torch.profiler.profile() as profile:
            learner.step(steps[-1], token_mean)
        key = f"self_{options.device}_time_total"
        print(profile.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60))
    return {"tokens_per_s": speed}


def run_trl(options, rows: list[np.ndarray], **settings) -> dict:
    """TRL's SFTTrainer on the same ids, as shipped but for what makes the race fair: bf16, no
    dropout, no saving."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from sharpen.models.pico import byte_tokenizer

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (options.trl_warmup, state.max_steps):
                marks.append(clock(options.device))

    marks: list[float] = []
    per_device = settings.pop("per_device_train_batch_size", 4)
    used = rows[: options.trl_rows]
    arguments = SFTConfig(
        output_dir="/tmp/trl",
        per_device_train_batch_size=per_device,
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
        train_dataset=Dataset.from_dict({"input_ids": [ids.tolist() for ids in used]}),
        processing_class=tokenizer,
        peft_config=None if options.full else lora,
        callbacks=[Clock()],
    )
    trainer._get_train_sampler = lambda *a, **k: torch.utils.data.SequentialSampler(
        trainer.train_dataset
    )
    trainer.train()
    counted = used[options.trl_warmup * per_device :]
    return {"tokens_per_s": sum(map(len, counted)) / (marks[-1] - marks[0])}


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def racer(name: str, options):
    """`ours` with settings behind a colon (`ours:token_budget=8192,compile=false`), or a TRL."""
    trl = {
        "trl": {},
        "trl-liger": {"use_liger_kernel": True},
        "trl-best": {
            "use_liger_kernel": True,
            "train_sampling_strategy": "group_by_length",
            "per_device_train_batch_size": 16,
        },
    }
    if name in trl:
        return lambda rows: run_trl(options, rows, **trl[name])
    kind, _, settings = name.partition(":")
    if kind != "ours":
        raise SystemExit(f"no such racer: {name}")
    given = dict(part.split("=") for part in settings.split(",") if part)
    ours = {"token_budget": options.budget, "compile": options.device == "cuda", **given}
    return lambda rows: run_ours(options, rows, **ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--race", nargs="+", default=["ours", "trl"])
    parser.add_argument("--shape", default="7b", choices=SHAPES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--full", action="store_true", help="train every weight, not an adapter")
    parser.add_argument("--rows", type=int, default=640)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--trl-rows", type=int, default=96)
    parser.add_argument("--trl-warmup", type=int, default=4)
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--profile", action="store_true", help="show where a step's time goes")
    parser.add_argument("--out")
    options = parser.parse_args()
    rows = make_rows(options.rows, SHAPES[options.shape]["vocab_size"])
    table = {}
    for name in options.race:
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            table[name] = racer(name, options)(rows)
        except Exception as error:  # one racer's failure is a result of the race, shown as such
            table[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
        if options.device == "cuda":
            table[name]["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        print(name, json.dumps(table[name]), flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        if options.out:
            with open(options.out, "w") as file:
                json.dump(table, file, indent=2)
    if "trl" in table and "tokens_per_s" in table["trl"]:
        shipped = table["trl"]["tokens_per_s"]
        for name, row in table.items():
            if "tokens_per_s" in row:
                print(f"{name}: {row['tokens_per_s'] / shipped:.2f} × TRL as shipped")


if __name__ == "__main__":
    main()
