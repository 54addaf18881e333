"""Tool episodes of four turns: ours and TRL's tool loop, in one run on one device.

    python benchmarks/tool_rollout.py FOLDER --race ours trl --out race.json

256 episodes (32 prompts, 8 samples each) sample 64 tokens per turn. After each of the first three
turns a tool answers with about 40 tokens. The weights are random (the shape of SmolLM2-135M), so
both sides take every turn for a call of the tool, and no episode ends earlier. Seconds are those of
the rollout alone.
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

_REPORTS = ", ".join(f"{number} degrees at {number} o'clock" for number in range(8, 14))
TOOL_ANSWER = f"The station reports {_REPORTS}."
TURNS = 4


def weather(place: str) -> str:
    """Tells the weather of a place.

    Args:
        place: Where.
    """
    return TOOL_ANSWER


class Station:
    """An environment that takes every turn for a call."""

    inline = True

    def reset(self, task: Task) -> Dialog:
        return Dialog(task.messages, task.tools, task.id)

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        return (Message("tool", TOOL_ANSWER, name="weather"),), None


def run_ours(options: argparse.Namespace, folder: Path) -> list[float]:
    """Returns the seconds of each rollout with our engine; the first is the warm-up."""
    from sharpen.policy.local import LocalPolicy
    from sharpen.rollout import rollout

    dtype = "bfloat16" if options.device == "cuda" else "float32"
    config = ModelConfig(base_model=str(folder / "model"), device=options.device, dtype=dtype)
    policy = LocalPolicy.load(config, "hermes", options.prompts * options.samples)

    def stop_at_limit(request: Any, token: int) -> StopReason | None:
        # a turn that reached its limit would end the episode: here it counts as an answer
        return StopReason.ANSWERED if len(request.ids) >= options.tokens else None

    policy.engine.stopped = stop_at_limit  # type: ignore[method-assign]
    place = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    tools = (ToolSpec("weather", "Tells the weather of a place.", place),)
    tasks = []
    for number, text in enumerate(questions(options.prompts)):
        tasks += [Task(str(number), text, tools)] * options.samples
    seconds = []
    for number in range(options.repeat + 1):
        sampling = Sampling(options.tokens, 1.0, seed=number)
        started = time.perf_counter()
        trajectories = rollout(policy, tasks, Station, sampling, TURNS)
        seconds.append(time.perf_counter() - started)
        for trajectory in trajectories:
            assert len(trajectory.turns) == TURNS
            assert all(len(turn.ids) == options.tokens for turn in trajectory.turns)
    return seconds


def make_trl_trainer(options: argparse.Namespace, folder: Path) -> Any:
    """Returns TRL's GRPO trainer with its tool loop; every completion is parsed as a call."""
    import trl.trainer.grpo_trainer as module
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.chat_template_utils import qwen3_instruct_2507_chat_template

    call = {"type": "function", "function": {"name": "weather", "arguments": {"place": "here"}}}
    parsed = {"role": "assistant", "content": "", "tool_calls": [call]}
    module.parse_response = lambda *_args, **_kwargs: dict(parsed)  # type: ignore[attr-defined]
    tokenizer = load_tokenizer(str(folder / "model"))
    tokenizer.chat_template = qwen3_instruct_2507_chat_template
    episodes = options.prompts * options.samples
    arguments = module.GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=episodes,
        num_generations=options.samples,
        max_completion_length=TURNS * (options.tokens + 400),
        max_tool_calling_iterations=TURNS - 1,
        generation_kwargs={"max_new_tokens": options.tokens, "min_new_tokens": options.tokens},
        bf16=options.device == "cuda",
        use_cpu=options.device == "cpu",
        report_to=[],
    )
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    trainer = module.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype),
        args=arguments,
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        train_dataset=Dataset.from_dict({"prompt": trl_prompts(options)}),
        processing_class=tokenizer,
        tools=[weather],
    )
    trainer._sync_tool_dicts = [{"weather": weather}] * episodes
    trainer._async_tool_dicts = [{}] * episodes
    return trainer


def trl_prompts(options: argparse.Namespace) -> list[list[dict[str, str]]]:
    """Returns the questions as TRL's conversational prompts."""
    return [[{"role": "user", "content": text}] for text in questions(options.prompts)]


def run_trl(options: argparse.Namespace, folder: Path) -> list[float]:
    """Returns the seconds of each rollout with TRL; the first is the warm-up."""
    trainer = make_trl_trainer(options, folder)
    prompts = []
    for prompt in trl_prompts(options):
        prompts += [prompt] * options.samples
    seconds = []
    for _ in range(options.repeat + 1):
        started = time.perf_counter()
        outputs = trainer._generate(list(prompts))
        seconds.append(time.perf_counter() - started)
        tool_masks = outputs[2]
        sampled = [sum(mask) for mask in tool_masks] if isinstance(tool_masks[0], list) else []
        print({"sampled tokens per episode": sorted(set(sampled))})
    return seconds


def main() -> None:
    """Measure each competitor and print one JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder in which the model is made and kept")
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
        run = run_ours if name == "ours" else run_trl
        seconds = run(options, options.folder)
        rows.append({"name": name, "seconds": min(seconds[1:]), "all": seconds})
        print(json.dumps(rows[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps({"device": options.device, "rows": rows}))


if __name__ == "__main__":
    main()
