"""TRL's side of `test_trl_parity.py` and `test_dpo.py`, run by .venv-oracle's python:
`oracle_trl.py JOB.json`.

Every figure comes out of TRL's own trainers: their preparation of rows, their collators, their
`compute_loss`, and for accumulated steps their `train()`. Losses and labels are written to
`answer.json` beside the job, gradients to the safetensors files that the job names.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer


class Gradients(TrainerCallback):
    """Keeps what the optimiser is about to step with."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found = gradients(kwargs["model"])


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def plain(folder: str, **more: Any) -> dict[str, Any]:
    """Settings that change no figure, and one step of fp32 without clipping."""
    settings = {"output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none"}
    settings |= {"gradient_checkpointing": False, "max_grad_norm": 0.0, "max_steps": 1}
    settings |= {"save_strategy": "no", "disable_tqdm": True, "max_length": None}
    return settings | more


def load(kind: Any, job: dict[str, Any], **more: Any) -> Any:
    model = kind.from_pretrained(job["model"], dtype=torch.float32, **more)
    if job["adapter"]:
        model = PeftModel.from_pretrained(model, job["adapter"], is_trainable=True)
    return model


def sft(job: dict[str, Any], work: str) -> dict[str, float]:
    """The loss of all rows as one batch, and of one accumulated step over micro-batches of
    `micro` rows."""
    rows, tokenizer = job["rows"], AutoTokenizer.from_pretrained(job["model"])
    answer = {}
    for name, size in (("whole", len(rows)), ("split", job["micro"])):
        model = load(AutoModelForCausalLM, job)
        settings = plain(work, shuffle_dataset=False, per_device_train_batch_size=size)
        settings["gradient_accumulation_steps"] = len(rows) // size
        kept = Gradients()
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(**settings),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[kept],
        )
        if name == "whole":
            batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(rows))])
            loss = trainer.compute_loss(trainer.model.train(), batch)
            loss.backward()
            answer[name], kept.found = loss.item(), gradients(model)
        else:
            answer[name] = trainer.train().training_loss
        save_file(kept.found, job[name])
    return answer


def reward(job: dict[str, Any], work: str) -> float:
    """The loss of all pairs as one batch."""
    model = load(AutoModelForSequenceClassification, job, num_labels=1)
    center = job["center"] or None
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(**plain(work, center_rewards_coefficient=center)),
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
    )
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(job["rows"]))])
    loss = trainer.compute_loss(trainer.model.train(), batch)
    loss.backward()
    save_file(gradients(model), job["whole"])
    return loss.item()


def policy(job: dict[str, Any], work: str) -> float:
    """The loss of samples with given advantages and log-probabilities, one batch of them."""
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    rloo, model = job["variant"] == "rloo", load(AutoModelForCausalLM, job)
    settings = plain(work, per_device_train_batch_size=len(job["rows"]), num_generations=2)
    settings = {k: v for k, v in settings.items() if k != "max_length"} | job["settings"]
    trainer = (RLOOTrainer if rloo else GRPOTrainer)(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=(RLOOConfig if rloo else GRPOConfig)(**settings),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * len(job["rows"])),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
    )
    trainer.current_gradient_accumulation_steps = 1
    columns: dict[str, list[torch.Tensor]] = {}
    for row in job["rows"]:
        for name, values in row.items():
            columns.setdefault(name, []).append(torch.tensor(values))
    inputs = {}
    for name, rows in columns.items():
        side = "left" if name == "prompt_ids" else "right"
        inputs[name] = torch.nn.utils.rnn.pad_sequence(rows, True, 0, side)
        if name.endswith("_ids"):
            ones = [torch.ones_like(row) for row in rows]
            mask = torch.nn.utils.rnn.pad_sequence(ones, True, 0, side)
            inputs[name.replace("_ids", "_mask")] = mask
    inputs["advantages"] = torch.tensor(job["advantages"])
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    if rloo:
        inputs["old_logps"] = inputs["old_per_token_logps"].sum(1)
    loss = trainer.compute_loss(trainer.model.train(), inputs)
    loss.backward()
    save_file(gradients(model), job["whole"])
    return loss.item()


def mask(job: dict[str, Any], work: str) -> list[dict[str, list[int]]]:
    """Ids and labels of `assistant_only_loss`."""
    trainer = SFTTrainer(
        model=load(AutoModelForCausalLM, job),
        args=SFTConfig(**plain(work, shuffle_dataset=False, assistant_only_loss=True)),
        train_dataset=Dataset.from_list(job["rows"], on_mixed_types="use_json"),
        processing_class=AutoTokenizer.from_pretrained(job["tokenizer"]),
    )
    return [{key: row[key] for key in ("input_ids", "labels")} for row in trainer.train_dataset]


def preference(job: dict[str, Any], work: str) -> float:
    """The loss of all pairs as one batch. Pairs are ids; the trainers' own collators take them."""
    trainers = {"dpo": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig)}
    trainers |= {"cpo": (CPOTrainer, CPOConfig), "orpo": (ORPOTrainer, ORPOConfig)}
    kind, config = trainers[job["trainer"]]
    model, more = load(AutoModelForCausalLM, job), {}
    if job["trainer"] in ("dpo", "kto"):
        more["ref_model"] = load(AutoModelForCausalLM, job | {"model": job["reference"]})
    trainer = kind(
        model=model,
        args=config(**plain(work, **job["settings"])),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        **more,
    )
    rows = [{f"{side}_ids": ids for side, ids in row.items()} for row in job["rows"]]
    if job["trainer"] == "kto":  # unpaired, and each prompt with the answer before, as TRL does it
        sides = [(row, side) for side in ("chosen", "rejected") for row in rows]
        answers = [row[f"{side}_ids"] for row, side in sides]
        rows = [
            {"prompt_ids": row["prompt_ids"], "completion_ids": own, "KL_completion_ids": other}
            | {"label": side == "chosen"}
            for (row, side), own, other in zip(
                sides, answers, answers[-1:] + answers[:-1], strict=True
            )
        ]
    elif job["trainer"] != "dpo":
        rows = [
            {
                f"{side}_{name}": values
                for side in ("chosen", "rejected")
                for name, values in labelled(row["prompt_ids"], row[f"{side}_ids"]).items()
            }
            for row in rows
        ]
    loss = trainer.compute_loss(trainer.model.train(), trainer.data_collator(rows))
    loss.backward()
    save_file(gradients(model), job["whole"])
    return loss.item()


def labelled(prompt: list[int], answer: list[int]) -> dict[str, list[int]]:
    ids = prompt + answer
    labels = [-100] * len(prompt) + answer
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


def main() -> None:
    path = Path(sys.argv[1])
    methods = {"sft": sft, "reward": reward, "mask": mask, "preference": preference}
    methods["policy"] = policy
    jobs = json.loads(path.read_text())
    answers = {
        name: methods[job["method"]](job, str(path.with_name("trl"))) for name, job in jobs.items()
    }
    path.with_name("answer.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
