"""`python -m sharpen.world.check FILE…` checks domain files: every problem at once, then a call per
tool. The checks are for authors only and stand beside the tests of a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

from sharpen.tools import load_object

SCRIPT = Path(__file__).parents[3] / "tests" / "domain_check.py"

if __name__ == "__main__":
    if not SCRIPT.is_file():
        sys.exit(
            "error: domain files are checked in a checkout of Sharpen, by tests/domain_check.py"
        )
    sys.exit(load_object(f"{SCRIPT}:main")(sys.argv[1:]))
