"""Importers on the real files, a bounded number of records each; whole files are slow tests.

The files are not part of the project: $SHARPEN_TEST_DATA or ../shared/data, skipped where absent.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sharpen.data.check import CheckReport, check_rows
from sharpen.data.importing import import_file

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("SHARPEN_TEST_DATA") or ROOT.parent / "shared" / "data")

# format, file or folder, least share kept of the whole file
FILES = [
    ("sharegpt", "llamafactory_demo/glaive_toolcall_en_demo.json", 0.99),
    ("sharegpt", "llamafactory_demo/glaive_toolcall_zh_demo.json", 0.99),
    ("sharegpt", "llamafactory_demo/dpo_en_demo.json", 1.0),
    ("kto", "llamafactory_demo/kto_en_demo.json", 1.0),
    ("openai", "llamafactory_demo/reason_tool_use_demo_50.jsonl", 1.0),
    ("openai", "llamafactory_demo/v1_sft_demo.jsonl", 1.0),
    ("preference", "llamafactory_demo/v1_dpo_demo.jsonl", 1.0),
    ("alpaca", "rasbt_pref/instruction-data-with-preference.json", 0.99),
    ("bfcl", "bfcl/unused_datasets/question", 0.99),
    ("apibank", "apibank/lv1-lv2-samples", 0.99),
    ("sealtools", "sealtools/dev.jsonl", 1.0),
    ("sealtools", "sealtools/test_in_domain.jsonl", 1.0),
    ("metatool", "metatool/query_tool.jsonl", 1.0),
    ("toolbench", "toolbench_examples/answer", 0.85),
    ("toolbench_queries", "toolbench_examples/instruction", 1.0),
    ("in3", "in3/train.jsonl", 1.0),
    ("nestful", "nestful/non-executable/non-executable-glaive-data.json", 1.0),
    ("taskbench", "planbench_gnn4taskplan/ultratool_train.jsonl", 1.0),
    ("worfbench", "worfbench/lumos.jsonl", 1.0),
    ("worfbench", "worfbench/alfworld/graph_eval.json", 1.0),
    ("worfbench", "worfbench/os/graph_eval.json", 1.0),
    ("worfbench", "worfbench/toolalpaca/graph_eval.json", 1.0),
    ("worfbench", "worfbench/webshop/graph_eval.json", 1.0),
    ("worfbench", "worfbench/wikihow/graph_eval.json", 1.0),
    ("tau_tasks", "taubench_tasks/retail_train.json", 1.0),
    ("tau_tasks", "taubench_tasks/retail_dev.json", 1.0),
    ("tau_runs", "taubench_traj/gpt-4o-airline_train_tasks.jsonl", 1.0),
    ("tau_runs", "taubench_traj/few_shot_data/MockRetailDomainEnv-few_shot.jsonl", 0.0),
    ("tau2_tasks", "tau2/airline/tasks_train.jsonl", 1.0),
    ("tau2_tasks", "tau2/retail/tasks_train.jsonl", 1.0),
    ("tau2_tasks", "tau2/telecom/tasks_train.jsonl", 1.0),
    ("tau2_tasks", "tau2/domains/mock/tasks.json", 1.0),
    ("intercode_sql", "intercode_sql/spider_dev_visible.jsonl", 1.0),
    ("dbbench", "dbbench/dbbench_dev.jsonl", 1.0),
    ("hotpotqa", "hotpot_knowagent/hotpot_with_context.jsonl", 1.0),
    ("react", "hotpot_knowagent/react_trajs_llama2_13b.jsonl.gz", 0.99),
    ("themis", "themis_tara/calculator/agent_calculator_train_cases.jsonl", 1.0),
    ("themis", "themis_tara/calendar/agent_calendar_train.jsonl", 1.0),
    ("themis", "themis_tara/multi_tools/agent_multi_tools_train_action.jsonl", 0.99),
    ("themis", "themis_tara/weather/agent_weather_train.jsonl", 1.0),
    ("gsm8k", "gsm8k/train.jsonl", 1.0),
    ("aqua", "aqua/dev.json", 1.0),
    ("mbpp", "mbpp/mbpp_train.jsonl", 1.0),
    ("longeval", "longchat_longeval/lines/testcases/200_lines.jsonl", 1.0),
    ("longeval", "longchat_longeval/lines/testcases/400_lines.jsonl", 1.0),
    ("kv_retrieval", "lost_in_middle/kv_retrieval_data/kv-retrieval-75_keys.jsonl.gz", 1.0),
    ("sgd", "sgd_subset/train", 1.0),
    ("star", "star_subset/dialogues.jsonl.gz", 0.88),
    ("gorilla", "gorilla_apibench/apibench/torchhub_train.json", 1.0),
    ("livemcp", "livemcp_tools/annotated_data/all_annotations.json", 1.0),
    ("llmcompiler", "llmcompiler/parallelqa_dataset.json", 1.0),
    ("llmcompiler", "llmcompiler/movie_recommendations_formatted.json", 1.0),
]
# whose own calls fit their schemas, so that a complaint would be the importer's
CLEAN = {"sgd", "taskbench", "metatool", "toolbench_queries", "openai", "worfbench"}


def real(path: str) -> Path:
    if not (DATA / path).exists():
        pytest.skip(f"external data: no {path} under {DATA}; set SHARPEN_TEST_DATA")
    return DATA / path


def imported(path: str, tmp_path: Path, limit: int | None = 40) -> list[dict]:
    out = tmp_path / "rows.jsonl"
    import_file("auto", real(path), out, limit)
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("name", "path", "share"), FILES, ids=[path for _, path, _ in FILES])
def test_first_records(name: str, path: str, share: float, tmp_path: Path) -> None:
    convert_and_check(name, path, share, tmp_path, 40)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "path", "share"), FILES, ids=[path for _, path, _ in FILES])
def test_whole_file(name: str, path: str, share: float, tmp_path: Path) -> None:
    convert_and_check(name, path, share, tmp_path, None)


def convert_and_check(
    name: str, path: str, share: float, tmp_path: Path, limit: int | None
) -> None:
    out, again = tmp_path / "rows.jsonl", tmp_path / "again.jsonl"
    report = import_file("auto", real(path), out, limit)
    assert report.format == name
    least = share - (0.03 if limit else 0.0)  # one bad record weighs more among few
    assert report.kept / report.read >= least, report.reasons
    quarantine = out.with_suffix(".quarantine.jsonl")
    lines = quarantine.read_text().splitlines() if quarantine.exists() else []
    assert len(lines) == report.quarantined == report.reasons.total()
    checked = CheckReport(str(out))
    complaints = [p for _, problems in check_rows(out, checked) for p in problems]
    assert checked.rows == report.rows
    assert name not in CLEAN or not complaints
    calls_only = ("call of", "tool '")
    assert all(p.startswith(calls_only) for p in complaints), complaints[:3]
    import_file(name, real(path), again, limit)
    assert again.read_bytes() == out.read_bytes()


def test_worfbench_graph(tmp_path: Path) -> None:
    row = imported("worfbench/lumos.jsonl", tmp_path)[0]
    assert [node["id"] for node in row["gold"]["nodes"]] == ["1", "2", "3"]
    assert row["gold"]["edges"] == [["1", "2"], ["2", "3"]]


def test_nestful_keeps_references(tmp_path: Path) -> None:
    row = imported("nestful/non-executable/non-executable-glaive-data.json", tmp_path)[0]
    assert row["gold"]["calls"][2]["arguments"]["distance"] == "$var1.distance$"
    assert row["gold"]["result"]["pace"] == "$var3$"


def test_bfcl_types_and_expressions(tmp_path: Path) -> None:
    rows = imported("bfcl/unused_datasets/question/BFCL_v4_exec_multiple.json", tmp_path)
    call = rows[0]["gold"]["calls"][0]
    assert call["name"] == "calc_binomial_probability"
    assert call["arguments"]["p"] == pytest.approx(1 / 6)
    kinds = {f["type"] for t in rows[0]["tools"] for f in [t["function"]["parameters"]]}
    assert kinds == {"object"}


def test_sgd_calls_have_results(tmp_path: Path) -> None:
    row = imported("sgd_subset/train", tmp_path)[0]
    at = next(i for i, m in enumerate(row["messages"]) if m.get("tool_calls"))
    call = row["messages"][at]["tool_calls"][0]["function"]
    assert call["name"] == "Restaurants_1_FindRestaurants"
    assert row["messages"][at + 1]["role"] == "tool"
    assert row["metadata"]["requests"] > 0


def test_gsm8k_answers_are_numbers(tmp_path: Path) -> None:
    for row in imported("gsm8k/train.jsonl", tmp_path):
        float(row["gold"]["answer"])


def test_catalogues_without_rows_are_not_mistaken_for_data(tmp_path: Path) -> None:
    from sharpen.types import SharpenError

    for path in ("toolalpaca/public_apis.json", "gorilla_apibench/api/torchhub_api.jsonl"):
        with pytest.raises(SharpenError, match="no known format"):
            imported(path, tmp_path)
