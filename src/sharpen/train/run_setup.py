"""What every training run does before its first step and after its last one: open the run folder,
make a model trainable, save it, and let the best weights become `final/`.

All trainers call it.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sharpen.data.sources import resolve
from sharpen.models.load import attach_lora
from sharpen.records import RunFolder, atomic_folder, read_json, sha256_file
from sharpen.render import Renderer, hermes_template
from sharpen.train.config.run import RunConfig
from sharpen.train.learner import Learner
from sharpen.train.run import first_process
from sharpen.types import Json, SharpenError

POLICY_ADAPTER = "default"  # the name that PEFT gives to an adapter that is trained
_BEST = "best"  # the folder of the best weights so far
_FINAL = "final"
_SaveModel = Callable[[Path], None]


def open_folder(folder: Path, config: RunConfig) -> None:
    """Refuse the folder of another run, or a full disk, before anything is loaded."""
    if not first_process():
        return
    hashes = {}
    for source in config.train_data.split(","):
        for path in resolve(source):
            hashes[path.name] = sha256_file(path)
    RunFolder(folder, config, hashes)
    _check_disk(folder, config)


def _check_disk(folder: Path, config: RunConfig) -> None:
    """Refuse before the first step what would fill the disk at a later one."""
    from sharpen.models.estimate import shape_of
    from sharpen.models.find import find_model

    base = find_model(config.base_model)
    if not (base / "config.json").is_file():
        return
    shape = shape_of(read_json(base / "config.json"), str(base))
    if config.full:
        parameters = shape.parameters()
    else:
        parameters = shape.lora_parameters(config.lora_r, config.lora_target_modules)
    # a checkpoint holds fp32 weights and two moments; a saved model and its copy come on top
    needed = parameters * (12 * (config.keep_checkpoints + 1) + 8)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise SharpenError(
            f"{folder}: checkpoints need about {needed >> 20} MiB, the disk has {free >> 20} MiB"
        )


def make_trainable(model: Any, config: RunConfig) -> Any:
    """Returns the model with all weights trainable, or with a fresh adapter."""
    import torch

    if config.full:
        return model.requires_grad_(True)
    torch.manual_seed(config.seed)  # the first weights of the adapter are random
    return attach_lora(model, config)


def save_trained(
    learner: Learner, renderer: Renderer, path: str | Path, whole: bool = False
) -> None:
    """Save what was trained, with tokenizer and template: an adapter, or a whole model.

    `whole` merges the adapter into a copy of its base first; the CPU's memory then holds a second
    model for a moment.
    """
    weights = learner.weights()  # of all processes, before the first one writes
    if learner.processes.rank:
        return
    model = learner.model
    tokenizer = renderer.tokenizer
    if renderer.template is None:
        tokenizer.chat_template = hermes_template()
    with atomic_folder(path) as work:
        if whole and hasattr(model, "merge_and_unload"):
            model_copy = copy.deepcopy(model.to("cpu"))
            model.to(learner.device)
            model_copy.merge_and_unload().save_pretrained(work)
        elif hasattr(model, "peft_config"):
            # a frozen reference adapter on the same base is not part of the result
            model.save_pretrained(work, state_dict=weights, selected_adapters=[POLICY_ADAPTER])
        else:
            model.save_pretrained(work, state_dict=weights)
        tokenizer.save_pretrained(work)


def keep_best(value: float, state: Json, output: Path, save_model: _SaveModel) -> bool:
    """Save the weights as `best/` if `value` is the highest so far, which `state["best"]` holds.
    Returns whether it is. Every process has to call it with the same value."""
    if state["best"] is not None and value <= state["best"]:
        return False
    state["best"] = value
    save_model(output / _BEST)
    return True


def finish_with_best(output: Path, save_model: _SaveModel) -> None:
    """Make `final/`: the best weights where they were measured, otherwise the last ones."""
    best = output / _BEST
    if not best.is_dir():
        save_model(output / _FINAL)
    elif first_process():
        with atomic_folder(output / _FINAL) as work:
            shutil.copytree(best, work, dirs_exist_ok=True)
