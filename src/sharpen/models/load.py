"""A model folder → a model and its tokenizer on a device, with or without a LoRA adapter."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from sharpen.config import Config, one_line
from sharpen.models import quiet_transformers
from sharpen.models.find import check_folder, find_model
from sharpen.records import read_json
from sharpen.types import SharpenError

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class ModelConfig(Config):
    """Which model, and how it is held in memory."""

    base_model: str = "smollm2-135m"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    trust_remote_code: bool = False


class LoRAConfig(Config):
    lora_r: int = Field(64, ge=1)
    lora_alpha: int = Field(128, ge=1)
    lora_dropout: float = Field(0.05, ge=0, lt=1)
    lora_target_modules: tuple[str, ...] = LINEAR_LAYERS
    use_dora: bool = False  # weight-decomposed: direction by LoRA, magnitude on its own
    use_rslora: bool = False  # scaled by alpha / sqrt(r) instead of alpha / r


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    folder = find_model(name)
    if not (folder / "tokenizer.json").is_file() and (folder / "adapter_config.json").is_file():
        folder = find_model(base_of_adapter(folder))
    try:
        kind = quiet_transformers().AutoTokenizer
        return kind.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise SharpenError(f"{folder}: no usable tokenizer: {one_line(error)}") from error


def load_model(config: ModelConfig, head: str = "CausalLM") -> Any:
    """The model in evaluation mode. An adapter folder is loaded onto the base that it names. As
    `SequenceClassification` it gives one score a row, at first from a random head."""
    folder = find_model(config.base_model)
    check_folder(folder, config.trust_remote_code)
    if (folder / "adapter_config.json").is_file():
        from peft import PeftModel

        base = load_model(config.model_copy(update={"base_model": base_of_adapter(folder)}), head)
        return PeftModel.from_pretrained(base, str(folder)).eval()
    return load_weights(folder, config, head)


def load_weights(folder: Path, config: ModelConfig, head: str) -> Any:
    from safetensors import SafetensorError

    device = choose_device(config.device)
    settings: dict[str, Any] = {"dtype": choose_dtype(config.dtype, device)}
    if config.load_in_4bit or config.load_in_8bit:
        settings["quantization_config"] = quantization(config, device)
        settings["device_map"] = {"": device}
    transformers = quiet_transformers()
    loudness = transformers.logging.get_verbosity()
    if head == "SequenceClassification":
        settings["num_labels"] = 1
        transformers.logging.set_verbosity_error()  # no table of the head that a base has not
    try:
        model: Any = getattr(transformers, f"AutoModelFor{head}").from_pretrained(
            folder, use_safetensors=True, trust_remote_code=config.trust_remote_code, **settings
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise SharpenError(f"{folder}: cannot be loaded: {one_line(error)}") from error
    finally:
        transformers.logging.set_verbosity(loudness)
    if "device_map" not in settings:
        model = model.to(device)
    return model.eval()


def choose_device(device: str) -> str:
    import torch

    if device == "auto":
        own = f"cuda:{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else "cuda"
        return own if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SharpenError(f"device {device}: this torch ({torch.__version__}) sees no CUDA device")
    return device


def choose_dtype(dtype: str, device: str) -> Any:
    """bfloat16 on a GPU; float32 on a CPU, where half precision is emulated and slower."""
    import torch

    if dtype == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    return getattr(torch, dtype)


def quantization(config: ModelConfig, device: str) -> Any:
    """4- or 8-bit weights; without CUDA and bitsandbytes an error, not a larger model."""
    import torch

    asked = "load_in_4bit" if config.load_in_4bit else "load_in_8bit"
    if config.load_in_4bit and config.load_in_8bit:
        raise SharpenError("load_in_4bit and load_in_8bit exclude each other")
    if not device.startswith("cuda"):
        lacking = f"needs a CUDA device, this run is on {device}"
        raise SharpenError(f"{asked}: {lacking}; set it to false")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SharpenError(f"{asked}: needs bitsandbytes; pip install 'sharpen[gpu]'")
    from transformers import BitsAndBytesConfig

    if config.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    form: Any = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **form)


def attach_lora(model: Any, config: LoRAConfig, task: str = "CAUSAL_LM") -> Any:
    """The model with a fresh adapter: B is zero, so that it still answers as before."""
    from peft import LoraConfig, get_peft_model

    alike = config.model_dump(include={"lora_alpha", "lora_dropout", "use_dora", "use_rslora"})
    targets = list(config.lora_target_modules)
    settings = LoraConfig(task_type=task, r=config.lora_r, target_modules=targets, **alike)
    try:
        return get_peft_model(model, settings)
    except ValueError as error:
        names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
        if missing := ", ".join(target for target in targets if target not in names):
            raise SharpenError(f"lora_target_modules: the model has no {missing}") from None
        raise SharpenError(f"LoRA: {one_line(error)}") from error


def base_of_adapter(folder: Path) -> str:
    base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    if not base:
        raise SharpenError(f"{folder}: adapter_config.json does not name its base model")
    return base
