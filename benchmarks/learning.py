"""What GRPO adds to SFT: SmolLM2-135M on tasks of tools that it never saw, three seeds, one GPU.

    python benchmarks/learning.py FOLDER --stage data                    # a minute or two of CPU
    python benchmarks/learning.py FOLDER --parallel --budget-minutes 20  # all that is not there yet

`data`: `agent_sft`, as it is and twice with its tools in other words, and three sets of tasks built
like `extended` in its own shares (in 18 of 100 nothing is to be called): to train on, from the
train split's tools; for the curves and to evaluate on, from the dev split's. Tools that are shown
in other words have to be read, as those of dev have to be. `sft`: an adapter; the checkpoint that
does most curve tasks is kept. `grpo`: every weight, from there on, a process a seed, most tasks in
other words and with other keys; the best on the curve tasks is kept. `measure`: greedy answers; a
task is done when its calls leave and find out what gold's do, or when there is none and the answer
decides as gold does. `out/` gets learning.json, learning.png and what they are made of.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
from learning_report import PARTS, report

from sharpen.config import load_yaml
from sharpen.data.generate.build import divide_by_shares, fill_file, start_workers
from sharpen.data.generate.draw import BuiltFile
from sharpen.data.generate.guard import Guard
from sharpen.data.generate.sets import parts
from sharpen.data.sources import read_dialogs, read_tasks
from sharpen.envs.find import find_environment
from sharpen.envs.perturb import Perturbation
from sharpen.records import RunFolder, atomic_folder, write_jsonl
from sharpen.rewards.agent import PENALTIES, WEIGHTS, AgentRewardModel
from sharpen.rows import dialog_to_row, message_to_wire, task_to_row
from sharpen.scored_rollout import PlaySettings, score_trajectories
from sharpen.scored_rollout import play as play_tasks
from sharpen.train.callback import EvaluationContext
from sharpen.train.config.grpo import GRPOConfig
from sharpen.train.config.sft import AgentSFTConfig
from sharpen.train.grpo import GRPOTrainer
from sharpen.train.run import Interrupted
from sharpen.types import Dialog, Json, Sampling, Score, Task, Trajectory
from sharpen.world.episode import shipped_world

STAGES = ("data", "sft", "grpo", "measure")
FOREVER = float("inf")
SEED = 1  # the built sets have 0
# the end state, and something for coming near to gold's calls
EARNED = dict.fromkeys(WEIGHTS, 0.0) | {"task_completion": 0.7, "tool_accuracy": 0.3}
REWARD = {"weights": EARNED, "penalties": dict.fromkeys(PENALTIES, 0.0)}
RUN: Json = {"save_steps": 1_000_000, "keep_checkpoints": 1}
SFT = RUN | {"learning_rate": 1e-3, "num_epochs": 1, "lora_r": 64, "lora_alpha": 128}
SFT |= {"token_budget": 32768, "max_length": 2048, "eval_steps": 100}
GRPO = RUN | {"full": True, "learning_rate": 4e-5, "lr_scheduler": "linear", "warmup_ratio": 0.05}
# what is measured is the greedy answer: samples near it differ in what decides it
GRPO |= {"variant": "dr_grpo", "beta": 0.0, "clip_high": 0.28, "temperature": 0.7}
GRPO |= {"tasks_per_step": 64, "group_size": 16, "minibatches": 4, "trust_sampler": True}
GRPO |= {"rollout_rows": 384, "token_budget": 12288, "max_steps": 200, "eval_steps": 20}
GRPO |= {
    "max_tokens": 192,
    "max_turns": 7,
    "max_length": 3072,
    "env": "toolworld",
    "min_dev_score": 0.0,
}
GRPO |= {"curriculum": True, "perturb": ["reword", "rekey"], "perturb_share": 0.8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("folder", type=Path)
    add("--stage", nargs="+", choices=STAGES, default=STAGES)
    add("--seeds", nargs="+", default=["0", "1", "2"])
    add("--model", default="smollm2-135m")
    add("--gguf", type=Path, help="make the model from this file instead")
    add("--parallel", action="store_true", help="all seeds at once")
    add("--budget-minutes", type=float, default=FOREVER, help="of a seed: as many steps as fit")
    add("--tasks", type=int, nargs=3, default=[8000, 600, 1000], help="train, curve, evaluate")
    add("--sft", nargs="*", default=[], help="settings as key=value")
    add("--grpo", nargs="*", default=[], help="settings as key=value")
    add("--one", default="", help=argparse.SUPPRESS)  # a process's own share
    options = parser.parse_args()
    if options.one:
        return {"grpo": train_grpo, "measure": measure}[options.stage[0]](options, options.one)
    names = [f"grpo-{seed}" for seed in options.seeds]
    for stage in (stage for stage in STAGES if stage in options.stage):
        began = time.monotonic()
        if stage == "grpo":
            in_processes(options, stage, {name: f"{name}/final" for name in names})
        elif stage != "measure":
            {"data": build_data, "sft": train_sft}[stage](options)
        else:
            in_processes(options, stage, {n: f"items-{n}.jsonl" for n in ("sft", *names)})
            report(options.folder, ["sft", *names])
        print(f"{stage}: {time.monotonic() - began:.0f} s", flush=True)


def in_processes(options: Any, stage: str, ends: dict[str, str]) -> None:
    """A process for each that has not left its file yet, with its log in FOLDER."""
    failed = []
    running = []
    for name in (name for name in ends if not (options.folder / ends[name]).exists()):
        log = options.folder / f"{name}-{stage}.log"
        command = [sys.executable, *sys.argv, "--stage", stage, "--one", name]
        with open(log, "ab") as file:
            running.append((log, subprocess.Popen(command, stdout=file, stderr=file)))
        if not options.parallel:
            running[-1][1].wait()
    for log, process in running:
        if process.wait():
            failed.append(f"{log}: {log.read_text(errors='replace')[-2000:]}")
    if failed:
        sys.exit("\n".join(failed))


def build_data(options: Any) -> None:
    folder = options.folder / "data"
    archive = options.folder / "data.tar.xz"
    if folder.is_dir():
        return
    if archive.is_file():
        with tarfile.open(archive) as packed, atomic_folder(folder) as work:
            return packed.extractall(work, filter="data")
    dialogs = {name: list(read_dialogs(f"agent_sft:{name}")) for name in ("train", "dev")}
    guard = Guard()  # nothing is asked of the dev tools as SFT or the training tasks ask it
    for dialog in dialogs["train"]:
        guard.admit(dialog, "train", "sft")
    sets = draw_tasks(options.tasks, guard)
    check_apart(sets, dialogs["train"])
    with atomic_folder(folder) as work:
        for name, tasks in sets.items():
            write_jsonl(work / f"{name}.jsonl", map(task_to_row, tasks))
        for name, rows in {**dialogs, "train": in_other_words(dialogs["train"])}.items():
            write_jsonl(work / f"sft_{name}.jsonl", map(dialog_to_row, rows))
    with tarfile.open(archive, "w:xz") as packed:
        packed.add(folder, "")
    print({name: len(tasks) for name, tasks in sets.items()}, f"{archive.stat().st_size >> 10} KiB")


def in_other_words(dialogs: Sequence[Dialog]) -> list[Dialog]:
    """The dialogs, and each twice with its tools named in words of their descriptions."""
    told = [*dialogs]
    tasks = [Task(dialog.id, "", dialog.tools) for dialog in dialogs]
    for seed in (1, 2):
        changed = Perturbation(tasks, ["reword"], seed)
        told += [replace(changed.dialog(d), id=f"{d.id}-{seed}") for d in dialogs]
    return told


def draw_tasks(counts: Sequence[int], guard: Guard) -> dict[str, list[Task]]:
    train, *dev = (count // len(PARTS) for count in counts)
    sets: dict[str, list[Task]] = {name: [] for name in ("train", "curve", "evaluate")}
    asked = set[str]()
    with start_workers(0, shipped_world()) as run:
        for split, part in product(("dev", "train"), PARTS):
            shares = {kind: about.share for kind, about in parts()[part].kinds.items()}
            quotas = divide_by_shares(train, shares)
            wanted = [divide_by_shares(count, shares) for count in dev]
            if split == "dev":  # some ask the same in two parts
                quotas = {kind: sum(w[kind] for w in wanted) * 6 // 5 + 2 for kind in shares}
            file = BuiltFile(f"learning_{split}/{part}.jsonl", split, quotas, part, extended=True)
            rows: Any = fill_file(file, SEED, guard, run, lambda _: None)
            if split == "train":
                sets["train"] += rows
                continue
            for kind, first in wanted[0].items():
                found = [task for task in rows if task.metadata["variant"] == kind]
                found = [task for task in found if folded(task) not in asked]
                asked |= {*map(folded, found)}
                both = first + wanted[1][kind]
                assert len(found) >= both, f"{part}: too few of {kind}"
                sets["curve"] += found[:first]
                sets["evaluate"] += found[first:both]
    return sets


def check_apart(sets: dict[str, list[Task]], dialogs: Sequence[Any]) -> None:
    """No task stands twice, no request in two sets, and no tool is both trained and tested."""
    ids = [task.id for tasks in sets.values() for task in tasks]
    assert len(ids) == len({*ids}), "a task stands twice"
    said = {name: {*map(folded, sets[name])} for name in ("train", "curve", "evaluate")}
    said["train"] |= {folded(m) for d in dialogs for m in d.messages if m.role == "user"}
    for one, other in combinations(said, 2):
        same = said[one] & said[other]
        assert not same, f"{one} and {other} share {len(same)} requests: {min(same)!r}"
    known = {tool.name for rows in (dialogs, sets["train"]) for row in rows for tool in row.tools}
    for name in ("curve", "evaluate"):
        shared = known & {tool.name for task in sets[name] for tool in task.tools}
        assert not shared, f"{name} has tools that are trained on: {min(shared)}"


def folded(said: Any) -> str:
    text = said.instruction if isinstance(said, Task) else said.content
    return " ".join(text.casefold().split())


def play(policy: Any, data: Path) -> list[Json]:
    """Greedy answers to the tasks of a file and what became of them, with the tasks' kinds."""
    tasks = list(read_tasks(str(data)))
    how = PlaySettings(
        AgentRewardModel(REWARD),
        Sampling(GRPO["max_tokens"]),
        find_environment(GRPO["env"]),
        GRPO["max_turns"],
    )
    trajectories = play_tasks(policy, tasks, how)
    scores = score_trajectories(tasks, trajectories, how.reward)
    return [outcome(*item) for item in zip(tasks, trajectories, scores, strict=True)]


