"""`sharpen doctor`: what this machine has, what is missing, and the line that gets it."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    state: str  # ok, missing (needed by everything), absent (needed by one feature)
    found: str
    fix: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object.")] = False,
) -> None:
    """Check this machine: Python, torch build, GPU, packages, sandbox, browser, model, disk.

    Example: sharpen doctor
    """
    checks = [*core_checks(), *feature_checks()]
    for check in checks:
        mark = {"ok": "ok     ", "missing": "MISSING", "absent": "absent "}[check.state]
        print(f"{mark} {check.name:<14} {check.found}" + (f"  → {check.fix}" if check.fix else ""))
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in checks]}))
    if any(check.state == "missing" for check in checks):
        raise typer.Exit(1)


def core_checks() -> list[Check]:
    from sharpen.records import cache_folder, version

    checks = [Check("python", "ok", platform.python_version())]
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        fix = "use Python 3.11 or 3.12"
        checks[0] = Check("python", "missing", platform.python_version(), fix)
    checks.append(torch_check())
    for package in ("transformers", "peft", "accelerate", "safetensors", "jsonschema-rs", "gguf"):
        found = version(package)
        fix = "" if found else f"pip install {package}"
        checks.append(Check(package, "ok" if found else "missing", found or "not installed", fix))
    place = cache_folder()
    nearest = next(p for p in (place, *place.parents) if p.exists())
    free = shutil.disk_usage(nearest).free / (1 << 30)
    enough = free >= 2
    fix = "" if enough else "free 2 GiB, or set SHARPEN_CACHE to a larger disk"
    checks.append(Check("disk", "ok" if enough else "missing", f"{free:.0f} GiB free", fix))
    return checks


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
    for program, package, target in (
        ("bwrap", "bubblewrap", "system"),
        ("chromium", "chromium", "system-browser"),
    ):
        path = shutil.which(program)
        fix = "" if path else f"as root: make {target}, or apt-get install {package}"
        checks.append(Check(package, "ok" if path else "absent", path or "not found", fix))
    for module, extra in (("bitsandbytes", "gpu"), ("liger_kernel", "gpu"), ("ray", "ray")):
        here = importlib.util.find_spec(module) is not None
        fix = "" if here else f"pip install 'sharpen[{extra}]'"
        found = "installed" if here else "not installed"
        checks.append(Check(module, "ok" if here else "absent", found, fix))
    here = (named_folder("smollm2-135m") / MANIFEST).is_file()
    fix = "" if here else "sharpen models pull smollm2-135m"
    found = "pulled" if here else "not pulled"
    checks.append(Check("smollm2-135m", "ok" if here else "absent", found, fix))
    return checks
