"""The jobs on data: building the sets, checking them, importing foreign files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from comparison.workplace import (
    JOBS,
    Figures,
    Job,
    Workplace,
    columns,
    hashed_columns,
    job,
    last_json,
    read_rows,
    sha256,
    weights,
)

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
SHARED_DATA = Path(os.environ.get("SHARPEN_TEST_DATA") or ROOT.parent / "shared" / "data")
FIXTURE_LIMIT = 1000  # records of each fixture: all of them
SHARED_LIMIT = 40  # records of each shared file


@job("model")
def pull_model(work: Workplace) -> Figures:
    """The random weights of `pico`, and its tokenizer and template."""
    work.sharpen("models", "pull", "pico")
    folder = work.folder / "cache" / "models" / "pico"
    files = ("tokenizer.json", "chat_template.jinja")
    return weights(folder) | {name: sha256(folder / name) for name in files}


@job("data-build")
def build_data(work: Workplace) -> Figures:
    """Every file of the built sets but the manifest, which names files of the code."""
    sizes = ("--rows", "40", "--extended", "8", "--workers", "1")
    work.sharpen("data", "build", "--out", "data", "--seed", "0", *sizes)
    return built_files(work.folder / "data")


def built_files(folder: Path) -> Figures:
    """Returns the hashes of all sets in a folder."""
    files = sorted(folder.glob("*/**/*.jsonl"))
    return {file.relative_to(folder).as_posix(): sha256(file) for file in files}


def own_tools_job(file: str) -> Callable[[Workplace], Figures]:
    """Returns a job that builds sets from the tree's own example of foreign tools."""

    def run(work: Workplace) -> Figures:
        shutil.copy(work.source.parent / "examples" / "own_tools" / file, work.folder / file)
        folder = work.folder / f"own-{file}"
        size = ("--seed", "0", "--rows", "20", "--workers", "1")
        work.sharpen("data", "build", "--tools", file, "--out", folder.name, *size)
        return built_files(folder)

    return run


for file in ("my_tools.py", "openapi.json"):
    JOBS[f"data-own/{file}"] = Job(f"data-own/{file}", own_tools_job(file))


@job("data-check", ("data-build",))
def check_data(work: Workplace) -> Figures:
    """Validation and overlap of the splits, and the checklist."""
    files = [f"data/agent_sft/{split}.jsonl" for split in ("train", "dev", "test")]
    checked = work.sharpen("data", "check", "--splits", "--json", *files)
    measured = work.sharpen("data", "stats", "--json", files[0])
    return columns("check", [last_json(checked)]) | columns("stats", [last_json(measured)])


def import_job(folder: Path, place: str, path: str, limit: int) -> Callable[[Workplace], Figures]:
    """Returns a job that imports one file or folder and hashes what comes out."""

    def run(work: Workplace) -> Figures:
        link = work.folder / place  # relative, because the quarantine names the file
        if not link.exists():
            link.symlink_to(folder, target_is_directory=True)
        name = path.replace("/", "-")
        rows = work.folder / f"imported-{place}-{name}.jsonl"
        quarantine = rows.with_suffix(".quarantine.jsonl")
        work.sharpen("data", "import", "auto", f"{place}/{path}", rows.name, "--limit", str(limit))
        figures: Figures = {"imported": sha256(rows), "imported rows": len(read_rows(rows))}
        if quarantine.exists():
            figures["quarantine"] = sha256(quarantine)
            figures |= hashed_columns("quarantine", read_rows(quarantine))
        return figures

    return run


def fixture_paths() -> list[str]:
    """Returns the fixtures that can be imported: a folder's first file stands for the folder."""
    paths = sorted(path for path in FIXTURES.iterdir() if path.is_file())
    folders = sorted(path for path in FIXTURES.iterdir() if path.is_dir())
    for folder in folders:
        paths += sorted(path for path in folder.iterdir() if path.is_file())[:1]
    return [path.relative_to(FIXTURES).as_posix() for path in paths]


SHARED_PATHS = """
llamafactory_demo/glaive_toolcall_en_demo.json llamafactory_demo/glaive_toolcall_zh_demo.json
llamafactory_demo/dpo_en_demo.json llamafactory_demo/kto_en_demo.json
llamafactory_demo/reason_tool_use_demo_50.jsonl llamafactory_demo/v1_sft_demo.jsonl
llamafactory_demo/v1_dpo_demo.jsonl rasbt_pref/instruction-data-with-preference.json
bfcl/unused_datasets/question apibank/lv1-lv2-samples sealtools/dev.jsonl
metatool/query_tool.jsonl toolbench_examples/answer toolbench_examples/instruction in3/train.jsonl
nestful/non-executable/non-executable-glaive-data.json
planbench_gnn4taskplan/ultratool_train.jsonl worfbench/lumos.jsonl worfbench/os/graph_eval.json
taubench_tasks/retail_dev.json taubench_traj/gpt-4o-airline_train_tasks.jsonl
taubench_traj/few_shot_data/MockRetailDomainEnv-few_shot.jsonl
tau2/airline/tasks_train.jsonl tau2/domains/mock/tasks.json
intercode_sql/spider_dev_visible.jsonl dbbench/dbbench_dev.jsonl
hotpot_knowagent/hotpot_with_context.jsonl hotpot_knowagent/react_trajs_llama2_13b.jsonl.gz
themis_tara/calculator/agent_calculator_train_cases.jsonl
themis_tara/multi_tools/agent_multi_tools_train_action.jsonl gsm8k/train.jsonl aqua/dev.json
mbpp/mbpp_train.jsonl longchat_longeval/lines/testcases/200_lines.jsonl
lost_in_middle/kv_retrieval_data/kv-retrieval-75_keys.jsonl.gz sgd_subset/train
star_subset/dialogues.jsonl.gz gorilla_apibench/apibench/torchhub_train.json
livemcp_tools/annotated_data/all_annotations.json llmcompiler/parallelqa_dataset.json
llmcompiler/movie_recommendations_formatted.json
"""


def register_imports() -> None:
    """One job per fixture, and one per shared file where that folder is present."""
    for path in fixture_paths():
        name = f"import-fixture/{path}"
        JOBS[name] = Job(name, import_job(FIXTURES, "fixtures", path, FIXTURE_LIMIT))
    for path in SHARED_PATHS.split():
        if (SHARED_DATA / path).exists():
            name = f"import-shared/{path}"
            JOBS[name] = Job(name, import_job(SHARED_DATA, "shared", path, SHARED_LIMIT))


register_imports()
