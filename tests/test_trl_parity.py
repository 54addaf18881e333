"""Our SFT loss, gradients and assistant mask, and the loss of reward models, against TRL's on the
same rows. TRL lives in .venv-oracle, which `scripts/oracle.sh` makes; without it these tests
fail."""

from __future__ import annotations

import json
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sharpen.data.generate.starter import starter_dialogs
from sharpen.models.load import LoRAConfig, ModelConfig, attach_lora, load_model, load_tokenizer
from sharpen.render import Renderer, hermes_template
from sharpen.rows import dialog_to_row
from sharpen.train.config.learner import LearnerConfig
from sharpen.train.config.reward_model import RewardModelConfig
from sharpen.train.learner import Learner
from sharpen.train.reward_model import RewardModelTrainer
from sharpen.train.sft import token_mean
from sharpen.train.values import ValueModel
from sharpen.types import Datum, Dialog, Message, ToolCall, ToolSpec

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
ORACLE = HERE.parent / ".venv-oracle" / "bin" / "python"
LORA = LoRAConfig(lora_r=4, lora_alpha=8, lora_dropout=0.0)
# TRL has training copies of these, with {% generation %} markers; ours has its own
TEMPLATES = ("hermes", "qwen2_5", "qwen3_instruct_2507")
TOKENIZERS = ("pico", "smollm2-135m")
REWARDS = (("full reward", "full", 0.0), ("lora reward", "lora", 0.0), ("centred", "full", 0.05))


def call(name: str, **arguments) -> ToolCall:
    return ToolCall(name, arguments)


def dialogs() -> list[Dialog]:
    """No turn begins with white space: TRL tokenises it together with the prompt's last line break,
    which no sampling does, and then even the ids differ."""
    weather = ToolSpec("weather", "Weather of a city.", {"type": "object", "properties": {}})
    clock = ToolSpec("clock", "现在的时间", {"type": "object", "properties": {}})
    says = lambda text, *calls: Message("assistant", text, calls)  # noqa: E731
    asks, tool = lambda text: Message("user", text), lambda text: Message("tool", text)
    system = Message("system", "Be brief.")
    several = (
        *(system, asks("Weather in Oslo and Bergen?")),
        says("", call("weather", city="Oslo", days=2), call("weather", city="Bergen", when=None)),
        *(tool('{"c": 3}'), tool('{"c": 5}'), says("Oslo 3, Bergen 5.\n")),
        *(asks("几点了？"), says("我看一下。", call("clock", zone="北京", exact=True))),
        *(tool("12:05\n"), says("12:05。"), asks("Thanks"), says("You are welcome.  ")),
    )
    plain = (asks("Hello"), says("Hello!"), asks("And\n\nnow?"), says("- one\n- two\n\nThree."))
    return [
        Dialog(several, (weather, clock), "several"),
        Dialog(plain, (), "plain"),
        *starter_dialogs("train", 6),
    ]


@pytest.fixture(scope="module")
def tokenizers(pico_folder, tmp_path_factory) -> dict:
    """Each tokenizer with each template, and its folder. What the makers of Qwen ship is taken from
    TRL's package, which has it to know the models by."""
    found = {}
    shipped = next(ORACLE.parents[1].glob("lib/python*/site-packages/trl/chat_templates"))
    for name in TOKENIZERS:
        for template in TEMPLATES:
            tokenizer = load_tokenizer(str(pico_folder) if name == "pico" else name)
            if template == "hermes":
                tokenizer.chat_template = hermes_template()
            else:
                tokenizer.chat_template = (shipped / f"{template}.jinja").read_text()
            folder = tmp_path_factory.mktemp("tokenizer")
            tokenizer.save_pretrained(folder)
            found[name, template] = tokenizer, folder
    return found


@pytest.fixture(scope="module")
def adapter(pico_folder, tmp_path_factory) -> Path:
    """An adapter whose B is not zero, so that every gradient says something."""
    model = load_model(ModelConfig(base_model=str(pico_folder), device="cpu"))
    torch.manual_seed(0)
    model = attach_lora(model, LORA)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(pico_folder) -> list[Datum]:
    return list(Renderer(load_tokenizer(str(pico_folder))).render(dialogs()))


@pytest.fixture(scope="module")
def pairs(pico_folder, tmp_path_factory) -> list:
    """Each dialog against the next one, of other lengths, as our trainer reads them."""
    found = dialogs()
    data = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    lines = []
    for one, other in pairwise(found):
        sides = (dialog_to_row(one)["messages"], dialog_to_row(other)["messages"])
        row = {"prompt": [{"role": "system", "content": "S"}], "chosen": sides[0][1:]}
        lines.append(json.dumps(row | {"rejected": sides[1][1:]}) + "\n")
    data.write_text("".join(lines))
    return scorer(str(pico_folder), data).read(str(data))


def scorer(base: str, data: Path | str = "", **more) -> RewardModelTrainer:
    adapter = LORA.model_dump(exclude={"lora_dropout"})  # a reward model has none
    given = {"base_model": base, "train_data": str(data), "device": "cpu", **adapter}
    return RewardModelTrainer(RewardModelConfig(**given, **more))


