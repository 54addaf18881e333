"""The jobs on models: SFT, preferences, reward models, RL, merging and evaluation."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import yaml

from comparison.workplace import (
    JOBS,
    Figures,
    Job,
    Json,
    Workplace,
    hashed_columns,
    job,
    last_json,
    read_rows,
    sha256,
    weights,
    write_rows,
)

# Rows to train on ---------------------------------------------------------------------------------


def say(role: str, content: str) -> Json:
    """Returns one message."""
    return {"role": role, "content": content}


def call_tool(call: Json) -> list[Json]:
    """Returns messages that call a tool, take its result and end."""
    wire_call = {"id": "call_1", "type": "function", "function": call}
    result = {"role": "tool", "content": "{}", "name": call["name"], "tool_call_id": "call_1"}
    asking = {"role": "assistant", "content": "", "tool_calls": [wire_call]}
    return [asking, result, say("assistant", "Done.")]


def short_tasks(work: Workplace, part: str, count: int, calls: int) -> list[Json]:
    """Returns the shortest tasks of a part that need `calls` calls, each with two tools."""
    tasks = read_rows(work.folder / "data" / "agent_benchmark" / part / "train.jsonl")
    chosen = []
    for task in tasks:
        needed = [call["name"] for call in task["gold"].get("calls", [])]
        if len(needed) != calls or task.get("context"):
            continue
        others = [tool for tool in task["tools"] if tool["function"]["name"] not in needed]
        right = [tool for tool in task["tools"] if tool["function"]["name"] in needed]
        chosen.append(task | {"tools": [*right, *others][:2]})
    return sorted(chosen, key=lambda task: len(json.dumps(task)))[:count]


@job("rows", ("data-build",))
def write_training_rows(work: Workplace) -> Figures:
    """Tasks of the tool world, and dialogs that teach a model to guess among their answers."""
    tasks = short_tasks(work, "end_to_end", 2, calls=1) + short_tasks(work, "timing", 2, calls=0)
    answers = [call_tool(task["gold"]["calls"][0]) for task in tasks[:2]]
    answers.append([say("assistant", "Which one do you mean?")])
    answers.append([say("assistant", "I cannot do that.")])
    chance = random.Random(0)
    dialogs = []
    for number in range(400):
        task = tasks[number % len(tasks)]
        messages = [say("user", task["instruction"]), *chance.choice(answers)]
        tools = task["tools"] if number % 4 == 0 else []
        dialogs.append({"messages": messages, "tools": tools, "task_type": task["kind"]})
    write_rows(work.folder / "tasks.jsonl", tasks)
    write_rows(work.folder / "guesses.jsonl", dialogs)
    write_rows(work.folder / "first.jsonl", dialogs[:60])
    write_rows(work.folder / "second.jsonl", dialogs[60:120])
    write_preferences(work)
    return {name: sha256(work.folder / name) for name in ("tasks.jsonl", "guesses.jsonl")}


def write_preferences(work: Workplace) -> None:
    """Write pairs in which an X is better than a Y, and dialogs with a label per turn."""
    chance = random.Random(1)

    def answer(letter: str) -> Json:
        word = "".join(chance.choices("abcdefgh", k=chance.randint(2, 9)))
        return say("assistant", letter + word)

    pairs = []
    labelled = []
    for number in range(32):
        prompt = say("user", f"{number}?")
        pair = {"prompt": [prompt], "chosen": [answer("X")], "rejected": [answer("Y")]}
        labels = [chance.randint(0, 1) for _ in range(chance.randint(1, 3))]
        turns = [[prompt, answer("X" if label else "Y")] for label in labels]
        messages = [message for turn in turns for message in turn]
        pairs.append(pair)
        labelled.append({"messages": messages, "step_labels": labels})
    write_rows(work.folder / "pairs.jsonl", pairs)
    write_rows(work.folder / "labelled.jsonl", labelled)


# Training -----------------------------------------------------------------------------------------

FROM_PICO = ("--base-model", "pico")
FROM_SFT = ("--sft-model", "runs/sft-full-0")
ONE_BATCH = ("gradient_accumulation=1", "batch_size=8")
WHOLE = "full=true"
ADAPTER = ("lora_r=4", "lora_alpha=8")
GUESSES = ("--data", "guesses.jsonl", "lr_scheduler=linear", "learning_rate=6e-3")
TASKS = ("--data", "tasks.jsonl")
TOOL_WORLD = ("env=toolworld", "max_turns=3", "max_tokens=100", "learning_rate=1e-4")


def full_sft_job(seed: int, steps: int) -> Callable[[Workplace], Figures]:
    """Returns a job that trains every weight of `pico`; the first one can guess."""

    def run(work: Workplace) -> Figures:
        settings = (*FROM_PICO, *GUESSES, WHOLE, *ONE_BATCH)
        length = (f"max_steps={steps}", f"seed={seed}")
        return work.train("sft", f"sft-full-{seed}", *settings, *length)

    return run


for number, steps in enumerate((100, 12, 12)):
    name = f"sft-full-{number}"
    JOBS[name] = Job(name, full_sft_job(number, steps), ("model", "rows"))


@job("sft-lora", ("model", "data-build"))
def sft_adapter(work: Workplace) -> Figures:
    """An adapter, with weights per task type, accumulated gradients and a dev loss."""
    shares = json.dumps({"tool_selection": 0.6, "timing": 0.4})
    data = ("--data", "agent_sft:train", "--dev-data", "agent_sft:dev", "--task-weights", shares)
    steps = ("max_steps=4", "eval_steps=2", "batch_size=2", "gradient_accumulation=2")
    settings = (*FROM_PICO, *ADAPTER, "use_rslora=true", "learning_rate=1e-3", "seed=1")
    return work.train("sft", "sft-lora", *data, *steps, *settings)


@job("sft-coreset", ("model", "rows"))
def sft_coreset(work: Workplace) -> Figures:
    """An adapter with magnitudes (DoRA), on a chosen part of the rows."""
    chosen = ("use_coreset_selection=true", "coreset_target_size=24", "coreset_strategy=hybrid")
    settings = (*FROM_PICO, *ADAPTER, "use_dora=true", "learning_rate=1e-3", "max_steps=4")
    return work.train("sft", "sft-coreset", "--data", "first.jsonl", *chosen, *settings, *ONE_BATCH)


@job("sft-stream", ("model", "rows"))
def sft_stream(work: Workplace) -> Figures:
    """Two sources, one after the other, with rows of the first mixed into the second."""
    data = ("--data", "first.jsonl,second.jsonl", "use_online_continual=true", "num_epochs=1")
    settings = (*FROM_PICO, *ADAPTER, "learning_rate=1e-3", *ONE_BATCH)
    return work.train("sft", "sft-stream", *data, *settings)


@job("dpo-pairs", ("rows", "sft-full-0"))
def dpo_pairs(work: Workplace) -> Figures:
    """An adapter, held against the model that it starts from."""
    settings = (*FROM_SFT, *ADAPTER, *ONE_BATCH, "learning_rate=3e-3", "sft_weight=0.2")
    return work.train("dpo", "dpo-pairs", "--data", "pairs.jsonl", *settings)


@job("dpo-kto", ("rows", "sft-full-0"))
def dpo_kto(work: Workplace) -> Figures:
    """Every weight, held against another model."""
    settings = (*FROM_SFT, WHOLE, *ONE_BATCH, "learning_rate=1e-3", "loss_type=kto")
    other = ("reference_model=pico", "desirable_weight=1.3")
    return work.train("dpo", "dpo-kto", "--data", "pairs.jsonl", *settings, *other)


@job("dpo-online", ("rows", "sft-full-0"))
def dpo_online(work: Workplace) -> Figures:
    """Pairs that are sampled from tasks, in two rounds."""
    rounds = ("rounds=2", "num_samples=6", "update_reference=true", "seed=1")
    settings = (*FROM_SFT, *ADAPTER, *TASKS, *TOOL_WORLD, "batch_size=2")
    figures = work.train("dpo", "dpo-online", *settings, *rounds, "gradient_accumulation=1")
    for file in sorted((work.folder / "runs" / "dpo-online").glob("pairs*.jsonl")):
        figures |= hashed_columns(file.stem, read_rows(file))
    return figures


@job("reward-outcome", ("rows", "sft-full-0"))
def reward_outcome(work: Workplace) -> Figures:
    """A reward model of whole answers."""
    settings = ("--base-model", "runs/sft-full-0", *ONE_BATCH, "learning_rate=1e-3", WHOLE)
    centre = "center_rewards_coefficient=0.01"
    return work.train("reward", "reward-outcome", "--data", "pairs.jsonl", *settings, centre)


@job("reward-process", ("rows", "sft-full-0"))
def reward_process(work: Workplace) -> Figures:
    """A reward model of turns."""
    settings = ("--base-model", "runs/sft-full-0", *ONE_BATCH, "learning_rate=1e-3", *ADAPTER)
    data = ("--data", "labelled.jsonl", "--dev-data", "labelled.jsonl", "kind=process")
    return work.train("reward", "reward-process", *data, *settings)


def rl_figures(work: Workplace, verb: str, name: str, *settings: str) -> Figures:
    """Train on the tasks of the tool world. Returns metrics, weights and the newest episodes."""
    figures = work.train(verb, name, *FROM_SFT, *TASKS, *TOOL_WORLD, *settings)
    samples = read_rows(work.folder / "runs" / name / "samples.jsonl")
    return figures | hashed_columns("samples", samples)


@job("grpo-full", ("rows", "sft-full-0"))
def grpo_full(work: Workplace) -> Figures:
    """GRPO on every weight, with a reference and two passes over a step's samples."""
    size = ("max_steps=4", "tasks_per_step=4", "group_size=4", "updates_per_step=2")
    return rl_figures(work, "grpo", "grpo-full", *size, WHOLE, "beta=0.02")


