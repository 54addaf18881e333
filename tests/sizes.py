"""Prints the size of src, files over 400 lines and functions over 60; fails when src outgrows its
bound."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"
MAX_TOTAL, MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 25_000, 400, 60, 7


def main() -> None:
    total, notes = 0, []
    for path in sorted(SRC.rglob("*.py")):
        text = path.read_text("utf-8")
        lines = len(text.splitlines())
        total += lines
        name = path.relative_to(SRC.parent)
        if lines > MAX_FILE:
            notes.append(f"{name}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION:
                notes.append(f"{name}:{node.lineno}: {node.name} has {length} lines")
            parameters = len(node.args.args) + len(node.args.kwonlyargs)
            if parameters > MAX_PARAMETERS and "cli" not in path.parts:
                notes.append(f"{name}:{node.lineno}: {node.name} has {parameters} parameters")
    print(f"src: {total} lines of at most {MAX_TOTAL}")
    print("\n".join(f"  large: {note}" for note in notes))
    if total > MAX_TOTAL:
        sys.exit(f"src has outgrown {MAX_TOTAL} lines")


if __name__ == "__main__":
    main()
