"""`sharpen doctor`: what this machine has, what is missing, and the line that gets it."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from dataclasses import asdict, dataclass

import typer

from sharpen.cli.shared import AsJson, end_with


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    state: str  # ok, missing (needed by everything), absent (needed by one feature)
    found: str
    fix: str = ""


def doctor(as_json: AsJson = False) -> None:
    """Check this machine: Python, torch build, GPU, packages, sandbox, browser, model, disk.

    Example: sharpen doctor"""
    checks = [*core_checks(), *feature_checks()]
    for check in checks:
        mark = {"ok": "ok     ", "missing": "MISSING", "absent": "absent "}[check.state]
        print(f"{mark} {check.name:<14} {check.found}" + (f"  → {check.fix}" if check.fix else ""))
    end_with({"checks": [asdict(check) for check in checks]}, as_json)
    if any(check.state == "missing" for check in checks):
        raise typer.Exit(1)


def checked(name: str, good: object, found: str, fix: str, otherwise: str = "absent") -> Check:
    return Check(name, "ok" if good else otherwise, found, "" if good else fix)


def core_checks() -> list[Check]:
    from sharpen.records import cache_folder, version

    supported = (3, 11) <= sys.version_info[:2] <= (3, 12)
    fix, found = "use Python 3.11 or 3.12", platform.python_version()
    checks = [checked("python", supported, found, fix, "missing"), torch_check()]
    for package in ("transformers", "peft", "accelerate", "safetensors", "jsonschema-rs", "gguf"):
        here, fix = version(package), f"pip install {package}"
        checks.append(checked(package, here, here or "not installed", fix, "missing"))
    place = cache_folder()
    nearest = next(p for p in (place, *place.parents) if p.exists())
    free = shutil.disk_usage(nearest).free / (1 << 30)
    fix = "free 2 GiB, or set SHARPEN_CACHE to a larger disk"
    return [*checks, checked("disk", free >= 2, f"{free:.0f} GiB free", fix, "missing")]


def torch_check() -> Check:
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


def feature_checks() -> list[Check]:
    """What only some features need."""
    from sharpen.models.find import MANIFEST, named_folder

    checks = []
    programs = ("bwrap", "bubblewrap", "system"), ("chromium", "chromium", "system-browser")
    for program, package, target in programs:
        path = shutil.which(program)
        fix = f"as root: make {target}, or apt-get install {package}"
        checks.append(checked(package, path, path or "not found", fix))
    for module, extra in (("bitsandbytes", "gpu"), ("liger_kernel", "gpu"), ("ray", "ray")):
        here = importlib.util.find_spec(module) is not None
        found = "installed" if here else "not installed"
        checks.append(checked(module, here, found, f"pip install 'sharpen[{extra}]'"))
    here = (named_folder("smollm2-135m") / MANIFEST).is_file()
    found, fix = "pulled" if here else "not pulled", "sharpen models pull smollm2-135m"
    return [*checks, checked("smollm2-135m", here, found, fix)]