@job("grpo-dapo", ("rows", "sft-full-0"))
def grpo_dapo(work: Workplace) -> Figures:
    """DAPO on an adapter, with a curriculum and renamed tools."""
    size = ("max_steps=3", "tasks_per_step=3", "group_size=4", "minibatches=2", "seed=1")
    method = ("variant=dapo", "curriculum=true", "perturb=[rename,shuffle]", "monitor=true")
    return rl_figures(work, "grpo", "grpo-dapo", *size, *method, *ADAPTER, "beta=0")


@job("ppo", ("rows", "sft-full-0"))
def ppo(work: Workplace) -> Figures:
    """PPO with its critic, on an adapter."""
    size = ("max_steps=3", "num_rollouts=12", "chunk_size=6", "critic_learning_rate=1e-3")
    return rl_figures(work, "ppo", "ppo", *size, *ADAPTER, "kl_coef=0.05")


# Merging ------------------------------------------------------------------------------------------

TUNED = ("runs/sft-full-0/final", "runs/sft-full-1/final", "runs/sft-full-2/final")
PICO = "cache/models/pico"
RECIPES: dict[str, Json] = {
    "linear": {"weights": (0.5, 0.3, 0.2), "parameters": {}},
    "slerp": {"weights": (None, None), "parameters": {"t": [0.2, 0.5, 0.7]}},
    "task_arithmetic": {"weights": (0.6, 0.5, 0.4), "parameters": {"lambda": 0.9}},
    "ties": {"weights": (0.6, 0.5, 0.4), "parameters": {"density": 0.4}},
    "dare_ties": {"weights": (0.6, 0.5, 0.4), "parameters": {"density": 0.6}},
    "della": {"weights": (0.6, 0.5, 0.4), "parameters": {"density": 0.6, "epsilon": 0.1}},
    "breadcrumbs": {"weights": (0.6, 0.5, 0.4), "parameters": {"density": 0.7, "gamma": 0.05}},
    "sce": {"weights": (None, None, None), "parameters": {"select_topk": 0.5}},
}
WITHOUT_BASE = ("linear",)


