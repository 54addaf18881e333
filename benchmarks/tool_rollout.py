"""Tool episodes of four turns, ours and TRL's tool loop in one run on one device.

    python benchmarks/tool_rollout.py FOLDER --race ours trl --out race.json

256 episodes (32 prompts, 8 samples each), 64 tokens sampled a turn, a tool's answer of about 40
tokens behind each of the first three. The weights are random (SmolLM2-135M's shape), so that every
turn is taken for a call of the tool on both sides; nothing ends earlier. Seconds are those of the
rollout alone.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from grpo import make_folder, questions

from sharpen.models.load import ModelConfig, load_tokenizer
from sharpen.types import Dialog, Message, Sampling, StopReason, Task, ToolSpec

SAID = "The station reports " + ", ".join(f"{n} degrees at {n} o'clock" for n in range(8, 14)) + "."
TURNS = 4


def weather(place: str) -> str:
    """Tells the weather of a place.

    Args:
        place: Where.
    """
    return SAID


class Station:
    """Takes every turn for a call."""

    inline = True

    def reset(self, task: Task) -> Dialog:
        return Dialog(task.messages, task.tools, task.id)

    def step(self, message: Message) -> Any:
        return (Message("tool", SAID, name="weather"),), None


def run_ours(options: Any, folder: Path) -> list[float]:
    from sharpen.policy.local import LocalPolicy
    from sharpen.rollout import rollout

    dtype = "bfloat16" if options.device == "cuda" else "float32"
    config = ModelConfig(base_model=str(folder / "model"), device=options.device, dtype=dtype)
    policy = LocalPolicy.load(config, "hermes", options.prompts * options.samples)
    # a turn that reached its limit would end the episode: here it is an answer
    policy.engine.stopped = lambda request, token: (  # type: ignore[method-assign]
        StopReason.ANSWERED if len(request.ids) >= options.tokens else None
    )
    place = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    tools, seconds = (ToolSpec("weather", "Tells the weather of a place.", place),), []
    for number in range(options.repeat + 1):
        asked = questions(options.prompts)
        tasks = [Task(str(n), text, tools) for n, text in enumerate(asked)]
        repeated = [task for task in tasks for _ in range(options.samples)]
        sampling, started = Sampling(options.tokens, 1.0, seed=number), time.perf_counter()
        made = rollout(policy, repeated, Station, sampling, TURNS)
        seconds.append(time.perf_counter() - started)
        assert all(len(one.turns) == TURNS for one in made)
        assert all(len(turn.ids) == options.tokens for one in made for turn in one.turns)
    return seconds


def run_trl(options: Any, folder: Path) -> list[float]:
    import trl.trainer.grpo_trainer as module
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.chat_template_utils import qwen3_instruct_2507_chat_template as template

    call = {"type": "function", "function": {"name": "weather", "arguments": {"place": "here"}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    module.parse_response = lambda *given, **more: dict(said)  # type: ignore[attr-defined]
    tokenizer = load_tokenizer(str(folder / "model"))
    tokenizer.chat_template = template
    arguments = module.GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=options.prompts * options.samples,
        num_generations=options.samples,
        max_completion_length=TURNS * (options.tokens + 400),
        max_tool_calling_iterations=TURNS - 1,
        generation_kwargs={"max_new_tokens": options.tokens, "min_new_tokens": options.tokens},
        bf16=options.device == "cuda",
        use_cpu=options.device == "cpu",
        report_to=[],
    )
    rows = [[{"role": "user", "content": text}] for text in questions(options.prompts)]
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    trainer = module.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype),
        args=arguments,
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        train_dataset=Dataset.from_dict({"prompt": rows}),
        processing_class=tokenizer,
        tools=[weather],
    )
    count, seconds = options.prompts * options.samples, []
    trainer._sync_tool_dicts = [{"weather": weather}] * count
    trainer._async_tool_dicts = [{}] * count
    for _ in range(options.repeat + 1):
        prompts = [row for row in rows for _ in range(options.samples)]
        started = time.perf_counter()
        found = trainer._generate(prompts)
        seconds.append(time.perf_counter() - started)
        sampled = [sum(mask) for mask in found[2]] if isinstance(found[2][0], list) else []
        print({"sampled a row": sorted(set(sampled))})
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the model is made and kept")
    parser.add_argument("--race", nargs="+", default=["ours", "trl"])
    parser.add_argument("--tokenizer", default="smollm2-135m")
    parser.add_argument("--shape", default="135m")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    make_folder(options.folder, options)
    rows = []
    for name in options.race:
        seconds = (run_ours if name == "ours" else run_trl)(options, options.folder)
        rows.append({"name": name, "seconds": min(seconds[1:]), "all": seconds})
        print(json.dumps(rows[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps({"device": options.device, "rows": rows}))


if __name__ == "__main__":
    main()
