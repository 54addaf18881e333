"""The checker, the split comparison, the checklist, and input that is wrong on purpose."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

import pytest

from sharpen.cli.main import main
from sharpen.data.check import CheckReport, check_rows, measure
from sharpen.data.importing import import_file
from sharpen.data.overlap import MAX_OVERLAP, compare_splits, find_leaks, mask

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find a thing by name.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "description": "Its name."}},
            "required": ["name"],
        },
    },
}


def tool_with(schema: dict) -> dict:
    return {"type": "function", "function": TOOL["function"] | {"parameters": schema}}


def dialog(arguments: object = None, tools: list | None = None, **extra: object) -> dict:
    call = {"function": {"name": "find", "arguments": arguments or {"name": "key"}}}
    messages = [
        {"role": "user", "content": "Find my key."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"place": "door"}'},
        {"role": "assistant", "content": "It is at the door."},
    ]
    return {"messages": messages, "tools": [TOOL] if tools is None else tools} | extra


def line(row: object) -> bytes:
    return json.dumps(row).encode()


ORPHAN = {
    "messages": [
        {"role": "user", "content": "Find my key."},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": "Here."},
    ]
}
SLOW = tool_with({"type": "object", "properties": {"name": {"pattern": "^(a+)+$"}}})
BAD = {
    "truncated": (line(dialog())[:60], "not JSON"),
    "nul": (b'{"messages": "\x00"}', "not JSON"),
    "utf8": (b'{"messages": "\xff\xfe"}', "not UTF-8"),
    "not an object": (b"[1, 2]", "expected an object"),
    "no known row": (b'{"colour": "red"}', "neither messages"),
    "messages": (b'{"messages": 5}', "expected a non-empty list"),
    "empty dialog": (b'{"messages": []}', "expected a non-empty list"),
    "content": (b'{"messages": [{"role": "user", "content": 5}]}', "expected text"),
    "role": (b'{"messages": [{"role": "robot", "content": "x"}]}', "expected one of"),
    "arguments": (line(dialog("[1]")), "expected an object"),
    "gold": (b'{"id": "1", "instruction": "x", "gold": [1]}', "gold: expected an object"),
    "gold calls": (b'{"id": "1", "instruction": "x", "gold": {"calls": [3]}}', "gold.calls"),
    "empty instruction": (b'{"id": "1", "instruction": " "}', "instruction is empty"),
    "nan": (b'{"messages": [], "x": NaN}', "NaN"),
    "infinite": (b'{"messages": [], "x": 1e999}', "out of range"),
    "digits": (b'{"messages": [], "x": ' + b"9" * 5000 + b"}", "digit"),
    "half a pair": (b'{"messages": [], "x": "\\ud800"}', "surrogate"),
    "deep": (b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "nested too deeply"),
    "ten megabytes": (b'{"messages": "' + b"x" * 10_000_000 + b'"}', "expected a non-empty list"),
    "remote": (line(dialog(tools=[tool_with({"$ref": "http://localhost/x"})])), "remote $ref"),
    "file": (line(dialog(tools=[tool_with({"$ref": "file:///etc/hosts"})])), "remote $ref"),
    "recursive": (
        line(dialog(tools=[tool_with({"type": "object", "properties": {"name": {"$ref": "#"}}})])),
        "contains itself",
    ),
    "pattern": (line(dialog({"name": "a" * 50_000 + "!"}, [SLOW])), "does not match"),
    "no regex": (
        line(dialog(tools=[tool_with({"properties": {"name": {"pattern": "(("}}})])),
        "regex",
    ),
    "twice": (line(dialog(tools=[TOOL, TOOL])), "stands twice"),
    "unlisted": (line(dialog(tools=[])), "lists no tools"),
    "made up": (
        line(dialog(tools=[{"type": "function", "function": {"name": "other"}}])),
        "'find' is not listed",
    ),
    "bad argument": (line(dialog({"name": 5})), "is not of type"),
    "missing argument": (line(dialog({"nam": "x"})), "required property"),
    "orphan result": (line(ORPHAN), "a tool result without a call"),
    "silent": (
        b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]}',
        "says nothing",
    ),
    "same pair": (
        b'{"prompt": [{"role": "user", "content": "x"}], '
        b'"chosen": [{"role": "assistant", "content": "y"}], '
        b'"rejected": [{"role": "assistant", "content": "y"}]}',
        "are the same",
    ),
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("network access")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_a_wrong_call_that_is_not_trained_is_no_fault(tmp_path: Path) -> None:
    row = dialog({"name": 5})
    next(m for m in row["messages"] if m.get("tool_calls"))["weight"] = 0
    (tmp_path / "rows.jsonl").write_bytes(line(row) + b"\n")
    report = CheckReport("")
    assert [problems for _, problems in check_rows(tmp_path / "rows.jsonl", report)] == [[]]


@pytest.mark.parametrize("name", BAD)
def test_bad_row_is_reported_at_its_line(name: str, tmp_path: Path) -> None:
    raw, reason = BAD[name]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(line(dialog()) + b"\n" + raw + b"\n" + line(dialog()) + b"\n")
    report, started = CheckReport(str(file)), time.process_time()
    found = [(r.where, problems) for r, problems in check_rows(file, report) if problems]
    assert time.process_time() - started < 1.0
    assert (report.rows, report.bad) == (3, 1)
    assert found[0][0] == f"{file}:2" and reason in "; ".join(found[0][1])


@pytest.mark.parametrize("name", BAD)
def test_bad_record_is_quarantined_on_import(name: str, tmp_path: Path) -> None:
    """The importer keeps apart what cannot be read or written; schemas are the checker's."""
    raw, _ = BAD[name]
    file, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(line(dialog()) + b"\n" + raw + b"\n" + line(dialog()) + b"\n")
    started = time.process_time()
    report = import_file("openai", file, out)
    assert time.process_time() - started < 1.0
    assert report.read == 3 and report.kept >= 2
    if report.quarantined:
        kept_apart = [json.loads(x) for x in out.with_suffix(".quarantine.jsonl").open()]
        assert [row["where"] for row in kept_apart] == [f"{file}:2"]
        assert kept_apart[0]["reason"] and kept_apart[0]["raw"]
    else:
        assert any(problems for _, problems in check_rows(out, CheckReport("")))


