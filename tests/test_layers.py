"""A file imports only from lower layers, and light commands import nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "sharpen"
LAYERS = (
    ("types",),
    ("config",),
    ("records", "rows", "calls", "progress"),
    ("render", "tools", "sandbox", "sandbox_worker", "report", "web"),
    ("models", "world"),
    ("policy", "rewards", "envs", "merge"),
    ("data", "rollout"),
    ("agent",),
    ("train",),
    ("evals",),
    ("serve",),
    ("tune",),
    ("pipeline",),
    ("view",),
    ("spec",),
    ("cli",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return {name.split(".")[1] for name in found if name.startswith("sharpen.")}


def test_imports_point_down():
    wrong = []
    for path in SRC.rglob("*.py"):
        room = path.relative_to(SRC).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in LEVEL, f"{room} has no layer"
        for other in imports_of(path) - {room}:
            if LEVEL[other] >= LEVEL[room]:
                wrong.append(f"{path.relative_to(SRC)} imports {other}")
    assert not wrong


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