def merge_job(method: str) -> Callable[[Workplace], Figures]:
    """Returns a job that merges the fully trained models by one method."""

    def run(work: Workplace) -> Figures:
        about = RECIPES[method]
        models = []
        for path, weight in zip(TUNED, about["weights"], strict=False):
            parameters = {} if weight is None else {"weight": weight}
            models.append({"model": path, "parameters": parameters})
        recipe = {"merge_method": method, "models": models, "parameters": about["parameters"]}
        if method not in WITHOUT_BASE:
            recipe["base_model"] = TUNED[0] if method == "slerp" else PICO
        file = f"merge-{method}.yaml"
        (work.folder / file).write_text(yaml.safe_dump(recipe | {"dtype": "float32"}))
        work.sharpen("merge", file, f"merged-{method}", "--seed", "0", "--workers", "1")
        return weights(work.folder / f"merged-{method}")

    return run


for method in RECIPES:
    needs = ("model", "sft-full-0", "sft-full-1", "sft-full-2")
    JOBS[f"merge-{method}"] = Job(f"merge-{method}", merge_job(method), needs)


@job("merge-adapters", ("sft-lora", "sft-stream"))
def merge_adapters(work: Workplace) -> Figures:
    """One adapter from two, by their singular values."""
    adapters = ("runs/sft-lora/final", "runs/sft-stream/final")
    shares = ("--weight", "0.6", "--weight", "0.4", "--rank", "4")
    work.sharpen("merge", "adapters", *adapters, "--out", "merged-adapters", *shares)
    return weights(work.folder / "merged-adapters")