@pytest.mark.parametrize("depth", [50, 400, 990, 1500, 4000])
def test_any_depth_is_survived(depth: int, tmp_path: Path) -> None:
    """How deep JSON may nest differs between Python versions; no depth may end the program."""
    file = tmp_path / "rows.jsonl"
    deep = '{"properties": {"a": ' * depth + "{}" + "}}" * depth
    tool = f'{{"type": "function", "function": {{"name": "find", "parameters": {deep}}}}}'
    nested = "[" * depth + "]" * depth
    call = f'{{"function": {{"name": "find", "arguments": {{"name": {nested}}}}}}}'
    row = '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", '
    file.write_text(f'{row}"tool_calls": [{call}]}}], "tools": [{tool}]}}\n')
    report = CheckReport(str(file))
    assert all(isinstance(p, str) for _, found in check_rows(file, report) for p in found)
    assert report.rows == 1
    assert import_file("openai", file, tmp_path / "out.jsonl").read == 1
    assert compare_splits([file])["rows"][str(file)] <= 1
    assert measure(file)["counts"]["rows"] == 1


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["sharpen", *map(str, arguments)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_cli_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + line(dialog()) + b"\n\n" + line(dialog({"name": 5})) + b"\n")
    assert run(monkeypatch, "data", "check", file, "--json") == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"{file}:3: call of 'find': name")
    report = json.loads(shown[-1])["files"][0]
    assert (report["rows"], report["bad"], report["calls"]) == (2, 1, 2)
    quarantine = tmp_path / "rows.quarantine.jsonl"
    assert json.loads(quarantine.read_text())["where"] == f"{file}:3"
    file.write_bytes(line(dialog()) + b"\n")
    assert run(monkeypatch, "data", "check", file) == 0
    assert not quarantine.exists()
    assert run(monkeypatch, "data", "check", tmp_path / "absent.jsonl") == 2
    assert "no such file" in capsys.readouterr().err


def test_cli_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    file.write_text(
        '{"question": "1+1?", "answer": "#### 2"}\n{"question": "?", "answer": "two"}\n'
    )
    assert run(monkeypatch, "data", "import", "gsm8k", file, out, "--json") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["read"], report["kept"], report["quarantined"]) == (2, 1, 1)
    assert report["reasons"] == {"answer: no …": 1}
    assert run(monkeypatch, "data", "import", "gsmk8", file, out) == 2
    assert "did you mean 'gsm8k'" in capsys.readouterr().err
    assert run(monkeypatch, "data", "import", "gsm8k", file, file) == 2