def outcome(task: Task, trajectory: Trajectory, score: Score) -> Json:
    """One task's row: what was answered, what it is worth, and what kind of task it was."""
    turns = trajectory.turns
    return {
        "id": task.id,
        "stop": trajectory.stop.value,
        "value": score.value,
        **score.parts,
        "feedback": score.feedback,
        "answer": message_to_wire(turns[-1].message) if turns else {},
        "turns": len(turns),
        "unparsed": [call.raw for turn in turns for call in turn.message.unparsed],
        "tokens": sum(len(turn.ids) for turn in turns),
        "needs": "calls" if "state" in task.gold else "decisions",
        "kind": task.kind,
        "difficulty": task.difficulty,
    }


def train_sft(options: Any) -> None:
    from sharpen.models.smollm2 import build_smollm2
    from sharpen.train.sft import AgentSFTTrainer

    folder = options.folder
    data = options.folder / "data"
    if (folder / "sft/final").is_dir():
        return
    if options.gguf and not (folder / "model").is_dir():
        with atomic_folder(folder / "model") as work:
            build_smollm2(work, options.gguf)
    base = str(folder / "model") if options.gguf else options.model
    given = SFT | {"base_model": base, "train_data": str(data / "sft_train.jsonl")}
    given |= {"dev_data": str(data / "sft_dev.jsonl")} | load_yaml(None, options.sft)

    def metric(context: EvaluationContext) -> float:
        rows = play(context.policy, data / "curve.jsonl")
        return float(np.mean([row["task_completion"] for row in rows]))

    print(AgentSFTTrainer(AgentSFTConfig(**given), folder / "sft", metric).train())


