"""The whole build of the shipped world, at its default size: slow."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from sharpen.data.generate.build import build_data
from sharpen.data.overlap import compare_splits, find_leaks
from sharpen.render import Renderer
from sharpen.rows import dialog_from_row
from sharpen.world.episode import shipped_world

SPLITS = ("train", "dev", "test")
TASKS = {"selection": 500, "planning": 300, "timing": 300, "end_to_end": 200}
MIN_ROWS_PER_TYPE = 400
MAX_KEYWORD_TOP_1 = 0.6


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.slow
def test_the_whole_build_keeps_its_promises(tmp_path, smollm2_tokenizer):
    """5,000 dialogs and all tasks from the shipped world, twice, the same and as promised."""
    manifest = build_data(tmp_path / "a", 0)
    assert build_data(tmp_path / "b", 0) == manifest
    folder = tmp_path / "a"
    counts = manifest["rows"]
    assert len(list(shipped_world().tools())) == 1200
    assert counts["agent_tools/tools.jsonl"] == 1200
    assert [counts[f"agent_sft/{split}.jsonl"] for split in SPLITS] == [4000, 500, 500]
    for part, total in TASKS.items():
        assert sum(counts[f"agent_benchmark/{part}/{split}.jsonl"] for split in SPLITS) == total
        assert counts[f"agent_benchmark/{part}/extended.jsonl"] == 2000

    check_dialogs(folder / "agent_sft")
    for name in ("agent_sft", *(f"agent_benchmark/{part}" for part in TASKS)):
        assert (
            find_leaks(compare_splits([folder / name / f"{split}.jsonl" for split in SPLITS])) == []
        )

    dialogs = [dialog_from_row(row) for row in rows(folder / "agent_sft" / "train.jsonl")]
    lengths = sorted(len(datum.ids) for datum in Renderer(smollm2_tokenizer).render(dialogs))
    assert lengths[len(lengths) // 2] <= 900
    assert lengths[int(len(lengths) * 0.99)] <= 2048
    for split in ("test", "extended"):
        tasks = rows(folder / "agent_benchmark" / "selection" / f"{split}.jsonl")
        rate = keyword_top_1(tasks)
        print(f"keyword baseline, selection {split}: top-1 {rate:.1%}")
        assert rate <= MAX_KEYWORD_TOP_1


def check_dialogs(folder: Path) -> None:
    """Every task type has enough rows, and the train split calls most tools."""
    called_in_train = set()
    rows_of_type = Counter()
    for split in SPLITS:
        for row in rows(folder / f"{split}.jsonl"):
            rows_of_type[row["task_type"]] += 1
            if split == "train":
                called_in_train |= set(row["metadata"]["target_tools"])
    assert len(called_in_train) >= 1000
    assert len(rows_of_type) == 4
    assert min(rows_of_type.values()) >= MIN_ROWS_PER_TYPE
    assert {"tool_retrieval", "timing_decision"} <= set(rows_of_type)


def keyword_top_1(tasks: list[dict]) -> float:
    """How often the candidate with the most shared words, rare ones weighing more, is right."""
    seen = Counter()
    for task in tasks:
        for tool in task["tools"]:
            seen.update(words(json.dumps(tool["function"])))
    right = 0
    for task in tasks:
        request_words = words(task["instruction"])
        scores = {}
        for tool in task["tools"]:
            shared_words = request_words & words(json.dumps(tool["function"]))
            scores[tool["function"]["name"]] = sum(1 / seen[word] for word in shared_words)
        best = max(scores, key=lambda name: scores[name])
        right += best in task["gold"]["tools"]
    return right / len(tasks)


def words(text: str) -> set[str]:
    """The words of a text, without the plural s."""
    return {word.removesuffix("s") for word in re.findall(r"[a-z]+", text.lower())}
