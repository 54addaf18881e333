"""Tiny random models of a Llama shape, as folders, for the tests of merging."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

from sharpen.config import parse_config
from sharpen.merge.recipe import MergeConfig

VOCAB = 40
METHOD_PARAMETERS = {  # method → its parameters for two models tuned from one base
    "task_arithmetic": {"weight": [0.4, 0.6]},
    "ties": {"weight": [1.0, 1.0], "density": [0.5, 0.5]},
    "breadcrumbs": {"weight": [0.4, 0.6], "density": [0.5, 0.5], "gamma": [0.1, 0.1]},
    "breadcrumbs_ties": {"weight": [0.4, 0.6], "density": [0.5, 0.5], "gamma": [0.1, 0.1]},
    "dare_linear": {"weight": [0.4, 0.6], "density": [0.5, 0.5]},
    "dare_ties": {"weight": [0.4, 0.6], "density": [0.5, 0.5]},
    "della_linear": {"weight": [0.4, 0.6], "density": [0.5, 0.5], "epsilon": [0.1, 0.1]},
    "della": {"weight": [0.4, 0.6], "density": [0.5, 0.5], "epsilon": [0.1, 0.1]},
    "sce": {"select_topk": 0.5},
    "model_stock": {},
    "multislerp": {"weight": [0.4, 0.6]},
}


def parse_recipe(**values: object) -> MergeConfig:
    """Returns a recipe with these fields."""
    return parse_config(MergeConfig, values, "test")


def recipe_parameters(method: str) -> dict[str, object]:
    """Returns the parameters of `METHOD_PARAMETERS` with the first model's value for all models."""
    parameters: dict[str, object] = {}
    for name, value in METHOD_PARAMETERS[method].items():
        parameters[name] = value[0] if isinstance(value, list) else value
    return parameters


def write_recipe(path: Path, **values: object) -> Path:
    """Write a recipe with these fields as YAML."""
    path.write_text(yaml.safe_dump(values))
    return path


def random_weights(
    seed: int,
    layers: int = 2,
    vocab: int = VOCAB,
    hidden: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, torch.Tensor]:
    """Returns the weights of a small Llama."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        prefix = f"model.layers.{i}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        for name in "qkvo":
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (hidden, hidden)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.up_proj.weight"] = (2 * hidden, hidden)
        shapes[prefix + "mlp.gate_proj.weight"] = (2 * hidden, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, 2 * hidden)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (vocab, hidden)
    weights = {}
    for name, shape in shapes.items():
        weights[name] = (torch.randn(shape, generator=random) * 0.05).to(dtype)
    return weights


def tune(base: dict[str, torch.Tensor], seed: int, size: float = 0.01) -> dict[str, torch.Tensor]:
    """Returns the weights with a small random change."""
    random = torch.Generator().manual_seed(seed)
    tuned = {}
    for name, tensor in base.items():
        change = size * torch.randn(tensor.shape, generator=random)
        tuned[name] = (tensor.float() + change).to(tensor.dtype)
    return tuned


def save_model(folder: Path, weights: dict[str, torch.Tensor], **config: object) -> str:
    """Write a model folder and return its path; `config` overrides fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = {name.split(".")[2] for name in weights if ".layers." in name}
    hidden = weights["model.norm.weight"].shape[0]
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 2,
        "num_hidden_layers": len(layers),
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(values | config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def save_trio(folder: Path, **kwargs: object) -> list[str]:
    """Write a base and two models tuned from it; a third tuned one lies beside them as `prose`."""
    base = random_weights(0, **kwargs)  # type: ignore[arg-type]
    save_model(folder / "prose", tune(base, 3))
    return [
        save_model(folder / "base", base),
        save_model(folder / "math", tune(base, 1)),
        save_model(folder / "code", tune(base, 2)),
    ]


def write_tokenizer(folder: Path, tokens: list[str], added: tuple[str, ...] = ()) -> None:
    """Write a word-level tokenizer with these tokens, the `added` ones as special tokens."""
    added_tokens = []
    for number, content in enumerate(added):
        added_tokens.append(
            {
                "id": len(tokens) + number,
                "content": content,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": tokens[0]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def load_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a folder's safetensors files."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(file)
    return weights
