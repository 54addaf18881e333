"""Show that a refactoring changes nothing: compare what a commit and the working tree compute.

    python scripts/compare_commits.py COMMIT [--only sft,dpo] [--out FOLDER] [--tree TREE]

The commit is checked out into a temporary worktree. The same jobs (`scripts/comparison`) run there
and in the working tree, on one machine, seeded, on one thread of the processor, and through the
command line only, because the names of modules and functions may differ. Compared to the last bit:

- training (SFT, DPO, reward models, GRPO, PPO): every figure of every step, the final weights, and
  the pairs and episodes that were sampled;
- merging: the weights;
- data: every built file, every importer on the fixtures and on shared files, the split check;
- evaluation: every item, the intervals, and what the agent reward says of gold answers.

Times, memory, and hashes of the code are left out. Files with several fields are compared field by
field, so that a reworded message does not hide an equal score. The table has a line per job; each
figure that differs has its own line with both values. Exit code 1: something differs or fails.

A tree's figures are kept as JSON in the `--out` folder. A commit's recording is used again as long
as the jobs, the fixtures, the packages and the processor are the same. In place of COMMIT, a
recording's file can be given; `--tree` takes a folder or such a file. A temporary worktree needs
no environment of its own: the Python that runs this script runs both trees.

Jobs feed each other: data → rows → SFT → DPO, RL, merging. The first differing line of the table
is the one to look at.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from comparison import data_jobs, model_jobs  # noqa: F401 - importing registers the jobs
from comparison.workplace import JOBS, CommandFailed, Job, Json, Workplace

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_OUT = ROOT / "runs" / "comparisons"
PACKAGES = ("torch", "transformers", "peft", "safetensors", "numpy", "tokenizers")
MISSING = "(missing)"
WIDTH = 60  # characters of a value in the table


# Recording ----------------------------------------------------------------------------------------


def describe_machine() -> Json:
    """Returns what figures depend on besides the code: a recording of another one is not used."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    processor = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else processor
    return {"python": platform.python_version(), "processor": processor, "packages": versions}


def describe_jobs() -> str:
    """Returns the hash of the jobs and of the fixtures that they read."""
    files = sorted(Path(data_jobs.__file__).parent.glob("*.py"))
    files += sorted(path for path in data_jobs.FIXTURES.rglob("*") if path.is_file())
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def new_recording(name: str) -> Json:
    """Returns a recording without results."""
    return {"name": name, "machine": describe_machine(), "made by": describe_jobs(), "jobs": {}}


def load_recording(path: Path, name: str) -> Json:
    """Returns a commit's recording if it can be used again, otherwise an empty one."""
    fresh = new_recording(name)
    if not path.exists():
        return fresh
    recording = json.loads(path.read_text("utf-8"))
    stale = [key for key in ("machine", "made by") if recording[key] != fresh[key]]
    if stale:
        print(f"{path}: recorded again, another {' and '.join(stale)}", flush=True)
        return fresh
    return recording


def save_recording(recording: Json, path: Path) -> None:
    """Write a recording; an interrupted comparison keeps the older file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(recording, indent=1, ensure_ascii=False) + "\n", "utf-8")
    temporary.replace(path)


def with_needs(names: list[str]) -> list[Job]:
    """Returns the jobs and all that they need, in the registry's order."""
    chosen = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in chosen:
            chosen.add(name)
            waiting += JOBS[name].needs
    return [job for name, job in JOBS.items() if name in chosen]


def record_jobs(tree: Path, names: list[str], recording: Json, path: Path) -> None:
    """Run jobs in a tree and put their figures into its recording."""
    jobs = with_needs(names)
    started = time.monotonic()
    results = recording["jobs"]
    with tempfile.TemporaryDirectory(prefix="sharpen-comparison-") as folder:
        work = Workplace(tree / "src", Path(folder))
        check_source(work)
        failed: set[str] = set()
        for number, job in enumerate(jobs, 1):
            results[job.name] = run_job(job, work, failed)
            print_progress(recording["name"], f"{number}/{len(jobs)}", job.name, results[job.name])
            save_recording(recording, path)
    print(f"{recording['name']}: {time.monotonic() - started:.0f} s", flush=True)


def check_source(work: Workplace) -> None:
    """Stop if the commands would import another tree than the one that they should."""
    found = work.python("-c", "import sharpen; print(sharpen.__file__)").strip()
    if not Path(found).resolve().is_relative_to(work.source.resolve()):
        sys.exit(f"error: {found} is imported, not {work.source}")


def run_job(job: Job, work: Workplace, failed: set[str]) -> Json:
    """Returns a job's figures and seconds, or why it failed."""
    started = time.monotonic()
    result: Json = {"figures": {}, "error": ""}
    lost = [name for name in job.needs if name in failed]
    try:
        if lost:
            raise CommandFailed(f"needs {lost[0]}, which failed")
        result["figures"] = job.run(work)
    except CommandFailed as error:
        result["error"] = str(error)
    except Exception as error:  # a file that is missing, or has another shape than expected
        result["error"] = f"{type(error).__name__}: {error}".replace(str(work.folder), "WORK")
    if result["error"]:
        failed.add(job.name)
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def print_progress(tree: str, count: str, name: str, result: Json) -> None:
    """Print a line for a job that has ended."""
    about = result["error"] or f"{len(result['figures'])} figures"
    print(f"{tree:<12}  {count:>7}  {result['seconds']:6.1f} s  {name}: {about}", flush=True)


# Commits ------------------------------------------------------------------------------------------


