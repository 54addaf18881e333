"""Loads a model and its tokenizer from a folder onto a device, with or without a LoRA adapter.

Every trainer, the local policy and the evaluation load their models here.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from sharpen.config import Config, one_line
from sharpen.models import quiet_transformers
from sharpen.models.find import check_folder, find_model
from sharpen.records import read_json
from sharpen.types import SharpenError

if TYPE_CHECKING:
    import torch

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class ModelConfig(Config):
    """Which model, and how it is held in memory."""

    base_model: str = Field(
        "smollm2-135m", description="Model: a name, a folder, an adapter or a run folder."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Number format of the weights; auto: bfloat16 on a GPU, else float32."
    )
    device: str = Field("auto", description="Device: auto, cpu, cuda or cuda:1.")
    load_in_4bit: bool = Field(False, description="Quantize the base model to 4 bits (GPU).")
    load_in_8bit: bool = Field(False, description="Quantize the base model to 8 bits (GPU).")
    trust_remote_code: bool = Field(False, description="Run code that comes with the model.")


class AdapterConfig(Config):
    """Size and form of a LoRA adapter without dropout."""

    lora_r: int = Field(64, ge=1, description="Rank of the adapter.")
    lora_alpha: int = Field(
        128, ge=1, description="Scale of the adapter: its output is multiplied by alpha / rank."
    )
    lora_target_modules: tuple[str, ...] = Field(
        LINEAR_LAYERS, description="Linear layers that get an adapter."
    )
    use_dora: bool = Field(
        False, description="DoRA: the adapter trains directions, magnitudes are trained separately."
    )
    use_rslora: bool = Field(False, description="rsLoRA: scale by alpha / sqrt(rank).")


class LoRAConfig(AdapterConfig):
    """Size and form of a LoRA adapter."""

    lora_dropout: float = Field(
        0.05, ge=0, lt=1, description="Share of the adapter's inputs that are dropped in training."
    )


# Models and tokenizers are `Any`: transformers makes their classes at run time.


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model; an adapter without one has its base model's."""
    folder = find_model(name)
    if not (folder / "tokenizer.json").is_file() and (folder / "adapter_config.json").is_file():
        folder = find_model(base_of_adapter(folder))
    try:
        auto_tokenizer = quiet_transformers().AutoTokenizer
        return auto_tokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise SharpenError(f"{folder}: no usable tokenizer: {one_line(error)}") from error


def load_model(config: ModelConfig, head: str = "CausalLM") -> Any:
    """Load a model in evaluation mode.

    An adapter folder is loaded onto the base that it names. With the head
    `SequenceClassification` the model gives one score per row, at first from a random head.
    """
    folder = find_model(config.base_model)
    check_folder(folder, config.trust_remote_code)
    if (folder / "adapter_config.json").is_file():
        from peft import PeftModel

        base_config = config.model_copy(update={"base_model": base_of_adapter(folder)})
        return PeftModel.from_pretrained(load_model(base_config, head), str(folder)).eval()
    return _load_weights(folder, config, head)


def _load_weights(folder: Path, config: ModelConfig, head: str) -> Any:
    """Load a model folder onto the device, in the dtype and precision of the config."""
    from safetensors import SafetensorError

    device = _choose_device(config.device)
    settings: dict[str, Any] = {"dtype": _choose_dtype(config.dtype, device)}
    if config.load_in_4bit or config.load_in_8bit:
        settings["quantization_config"] = _quantization_config(config, device)
        settings["device_map"] = {"": device}
    transformers = quiet_transformers()
    verbosity = transformers.logging.get_verbosity()
    if head == "SequenceClassification":
        settings["num_labels"] = 1
        # no table of missing weights: a base model never has this head
        transformers.logging.set_verbosity_error()
    try:
        auto_model = getattr(transformers, f"AutoModelFor{head}")
        model: Any = auto_model.from_pretrained(
            folder, use_safetensors=True, trust_remote_code=config.trust_remote_code, **settings
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise SharpenError(f"{folder}: cannot be loaded: {one_line(error)}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    if "device_map" not in settings:
        model = model.to(device)
    return model.eval()


def _choose_device(device: str) -> str:
    """Returns the device to use; `auto` is this process's GPU if there is one, else the CPU."""
    import torch

    if device == "auto":
        if not torch.cuda.is_available():
            return "cpu"
        rank = os.environ.get("LOCAL_RANK")  # set by torchrun, one process per GPU
        return "cuda" if rank is None else f"cuda:{rank}"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SharpenError(f"device {device}: this torch ({torch.__version__}) sees no CUDA device")
    return device


def _choose_dtype(dtype: str, device: str) -> torch.dtype:
    """Returns the dtype to use; `auto` is bfloat16 on a GPU and float32 on a CPU.

    On a CPU half precision is emulated and slower.
    """
    import torch

    if dtype == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    return getattr(torch, dtype)


def _quantization_config(config: ModelConfig, device: str) -> Any:
    """Returns transformers' settings for 4- or 8-bit weights.

    Without CUDA and bitsandbytes this is an error: loading a larger model instead would surprise.
    """
    import torch

    setting = "load_in_4bit" if config.load_in_4bit else "load_in_8bit"
    if config.load_in_4bit and config.load_in_8bit:
        raise SharpenError("load_in_4bit and load_in_8bit exclude each other")
    if not device.startswith("cuda"):
        problem = f"needs a CUDA device, this run is on {device}"
        raise SharpenError(f"{setting}: {problem}; set it to false")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SharpenError(f"{setting}: needs bitsandbytes; pip install 'sharpen[gpu]'")
    from transformers import BitsAndBytesConfig

    if config.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
    )


def attach_lora(model: Any, config: AdapterConfig, task: str = "CAUSAL_LM") -> Any:
    """Returns the model with a fresh adapter: B is zero, so that it still answers as before."""
    from peft import LoraConfig, get_peft_model

    targets = list(config.lora_target_modules)
    settings: Any = LoraConfig(
        task_type=task,
        r=config.lora_r,
        target_modules=targets,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout if isinstance(config, LoRAConfig) else 0.0,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
    )
    try:
        return get_peft_model(model, settings)
    except ValueError as error:
        names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
        missing = ", ".join(target for target in targets if target not in names)
        if missing:
            raise SharpenError(f"lora_target_modules: the model has no {missing}") from None
        raise SharpenError(f"LoRA: {one_line(error)}") from error


def base_of_adapter(folder: Path) -> str:
    """Returns the base model that an adapter folder names."""
    base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    if not base:
        raise SharpenError(f"{folder}: adapter_config.json does not name its base model")
    return base