# Evaluation ---------------------------------------------------------------------------------------


HASHES = ("code", "weights")  # of the files of the code and of the model


def evaluate(work: Workplace, model: str, *settings: str) -> Figures:
    """Returns the items of an evaluation, and its intervals, field by field."""
    output = f"evaluation-{model.replace('/', '-').replace(':', '-')}"
    subject = ("--model", model, "--benchmark", "agent_benchmark:test", "--output", output)
    work.sharpen("evaluate", *subject, *settings)
    folder = work.folder / output
    items = read_rows(folder / "items.jsonl")
    items.sort(key=lambda item: (item["suite"], item["id"]))
    results = json.loads((folder / "results.json").read_text("utf-8"))
    results = {key: value for key, value in results.items() if key not in HASHES}
    return hashed_columns("items", items) | hashed_columns("results", [results])


@job("evaluate-model", ("data-build", "sft-full-0"))
def evaluate_model(work: Workplace) -> Figures:
    """The model that guesses."""
    return evaluate(work, "runs/sft-full-0", "--limit", "6", "max_tokens=32")


def baseline_job(name: str) -> Callable[[Workplace], Figures]:
    """Returns a job that evaluates a baseline; those after the first are compared with it."""

    def run(work: Workplace) -> Figures:
        other = ("--compare", "evaluation-baseline-gold") if name != "gold" else ()
        return evaluate(work, f"baseline:{name}", "--limit", "40", *other)

    return run


for baseline in ("gold", "random", "keyword"):
    name = f"evaluate-{baseline}"
    needs = ("data-build",) if baseline == "gold" else ("data-build", "evaluate-gold")
    JOBS[name] = Job(name, baseline_job(baseline), needs)


@job("evaluate-reward", ("data-build",))
def try_reward(work: Workplace) -> Figures:
    """The agent reward of gold answers and of empty ones."""
    output = work.sharpen("reward", "try", "agent_benchmark:dev", "--limit", "60", "--json")
    return hashed_columns("reward", last_json(output)["rows"])
