"""Tiny random models of a Llama shape, as folders, for the tests of merging."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

VOCAB = 40


def tensors(
    seed: int,
    layers: int = 2,
    vocab: int = VOCAB,
    hidden: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> dict:
    random = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes[at + "input_layernorm.weight"] = (hidden,)
        for name in "qkvo":
            shapes[f"{at}self_attn.{name}_proj.weight"] = (hidden, hidden)
        shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        shapes[at + "mlp.up_proj.weight"] = (2 * hidden, hidden)
        shapes[at + "mlp.gate_proj.weight"] = (2 * hidden, hidden)
        shapes[at + "mlp.down_proj.weight"] = (hidden, 2 * hidden)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    return {n: (torch.randn(s, generator=random) * 0.05).to(dtype) for n, s in shapes.items()}


def tuned(base: dict, seed: int, size: float = 0.01) -> dict:
    random = torch.Generator().manual_seed(seed)
    return {
        n: (t.float() + size * torch.randn(t.shape, generator=random)).to(t.dtype)
        for n, t in base.items()
    }


def save(folder: Path, weights: dict, **config: object) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    layers = len({n.split(".")[2] for n in weights if ".layers." in n})
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": weights["model.norm.weight"].shape[0],
        "intermediate_size": 2 * weights["model.norm.weight"].shape[0],
        "num_attention_heads": 2,
        "num_hidden_layers": layers,
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(values | config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def tokenizer(folder: Path, tokens: list[str], added: tuple[str, ...] = ()) -> None:
    vocab = {token: i for i, token in enumerate(tokens)}
    entries = [
        {
            "id": len(tokens) + i,
            "content": t,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, t in enumerate(added)
    ]
    value = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": entries,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": tokens[0]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(value))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )


def trio(folder: Path, **kwargs: object) -> list[str]:
    """A base and two models tuned from it; a third tuned one lies beside them as `prose`."""
    base = tensors(0, **kwargs)  # type: ignore[arg-type]
    save(folder / "prose", tuned(base, 3))
    return [
        save(folder / "base", base),
        save(folder / "math", tuned(base, 1)),
        save(folder / "code", tuned(base, 2)),
    ]


def recipe(path: Path, **values: object) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def load(folder: str | Path) -> dict:
    found: dict = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(file)
    return found
