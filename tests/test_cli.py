"""The command: verbs, JSON, one-line errors with exit 2, help with examples."""

from __future__ import annotations

import json

import pytest

from sharpen.cli.main import VERBS, load_verb
from sharpen.train.methods import METHODS
from small_quickstart import SMALL

ROW = {
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
    ]
}


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["run", "nope"], "no shipped recipe of that name"),
        (["run", "quickstart", "modle=x"], "did you mean 'model'"),
        (["run", "quickstart", "model"], "expected key=value"),
        (["run", "quickstart", "--outt", "x"], "No such option: --outt"),
        (["models", "pull", "nope"], "known names"),
        (["estimate"], "name a recipe, or ask for --table"),
        (["estimate", "production", "batchsize=1"], "did you mean 'batch_size'"),
        (["data", "preview", "gone.jsonl"], "gone.jsonl: No such file"),
        (["train", "sft", "--group-size", "4"], "No such option: --group-size"),
        (["train", "ppo", "--beta", "0.1"], "No such option: --beta"),
        (["train", "grpo", "groupsize=4"], "did you mean 'group_size'"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(sharpen, tmp_path, monkeypatch, args, problem):
    monkeypatch.chdir(tmp_path)
    code, _, err = sharpen(*args)
    assert code == 2
    assert err.startswith("error: ") and err.count("\n") == 1 and problem in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_run_and_preview(sharpen, tmp_path, pico_folder):
    out = tmp_path / "run"
    code, text, err = sharpen(
        "run", "quickstart", f"model={pico_folder}", *SMALL, "--out", str(out), "--json"
    )
    assert code == 0, err
    result = json.loads(text.splitlines()[-1])
    assert result["path"] == str(out) and result["results"]["before"]["valid_call"]["count"] == 4
    code, text, _ = sharpen(
        "data", "preview", str(out / "starter" / "train.jsonl"), "--model", str(pico_folder)
    )
    assert code == 0 and "⟦<tool_call>" in text and "</tool_call><|im_end|>⟧" in text
    assert "carry loss" in text.splitlines()[-1]


def test_preview_names_what_is_wrong(sharpen, tmp_path, pico_folder):
    file = tmp_path / "x.jsonl"
    untrained = '{"messages": [{"role": "user", "content": "hi"}]}'
    file.write_text('{"mess\n' + json.dumps(ROW) + "\n" + untrained + "\n")
    model = ["--model", str(pico_folder)]
    code, _, err = sharpen("data", "preview", str(file), *model)
    assert code == 0 and "passed over" in err and "x.jsonl:1: not JSON" in err
    code, _, err = sharpen("data", "preview", str(file), "--row", "2", *model)
    assert code == 2 and "no token to train on" in err
    code, _, err = sharpen("data", "preview", str(file), "--row", "9", *model)
    assert code == 2 and "has no readable row 9" in err


def test_models_json(sharpen, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARPEN_CACHE", str(tmp_path))
    code, text, _ = sharpen("models", "pull", "pico", "--json")
    assert code == 0 and json.loads(text.splitlines()[-1]) == {
        "path": str(tmp_path / "models" / "pico")
    }
    code, text, _ = sharpen("models", "list", "--json")
    models = {row["name"]: row["here"] for row in json.loads(text.splitlines()[-1])["models"]}
    assert models == {"smollm2-135m": False, "pico": True}


def test_doctor(sharpen):
    code, text, _ = sharpen("doctor", "--json")
    checks = {c["name"]: c for c in json.loads(text.splitlines()[-1])["checks"]}
    assert code == 0 and checks["torch"]["state"] == "ok"
    assert all(c["fix"] for c in checks.values() if c["state"] != "ok")


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_help_has_an_example(verb):
    command = load_verb(verb)
    for leaf in list(getattr(command, "commands", {}).values()) or [command]:
        assert "Example: sharpen" in (leaf.help or ""), f"{verb} {leaf.name}"


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_lists_its_settings(sharpen, method):
    code, text, err = sharpen("train", method, "--settings")
    assert code == 0, err
    assert "learning_rate" in text and "Micro-batch size in tokens" in text
    code, text, err = sharpen("train", method, "--settings", "--json")
    assert code == 0, err
    settings = {row["name"]: row for row in json.loads(text)["settings"]}
    assert settings["max_steps"]["type"] == "whole number ≥ 0"
    assert settings["max_steps"]["default"] == "0"


def test_a_method_shows_only_its_own_flags():
    flags = {}
    for name, command in load_verb("train").commands.items():
        flags[name] = {option for parameter in command.params for option in parameter.opts}
    assert "--task-weights" in flags["sft"] and "--sft-model" not in flags["sft"]
    assert "--group-size" in flags["grpo"] and "--group-size" not in flags["ppo"]
    assert {"--beta", "--num-samples", "--reward"} <= flags["dpo"] and "--force" not in flags["dpo"]
    assert all({"--config", "--data", "--settings", "--json"} <= found for found in flags.values())
