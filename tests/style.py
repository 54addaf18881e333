"""How readable the source is, as far as a script can tell. `make test` runs it.

    python tests/style.py [FOLDER OR FILE …]

Reports files and functions that are too long, assignments that pack several values, names that
should be private, and shared names without a docstring. Exits 1 if it finds any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
READERS = ("src", "tests", "benchmarks", "scripts", "examples", "docs")
READ_SUFFIXES = (".py", ".md", ".yaml", ".toml", ".sh", ".jinja")
# methods whose meaning is said once, by the protocol or base class that they implement
PROTOCOL_METHODS = {
    "advance", "backward", "close", "encode", "forget", "forward", "idle", "load_state", "losses",
    "message",
    "reset", "respond", "rows", "score", "state", "step", "submit",
}  # fmt: skip
OLD_FILES = {
    "train/ahead.py", "train/experience.py", "train/start.py", "train/practice.py",
    "policy/choosing.py", "data/generate/plays.py", "data/generate/scene.py",
    "data/generate/own.py", "data/importers/shapes.py", "evals/subjects.py", "envs/auto.py",
}  # fmt: skip
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    """Check the named paths, or all of src, benchmarks, scripts and examples."""
    paths = [Path(argument).resolve() for argument in sys.argv[1:]]
    paths = paths or [ROOT / name for name in ("src", "benchmarks", "scripts", "examples")]
    words_of = read_words()
    problems = []
    for path in python_files(paths):
        problems += check_file(path, words_of)
    print("\n".join(problems))
    print(f"style: {len(problems)} problems")
    sys.exit(1 if problems else 0)


def python_files(paths: list[Path]) -> list[Path]:
    """All Python files among and below the paths."""
    files: set[Path] = set()
    for path in paths:
        files |= {path} if path.is_file() else set(path.rglob("*.py"))
    return sorted(files)


def read_words() -> dict[Path, set[str]]:
    """Every file that could use a name, with the words in it."""
    words_of = {}
    files = [ROOT / "README.md", ROOT / "pyproject.toml", ROOT / "Makefile"]
    for folder in READERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in READ_SUFFIXES]
    for path in files:
        words_of[path] = set(re.findall(r"\w+", path.read_text("utf-8", errors="replace")))
    return words_of


def check_file(path: Path, words_of: dict[Path, set[str]]) -> list[str]:
    """All problems of one file, each as `path:line: what`."""
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    name = path.relative_to(ROOT).as_posix()
    problems = []
    lines = len(text.splitlines())
    if lines > MAX_FILE_LINES:
        problems.append(f"{name}:1: {lines} lines, at most {MAX_FILE_LINES}")
    if name.removeprefix("src/sharpen/") in OLD_FILES:
        problems.append(f"{name}:1: an old file name")
    checks = [packed_assignments(tree), long_functions(tree)]
    if name.startswith("src/"):
        elsewhere: set[str] = set().union(*(w for p, w in words_of.items() if p != path))
        checks += [missing_docstrings(tree), could_be_private(tree, elsewhere)]
    for check in checks:
        problems += [f"{name}:{line}: {what}" for line, what in check]
    return problems


def packed_assignments(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """`a, b = x, y`: several statements in one line. A swap is none."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        target = node.targets[0]
        if not isinstance(target, ast.Tuple):
            continue
        sources = sorted(ast.unparse(part) for part in node.value.elts)
        if sources != sorted(ast.unparse(part) for part in target.elts):
            yield node.lineno, f"packs {len(target.elts)} assignments into one"


def long_functions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Functions that do not fit a screen."""
    for node in ast.walk(tree):
        if not isinstance(node, FunctionNode):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield node.lineno, f"{node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"


def missing_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Shared classes, functions and methods that do not say what they do."""
    if not ast.get_docstring(tree) and tree.body:
        yield 1, "the module has no docstring"
    for node in tree.body:
        if not isinstance(node, FunctionNode | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            yield node.lineno, f"{node.name} has no docstring"
        if isinstance(node, ast.ClassDef):
            yield from undocumented_methods(node)


def undocumented_methods(owner: ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Shared methods without a docstring, but for those that a protocol documents."""
    for node in owner.body:
        if not isinstance(node, FunctionNode) or node.name.startswith("_"):
            continue
        if node.name not in PROTOCOL_METHODS and not ast.get_docstring(node):
            yield node.lineno, f"{owner.name}.{node.name} has no docstring"


def could_be_private(tree: ast.Module, elsewhere: set[str]) -> Iterator[tuple[int, str]]:
    """Functions, classes and constants of a module that no other file names."""
    for node in tree.body:
        if isinstance(node, FunctionNode | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            continue
        for name in names:
            if not name.startswith("_") and name not in elsewhere:
                yield node.lineno, f"{name} is used in this file alone: make it private"


if __name__ == "__main__":
    main()
