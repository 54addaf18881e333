"""`sharpen doctor`: what this machine has, what is missing, and the command that installs it."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from dataclasses import asdict, dataclass

import typer

from sharpen.cli.shared import AsJson, end_with

_MARKS = {"ok": "ok     ", "missing": "MISSING", "absent": "absent "}
_NEEDED_PACKAGES = (
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "jsonschema-rs",
    "gguf",
)


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    state: str  # ok, missing (everything needs it) or absent (one feature needs it)
    found: str
    fix: str = ""


def doctor(as_json: AsJson = False) -> None:
    """Check this machine: Python, torch build, GPU, packages, sandbox, browser, model, disk.

    Example: sharpen doctor"""
    checks = [*_core_checks(), *_feature_checks()]
    for check in checks:
        line = f"{_MARKS[check.state]} {check.name:<14} {check.found}"
        print(f"{line}  → {check.fix}" if check.fix else line)
    end_with({"checks": [asdict(check) for check in checks]}, as_json)
    if any(check.state == "missing" for check in checks):
        raise typer.Exit(1)


def _make_check(name: str, is_good: bool, found: str, fix: str, otherwise: str = "absent") -> Check:
    """Returns a check that is `ok`, or in the state `otherwise` with its fix."""
    if is_good:
        return Check(name, "ok", found)
    return Check(name, otherwise, found, fix)


def _core_checks() -> list[Check]:
    """Returns the checks of what everything needs."""
    from sharpen.records import cache_folder, package_version

    is_supported = (3, 11) <= sys.version_info[:2] <= (3, 12)
    fix = "use Python 3.11 or 3.12"
    checks = [_make_check("python", is_supported, platform.python_version(), fix, "missing")]
    checks.append(_torch_check())
    for package in _NEEDED_PACKAGES:
        installed = package_version(package)
        found = installed or "not installed"
        fix = f"pip install {package}"
        checks.append(_make_check(package, bool(installed), found, fix, "missing"))
    cache = cache_folder()
    nearest = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free_gib = shutil.disk_usage(nearest).free / (1 << 30)
    fix = "free 2 GiB, or set SHARPEN_CACHE to a larger disk"
    checks.append(_make_check("disk", free_gib >= 2, f"{free_gib:.0f} GiB free", fix, "missing"))
    return checks


def _torch_check() -> Check:
    """Returns the check of torch and of the GPU that it sees."""
    if importlib.util.find_spec("torch") is None:
        return Check("torch", "missing", "not installed", "make quickstart")
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / (1 << 30)
        gpu = f"{torch.cuda.get_device_name(0)}, {memory:.0f} GiB"
        return Check("torch", "ok", f"{torch.__version__}, {build}, {gpu}")
    if shutil.which("nvidia-smi"):
        fix = "reinstall torch from an index with CUDA builds"
        return Check("torch", "absent", f"{torch.__version__}, {build}: sees no GPU", fix)
    return Check("torch", "ok", f"{torch.__version__}, {build}, no GPU")


def _feature_checks() -> list[Check]:
    """Returns the checks of what only some features need."""
    from sharpen.models.find import MANIFEST, named_folder

    checks = []
    programs = (("bwrap", "bubblewrap", "system"), ("chromium", "chromium", "system-browser"))
    for program, package, target in programs:
        path = shutil.which(program)
        fix = f"as root: make {target}, or apt-get install {package}"
        checks.append(_make_check(package, bool(path), path or "not found", fix))
    for module, extra in (("bitsandbytes", "gpu"), ("liger_kernel", "gpu")):
        is_installed = importlib.util.find_spec(module) is not None
        found = "installed" if is_installed else "not installed"
        checks.append(_make_check(module, is_installed, found, f"pip install 'sharpen[{extra}]'"))
    is_pulled = (named_folder("smollm2-135m") / MANIFEST).is_file()
    found = "pulled" if is_pulled else "not pulled"
    fix = "sharpen models pull smollm2-135m"
    checks.append(_make_check("smollm2-135m", is_pulled, found, fix))
    return checks