@pytest.fixture(scope="module")
def scorers(pico_folder, tmp_path_factory) -> dict[str, Path]:
    """A classifier and an adapter of one, both with weights that say something."""
    folders = {}
    for kind in ("full", "lora"):
        learner = scorer(str(pico_folder), full=kind == "full").make_learner(1)
        for name, parameter in learner.model.named_parameters():
            if "lora_B" in name or "score" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        folders[kind] = tmp_path_factory.mktemp(kind)
        learner.model.save_pretrained(folders[kind])
        load_tokenizer(str(pico_folder)).save_pretrained(folders[kind])
    return folders


@pytest.fixture(scope="module")
def answers(pico_folder, adapter, rows, tokenizers, pairs, scorers, tmp_path_factory) -> tuple:
    """All questions in one process: TRL takes longer to import than to answer."""
    work = tmp_path_factory.mktemp("trl")
    labelled = [
        {"input_ids": d.ids.tolist(), "labels": np.where(d.mask, d.ids, -100).tolist()}
        for d in rows
    ]
    jobs: dict = {}
    for name, path in (("full", ""), ("lora", str(adapter))):
        files = {key: str(work / f"{name}-{key}.safetensors") for key in ("whole", "split")}
        jobs[name] = {"method": "sft", "model": str(pico_folder), "adapter": path, **files}
        jobs[name] |= {"rows": labelled, "micro": 2}
    wire = [dialog_to_row(d) for d in dialogs()]
    for (name, template), (_, folder) in tokenizers.items():
        job = {"method": "mask", "model": str(pico_folder), "adapter": "", "rows": wire}
        jobs[f"{name} {template}"] = job | {"tokenizer": str(folder)}
    for name, kind, center in REWARDS:
        folder, told = scorers[kind], {"method": "reward", "center": center}
        jobs[name] = told | {"model": str(folder if kind == "full" else pico_folder)}
        jobs[name] |= {"adapter": "" if kind == "full" else str(folder)}
        jobs[name] |= {
            "whole": str(work / f"{name}.safetensors"),
            "rows": [
                {"chosen_ids": a.ids.tolist(), "rejected_ids": b.ids.tolist()} for a, b in pairs
            ],
        }
    (work / "jobs.json").write_text(json.dumps(jobs))
    command = [str(ORACLE), str(HERE / "support" / "oracle_trl.py"), str(work / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return jobs, json.loads((work / "answer.json").read_text())


def close(found: dict[str, torch.Tensor], path: str) -> None:
    wanted = load_file(path)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("budget", [100_000, 1500])
def test_sft_loss_and_gradients(answers, pico_folder, adapter, rows, kind, budget):
    """In one batch and cut anyhow, our step is TRL's whole batch and TRL's accumulated step."""
    jobs, told = answers
    base = str(adapter if kind == "lora" else pico_folder)
    model = load_model(ModelConfig(base_model=base, device="cpu"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad = kind == "full" or "lora_" in name
    learner = Learner(model, LearnerConfig(token_budget=budget), 1)
    loss = learner.accumulate(rows, token_mean, float(sum(d.mask[1:].sum() for d in rows)))
    found = {n: p.grad for n, p in learner.trained.items()}
    for way in ("whole", "split"):
        assert loss == pytest.approx(told[kind][way], rel=1e-5)
        close(found, jobs[kind][way])


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_assistant_mask(answers, tokenizers, name, template):
    """Ours is what the model samples. TRL's copies of foreign templates also mark line breaks that
    the template writes around a turn; nothing else differs."""
    renderer = Renderer(tokenizers[name, template][0])
    assert (renderer.template is None) == (template == "hermes")
    ours = list(renderer.render(dialogs()))
    for datum, theirs in zip(ours, answers[1][f"{name} {template}"], strict=True):
        ids, labels = np.array(theirs["input_ids"]), np.array(theirs["labels"])
        behind = renderer.tokenizer.decode(ids[len(datum.ids) :])
        assert ids[: len(datum.ids)].tolist() == datum.ids.tolist() and behind.strip() == ""
        marked = (labels != -100)[: len(datum.ids)]
        assert not (datum.mask & ~marked).any()
        extra = renderer.tokenizer.decode(datum.ids[marked & ~datum.mask])
        assert extra.strip("\n") == "" and (template != "hermes" or not extra)


@pytest.mark.parametrize(("name", "kind", "center"), REWARDS)
@pytest.mark.parametrize("budget", [100_000, 1500])
def test_reward_loss_and_gradients(answers, scorers, pairs, name, kind, center, budget):
    """Our two passes, however the pairs are cut, are TRL's one batch."""
    jobs, told = answers
    model = load_model(
        ModelConfig(base_model=str(scorers[kind]), device="cpu"), "SequenceClassification"
    )
    for key, parameter in model.named_parameters():
        parameter.requires_grad = kind == "full" or "lora_" in key or "modules_to_save" in key
    trainer = scorer(str(jobs[name]["model"]), center_rewards_coefficient=center, clip_norm=1e9)
    settings = LearnerConfig(token_budget=budget, clip_norm=1e9)
    trainer.learner = Learner(model, settings, 1, ValueModel(model))
    found = {}
    trainer.learner.before_clip = [
        lambda learner: found.update({n: p.grad.clone() for n, p in learner.trained.items()})
    ]
    assert trainer.step(pairs)["loss"] == pytest.approx(told[name], rel=1e-5)
    close(found, jobs[name]["whole"])