class Timed(GRPOTrainer):
    """As many steps as its time allows: the learning rate reaches its end when that does."""

    until = FOREVER
    ends: tuple[float, ...] = ()  # of the newest steps

    def learn(self, groups: Any, state: Json) -> Json:
        row = super().learn(groups, state)
        now = time.monotonic()
        done = self.learner.steps_done // self.config.updates
        self.ends = (*self.ends, now)[-9:]
        left = self.total_steps - done
        if now > self.until:
            left = 0
            os.kill(os.getpid(), signal.SIGTERM)
        elif len(self.ends) == 9 and self.until < FOREVER:
            pace = (now - self.ends[0]) / 8
            left = min(self.config.max_steps - done, max(int((self.until - now) / pace), 1))
        self.total_steps = done + left
        self.learner.total_steps = self.total_steps * self.config.updates
        return row


def train_grpo(options: Any, name: str) -> None:
    data = options.folder / "data"
    output = options.folder / name
    given = GRPO | {"base_model": str(options.folder / "sft/final"), "seed": int(name[5:])}
    given |= {"train_data": str(data / "train.jsonl"), "dev_data": str(data / "curve.jsonl")}
    config = GRPOConfig(**(given | load_yaml(None, options.grpo)))
    print("gate: not asked, for the question is what GRPO adds", flush=True)
    trainer = Timed(config, output, AgentRewardModel(REWARD))
    trainer.until = time.monotonic() + 60 * options.budget_minutes
    try:
        trainer.train()
    except Interrupted:
        if time.monotonic() < trainer.until:
            raise
        trainer.finish(RunFolder(output, config))


def measure(options: Any, name: str) -> None:
    from sharpen.models.load import ModelConfig
    from sharpen.policy.local import LocalPolicy

    policy = LocalPolicy.load(ModelConfig(base_model=str(options.folder / name / "final")))
    rows = []
    kept = ("id", "needs", "kind", "difficulty", "task_completion", "stop", "turns")
    for part in ("evaluate", *(("curve",) if name == "sft" else ())):
        found = play(policy, options.folder / "data" / f"{part}.jsonl")
        if part == "evaluate":  # to be looked at
            failed = [row for row in found if not row["task_completion"]]
            write_jsonl(options.folder / f"failed-{name}.jsonl", failed)
        rows += [{"set": part} | {key: row[key] for key in kept} for row in found]
    write_jsonl(options.folder / f"items-{name}.jsonl", rows)


if __name__ == "__main__":
    main()
