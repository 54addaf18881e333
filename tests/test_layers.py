"""A file imports only from lower layers, and light commands import nothing heavy."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "sharpen"
LAYERS = (
    ("types",),
    ("config",),
    ("records", "rows", "calls", "progress"),
    ("render", "tools", "sandbox", "sandbox_worker", "report"),
    ("models", "world"),
    ("policy", "rewards", "merge"),
    ("envs",),
    ("kinds",),
    ("rollout",),
    ("scored_rollout",),
    ("data",),
    ("train",),
    ("evals",),
    ("pipeline",),
    ("spec",),
    ("cli",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODULE_NAME = re.compile(r"sharpen(\.[a-z_]+)+")


def imported_modules(path: Path) -> set[str]:
    """Modules of the project that a file imports, by statement or by a string that names one."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules.add(node.module or "")
            if node.module == "sharpen":
                modules |= {f"sharpen.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and MODULE_NAME.fullmatch(str(node.value)):
            modules.add(str(node.value))
    return {name for name in modules if name.startswith("sharpen.")}


def test_imports_point_down():
    wrong = []
    for path in SRC.rglob("*.py"):
        package = path.relative_to(SRC).parts[0].removesuffix(".py")
        if package in ("__init__", "__main__"):
            continue
        assert package in LEVEL, f"{package} has no layer"
        for module in imported_modules(path):
            other = module.split(".")[1]
            if other != package and other in LEVEL and LEVEL[other] >= LEVEL[package]:
                wrong.append(f"{path.relative_to(SRC)} imports {other}")
    assert not wrong


def test_the_core_does_not_import_the_public_namespace():
    """`from sharpen import x` would hide which layer x is of."""
    wrong = []
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            is_import = isinstance(node, ast.Import) and any(
                a.name == "sharpen" for a in node.names
            )
            if is_import:
                wrong.append(str(path.relative_to(SRC)))
    assert not wrong


def test_every_layer_exists():
    existing = {path.name.removesuffix(".py") for path in SRC.iterdir()}
    assert set(LEVEL) <= existing


def test_every_public_name_is_lazy():
    code = (
        "import sys, sharpen, sharpen.cli.main; "
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules); "
        "assert not heavy, heavy; sharpen.ToolCall; sharpen.tool"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_answers_quickly():
    command = [sys.executable, "-m", "sharpen.cli.main", "--help"]
    subprocess.run(command, check=True, capture_output=True)  # once, to write byte code
    started = time.monotonic()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "estimate" in done.stdout
    assert time.monotonic() - started < 3  # under 1 s on a quiet machine


def test_the_package_itself_is_below_every_layer():
    """`import sharpen.types` runs `sharpen/__init__.py` first: it may import nothing of Sharpen."""
    tree = ast.parse((SRC / "__init__.py").read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("sharpen") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("sharpen")


def test_public_names_are_for_users_and_the_command_line():
    """`from sharpen import NAME` would hide which layer the name is of."""
    wrong = []
    for path in SRC.rglob("*.py"):
        if path.relative_to(SRC).parts[0] == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "sharpen":
                names = [alias.name for alias in node.names if alias.name not in LEVEL]
                wrong += [f"{path.relative_to(SRC)} imports {name}" for name in names]
    assert not wrong