def git(*arguments: str) -> str:
    """Run git in this repository. Returns what it printed."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A temporary worktree of a commit."""
    with tempfile.TemporaryDirectory(prefix="sharpen-commit-") as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def record_commit(commit: str, names: list[str], out: Path) -> Json:
    """Returns the recording of a commit, after running those jobs that it lacks."""
    revision = git("rev-parse", "--verify", f"{commit}^{{commit}}")
    path = out / f"{revision[:12]}.json"
    recording = load_recording(path, revision[:12])
    lacking = [name for name in names if name not in recording["jobs"]]
    if lacking:
        with checked_out(revision) as tree:
            record_jobs(tree, lacking, recording, path)
    print(f"{recording['name']}: recorded in {path}", flush=True)
    return recording


def record_tree(tree: Path, names: list[str], out: Path) -> Json:
    """Returns the recording of a working tree, which is always made anew."""
    recording = new_recording("working tree")
    record_jobs(tree, names, recording, out / f"working-tree-{tree.name}.json")
    return recording


def open_recording(path: Path, names: list[str]) -> Json:
    """Returns a recording that was named by its file, with a warning where it may not fit."""
    recording = json.loads(path.read_text("utf-8"))
    fresh = new_recording("")
    for key in ("machine", "made by"):
        if recording[key] != fresh[key]:
            print(f"warning: {path}: another {key!r} than here", flush=True)
    lacking = [name for name in names if name not in recording["jobs"]]
    if lacking:
        print(f"warning: {path}: lacks {', '.join(lacking)}", flush=True)
    return recording


# Comparing ----------------------------------------------------------------------------------------


def compare(before: Json, after: Json, names: list[str]) -> int:
    """Print the table. Returns how many lines of it are not equal."""
    count = 0
    width = max(len(name) for name in names)
    print(f"\n{'job':<{width}}  what")
    for name in names:
        for what, verdict in compare_job(before["jobs"].get(name), after["jobs"].get(name)):
            count += verdict != "equal"
            print(f"{name:<{width}}  {what}: {verdict}")
    total = f"{count} lines differ or fail" if count else f"{len(names)} jobs, all equal"
    print(f"\n{before['name']} and {after['name']}: {total}")
    return count


def compare_job(before: Json | None, after: Json | None) -> list[tuple[str, str]]:
    """Returns what was compared and the verdict: a line for all equal figures, one per other."""
    if before is None or after is None:
        return [("job", f"DIFFERENT  only in the {'second' if before is None else 'first'}")]
    errors = [before["error"], after["error"]]
    if errors[0] and errors[0] == errors[1]:
        return [("job", f"fails in both  {errors[0]}")]
    if any(errors):
        return [("job", f"DIFFERENT  {errors[0] or 'runs'} → {errors[1] or 'runs'}")]
    lines = []
    names = dict.fromkeys([*before["figures"], *after["figures"]])
    for name in names:
        old = before["figures"].get(name, MISSING)
        new = after["figures"].get(name, MISSING)
        if old != new:
            lines.append((name, f"DIFFERENT  {describe_difference(old, new)}"))
    equal = len(names) - len(lines)
    return ([(f"{equal} figures", "equal")] if equal else []) + lines


def describe_difference(old: Any, new: Any) -> str:
    """Returns both values; of two lists those of the first step that differs."""
    if not isinstance(old, list) or not isinstance(new, list) or len(old) != len(new):
        return f"{shorten(old)} → {shorten(new)}"
    pairs = zip(old, new, strict=True)
    differing = [step for step, (first, second) in enumerate(pairs, 1) if first != second]
    step = differing[0]
    values = f"{shorten(old[step - 1])} → {shorten(new[step - 1])}"
    return f"row {step}: {values} ({len(differing)} of {len(old)} rows)"


def shorten(value: Any) -> str:
    """Returns a value's text; a hash is known by its first digits."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) == 64 and set(text) <= set("0123456789abcdef"):
        return text[:12]
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"


def select_jobs(only: str) -> list[str]:
    """Returns the names of the jobs to compare; `sft` stands for all that begin with `sft-`."""
    selections = [part.strip() for part in only.split(",") if part.strip()]
    if not selections:
        return list(JOBS)
    chosen = []
    for selection in selections:
        prefixes = (f"{selection}-", f"{selection}/")
        names = [name for name in JOBS if name == selection or name.startswith(prefixes)]
        if not names:
            sys.exit(f"error: --only {selection}: no such job; jobs: {', '.join(JOBS)}")
        chosen += names
    return [name for name in JOBS if name in chosen]


def main() -> None:
    """Record both trees, print the table, and exit with 1 if something differs."""
    parser = argparse.ArgumentParser(description="Compare what two versions of the code compute.")
    parser.add_argument("commit", help="Commit, branch or tag; or a recording's JSON file.")
    parser.add_argument("--only", default="", help="Jobs with commas, such as sft,dpo,merge-ties.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="Folder of the recordings.")
    parser.add_argument("--tree", type=Path, default=ROOT, help="Working tree, or a recording.")
    parser.add_argument("--list", action="store_true", help="Print the jobs and stop.")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary trees are removed
    names = select_jobs(options.only)
    if options.list:
        print("\n".join(names))
        return
    out = options.out.resolve()
    if options.commit.endswith(".json"):
        before = open_recording(Path(options.commit), names)
    else:
        before = record_commit(options.commit, names, out)
    if options.tree.suffix == ".json":
        after = open_recording(options.tree, names)
    else:
        after = record_tree(options.tree.resolve(), names, out)
    sys.exit(1 if compare(before, after, names) else 0)


if __name__ == "__main__":
    main()