def tasks(path: Path, instructions: list[str], **gold: object) -> Path:
    rows = [{"id": str(i), "instruction": t, "gold": gold} for i, t in enumerate(instructions)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_splits_that_leak(tmp_path: Path) -> None:
    long = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    train = tasks(
        tmp_path / "train.jsonl", ["Book a hotel room in Paris for 3 nights", long, "Hum"]
    )
    same = tasks(tmp_path / "same.jsonl", ["book a hotel room in Paris, for 3 nights!"])
    gram = tasks(tmp_path / "gram.jsonl", ["zero " + long])
    near = tasks(tmp_path / "near.jsonl", ["Please book a hotel room in Rome for 5 nights"])
    far = tasks(tmp_path / "far.jsonl", ["Water the plants in the garden"])
    found = compare_splits([train, same])["pairs"][0]
    assert found["verbatim"] == 1 and found["word_overlap"] == 1.0
    assert compare_splits([train, gram])["pairs"][0]["grams"] == 2
    pair = compare_splits([train, near])["pairs"][0]
    assert pair["verbatim"] == pair["grams"] == 0
    assert pair["word_overlap"] == 1.0  # only the values and a polite word differ
    assert pair["near_copies"] == 1
    assert pair["closest"] == [f"{train}:1", f"{near}:1"]
    assert find_leaks(compare_splits([train, far])) == []
    assert len(find_leaks(compare_splits([train, gram]))) == 2


def test_closest_rows_equal_the_full_search(tmp_path: Path) -> None:
    import random

    chance = random.Random(3)
    words = [f"x{a}{b}" for a in "bcdfgh" for b in "aeiou"]
    texts = [" ".join(chance.sample(words[:12], chance.randint(3, 8))) for _ in range(120)]
    a, b = tasks(tmp_path / "a.jsonl", texts[:60]), tasks(tmp_path / "b.jsonl", texts[60:])
    sets = [set(text.split()) for text in texts]
    highest = [max(len(x & y) / len(x | y) for x in sets[:60]) for y in sets[60:]]
    pair = compare_splits([a, b])["pairs"][0]
    assert pair["word_overlap"] == pytest.approx(max(highest), abs=1e-4)
    assert pair["near_copies"] == sum(share > MAX_OVERLAP for share in highest) > 0


def test_masking_takes_values_out() -> None:
    shown = mask(
        "Send the report about blue whales to ann@x.org at 10:30 for Mr Jones", {"blue whales"}
    )
    assert shown == "Send the report about VALUE to VALUE at VALUE for VALUE"


def test_distinct_ratio(tmp_path: Path) -> None:
    texts = [f"Set an alarm for {hour} o'clock" for hour in range(10)] + ["Feed the cat"]
    found = compare_splits([tasks(tmp_path / "a.jsonl", texts)])
    assert found["distinct"]["all"] == pytest.approx(2 / 11, abs=1e-3)
    assert "distinct" in find_leaks(found)[0]


def test_checklist(tmp_path: Path) -> None:
    retry = dialog()
    failed = {"role": "tool", "content": '{"error": "timeout"}'}
    retry["messages"][2:2] = [failed, retry["messages"][1]]
    silent = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}]
    }
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join(line(r) + b"\n" for r in (dialog(), retry, silent)))
    found = measure(file)
    assert all(row["passed"] for row in found["checklist"]), found["checklist"]
    assert found["shares"]["retry"] == pytest.approx(1 / 3, abs=1e-3)
    file.write_bytes(line(dialog({"name": 5})) + b"\n" + line(dialog(tools=[])) + b"\n")
    failing = {row["name"] for row in measure(file)["checklist"] if not row["passed"]}
    assert {"unlisted_calls", "bad_arguments", "no_call", "retry"} <= failing


def test_stats_survive_a_schema_without_named_properties(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(line(dialog(tools=[tool_with({"type": "object", "properties": [1]})])) + b"\n")
    found = measure(file)
    assert found["counts"]["bad_arguments"] == 1 and found["shares"]["described_tools"] == 0


def test_a_file_compared_with_itself_counts_twice(tmp_path: Path) -> None:
    file = tasks(tmp_path / "a.jsonl", ["Feed the cat", "Water the plants"])
    assert compare_splits([file, file])["distinct"] == {str(file): 1.0, "all": 0.5}


def test_check_needs_no_place_to_write_when_all_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(line(dialog()) + b"\n")

    def refuse(path: Path) -> None:
        raise AssertionError(f"wrote {path}")

    monkeypatch.setattr("sharpen.records.atomic_write", refuse)
    assert run(monkeypatch, "data", "check", file) == 0
