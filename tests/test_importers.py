"""Importers on small files written from each format's schema: what comes out, field by field."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from sharpen.data.check import CheckReport, check_rows
from sharpen.data.importers.calls import call_from
from sharpen.data.importers.common import FORMATS
from sharpen.data.importers.tools import json_type, to_json_schema, to_parameters
from sharpen.data.importing import detect_format, get_importer, import_file
from sharpen.data.reading import read_records
from sharpen.types import RowError, SharpenError

FIXTURES = Path(__file__).parent / "fixtures"


def imported(name: str, tmp_path: Path, kept: float = 1.0) -> list[dict]:
    """The rows of a fixture, with its format found from its content."""
    out = tmp_path / "out.jsonl"
    report = import_file("auto", FIXTURES / name, out)
    assert report.kept / report.read >= kept, report.reasons
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


DETECTED = {
    "openai.jsonl": "openai",
    "alpaca.json": "alpaca",
    "hermes.json": "hermes",
    "glaive.jsonl": "glaive",
    "preference.jsonl": "preference",
    "kto.jsonl": "kto",
    "when2call.jsonl": "when2call",
    "when2call_pref.jsonl": "when2call",
    "humaneval.jsonl": "humaneval",
    "svamp.json": "svamp",
    "toolalpaca.json": "toolalpaca",
    "tau2_runs.json": "tau2_runs",
    "react.txt": "react",
    "bfcl/BFCL_v9_made.json": "bfcl",
    "metatool/clean_queries.csv": "metatool",
}


@pytest.mark.parametrize("name", DETECTED)
def test_format_is_found_and_every_call_fits(name: str, tmp_path: Path) -> None:
    assert detect_format(FIXTURES / name).name == DETECTED[name]
    out = tmp_path / "out.jsonl"
    report = import_file("auto", FIXTURES / name, out)
    unanswered = name.startswith("bfcl")
    assert report.quarantined == unanswered
    checked = CheckReport("")
    complaints = [p for _, problems in check_rows(out, checked) for p in problems]
    without_tools = ("tau2_runs.json",)
    assert bool(complaints) == (name in without_tools), complaints
    assert checked.rows == report.rows


def test_every_format_loads() -> None:
    for name in FORMATS:
        importer = get_importer(name)
        assert importer.name == name


def test_openai(tmp_path: Path) -> None:
    modern, legacy = imported("openai.jsonl", tmp_path)
    assert [m["role"] for m in modern["messages"]][:2] == ["system", "user"]
    calls = modern["messages"][2]["tool_calls"]
    assert [c["function"]["arguments"] for c in calls] == [{"city": "Oslo"}, {"city": "Bergen"}]
    assert modern["metadata"] == {"source": "written here"}
    assert legacy["messages"][1]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert legacy["messages"][2]["role"] == "tool"
    assert legacy["tools"][0]["function"]["name"] == "get_weather"


@pytest.mark.parametrize("name", ["weight", "loss_weight"])
def test_what_is_not_to_be_trained(name: str, tmp_path: Path) -> None:
    def turn(text: str, weight: float) -> dict:
        return {"role": "assistant", "content": text, name: weight}

    asked = {"role": "user", "content": "2 + 2?"}
    rows = [{"messages": [asked, turn("5", 0.0), asked, turn("4", 1.0)]}]
    rows.append({"messages": [asked, turn("4", 0.3)]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = import_file("openai", tmp_path / "rows.jsonl", tmp_path / "out.jsonl")
    [row] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [m.get("weight") for m in row["messages"]] == [None, 0, None, None]
    assert report.quarantined == 1


def test_alpaca(tmp_path: Path) -> None:
    plain, with_history = imported("alpaca.json", tmp_path)
    assert plain["messages"][0]["content"] == "Name a prime.\n\nAbove ten."
    roles = [m["role"] for m in with_history["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]


def test_hermes(tmp_path: Path) -> None:
    (row,) = imported("hermes.json", tmp_path)
    said = row["messages"][2]
    assert said["content"] == "I will look."
    assert [c["function"]["arguments"]["city"] for c in said["tool_calls"]] == ["Lima", "Cusco"]
    assert [m["content"] for m in row["messages"][3:5]] == ['{"sky": "grey"}', '{"sky": "blue"}']
    assert row["messages"][4]["name"] == "get_weather"


def test_glaive(tmp_path: Path) -> None:
    (row,) = imported("glaive.jsonl", tmp_path)
    roles = [m["role"] for m in row["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    call = row["messages"][1]["tool_calls"][0]["function"]
    assert call == {"name": "get_weather", "arguments": {"city": "Porto"}}


def test_preference_and_kto(tmp_path: Path) -> None:
    explicit, implicit = imported("preference.jsonl", tmp_path)
    assert explicit["chosen_score"] == 9.0 and explicit["rejected_score"] == 1.0
    assert implicit["prompt"] == [{"role": "user", "content": "Sky?"}]
    assert implicit["rejected"] == [{"role": "assistant", "content": "Green."}]
    labels = [row["metadata"]["label"] for row in imported("kto.jsonl", tmp_path)]
    assert labels == [True, False]


def test_when2call(tmp_path: Path) -> None:
    ask, refuse = imported("when2call.jsonl", tmp_path)
    assert ask["gold"] == {"decision": "ask", "answer": "For how many?"}
    assert refuse["gold"]["decision"] == "decline"
    assert ask["tools"][0]["function"]["parameters"]["properties"]["people"] == {"type": "integer"}
    (pair,) = imported("when2call_pref.jsonl", tmp_path)
    assert pair["chosen"][0]["content"] == "For how many?"


def test_code_and_math(tmp_path: Path) -> None:
    (code,) = imported("humaneval.jsonl", tmp_path)
    program = code["gold"]["setup"] + code["metadata"]["code"] + "\n" + code["gold"]["tests"][0]
    exec(program, {})
    (sum_,) = imported("svamp.json", tmp_path)
    assert sum_["gold"] == {"answer": "7"}


def test_toolalpaca(tmp_path: Path) -> None:
    run, task = imported("toolalpaca.json", tmp_path)
    assert run["messages"][1]["content"] == "I need the tide."
    schema_ = task["tools"][0]["function"]["parameters"]
    assert schema_["required"] == ["port"] and schema_["properties"]["days"]["type"] == "integer"
    assert task["gold"]["calls"] == [{"name": "getTide", "arguments": {"port": "Brest"}}]


def test_tau2_run_shows_the_assistant_only_its_own_tools(tmp_path: Path) -> None:
    (row,) = imported("tau2_runs.json", tmp_path)
    roles = [m["role"] for m in row["messages"]]
    assert roles == ["assistant", "user", "assistant", "tool", "assistant"]
    assert row["metadata"]["reward"] == 1.0


def test_react_text(tmp_path: Path) -> None:
    first, second = imported("react.txt", tmp_path)
    assert first["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"input": "6 * 7"}
    assert first["messages"][1]["content"] == "I should calculate."
    assert first["messages"][-1]["content"] == "I know it now.\n42"
    assert second["messages"][0]["content"] == 'What does "brisk" mean?'
    descriptions = {t["function"]["name"]: t["function"]["description"] for t in first["tools"]}
    assert descriptions["calculator"] == "Works out a sum."


def test_bfcl(tmp_path: Path) -> None:
    simple, irrelevant, turns = imported("bfcl/BFCL_v9_made.json", tmp_path, kept=0.75)
    fields = simple["tools"][0]["function"]["parameters"]
    assert fields["type"] == "object" and "type" not in fields["properties"]["unit"]
    assert fields["properties"]["sides"] == {"type": "array", "items": {"type": "number"}}
    assert fields["properties"]["options"]["type"] == "object"
    assert simple["tools"][0]["function"]["name"] == "geometry.area"
    assert simple["gold"]["match"] == "allowed"
    assert irrelevant["gold"] == {"calls": []} and irrelevant["context"][0]["role"] == "system"
    assert turns["gold"]["turns"][1][1] == {
        "name": "echo",
        "arguments": {"content": "x", "times": 6},
    }
    assert turns["metadata"]["turns"][0][0]["content"] == "Now a file in it."
    quarantined = json.loads((tmp_path / "out.quarantine.jsonl").read_text())
    assert quarantined["where"].endswith("BFCL_v9_made.json:4")
    assert "no answer for simple_1" in quarantined["reason"]


def test_metatool_csv_offers_a_choice(tmp_path: Path) -> None:
    trip, dice = imported("metatool/clean_queries.csv", tmp_path)
    assert trip["instruction"] == "Plan a trip, please" and dice["gold"] == {"tools": ["dice"]}
    assert {t["function"]["name"] for t in trip["tools"]} == {"TripTool", "dice", "chess"}


def test_unknown_and_ambiguous_formats(tmp_path: Path) -> None:
    with pytest.raises(SharpenError, match="did you mean 'bfcl'"):
        get_importer("bfc")
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"colour": "red"}\n')
    with pytest.raises(SharpenError, match="no known format"):
        detect_format(odd)
    both = tmp_path / "both.jsonl"
    both.write_text('{"Query": "q", "Tool": "t", "Body": "b", "Question": "?", "Equation": "1"}\n')
    with pytest.raises(SharpenError, match="could be metatool or svamp"):
        detect_format(both)


def test_side_file_is_asked_for(tmp_path: Path) -> None:
    alone = tmp_path / "dev.jsonl"
    alone.write_text('{"id": "a", "query": "q", "calling": []}\n')
    with pytest.raises(SharpenError, match=r"needs tool\.jsonl"):
        import_file("sealtools", alone, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_foreign_types() -> None:
    assert json_type("List[int]") == {"type": "array", "items": {"type": "integer"}}
    assert json_type("Optional[str]") == {"type": "string"}
    assert json_type("any") == {} and json_type("HashMap") == {"type": "object"}
    flat = to_parameters(
        {"a": {"type": "str", "required": True}, "b": "Required. integer. How many."}
    )
    assert flat["required"] == ["a", "b"] and flat["properties"]["b"]["type"] == "integer"
    assert to_json_schema({"type": "array", "items": "str"})["items"] == {"type": "string"}


@pytest.mark.parametrize("text", ["f(1)", "f(x=y)", "f(x='a' * 10**9)", "f(", "__import__('os')"])
def test_python_calls_are_read_not_run(text: str) -> None:
    with pytest.raises(RowError):
        call_from(text)


@pytest.mark.parametrize("indent", [None, 1])
def test_json_array_is_streamed_in_any_layout(tmp_path: Path, indent: int | None) -> None:
    rows = [{"question": "q" * size, "answer": f"#### {size}"} for size in range(0, 3000, 7)]
    file = tmp_path / "rows.json.gz"
    file.write_bytes(gzip.compress(json.dumps(rows, indent=indent).encode()))
    records = list(read_records(file))
    assert [r.value for r in records] == rows
    assert len({r.where for r in records}) == len(rows)


def test_array_goes_on_behind_a_broken_element(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('[\n {"a": 1},\n {"a": oops},\n {"a": NaN},\n {"a": 1e999},\n {"a": 2}\n]\n')
    records = list(read_records(file))
    assert [r.value for r in records if not r.problem] == [{"a": 1}, {"a": 2}]
    assert [r.where.rsplit(":", 1)[1] for r in records if r.problem] == ["3", "4", "5"]


def test_an_odd_number_costs_one_element_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('[{"a": 1}, {"a": NaN}, {"a": ' + "9" * 5000 + '}, {"a": 2}]')
    records = list(read_records(file))
    assert [r.value for r in records if not r.problem] == [{"a": 1}, {"a": 2}]
    assert "NaN" in records[1].problem and "digit" in records[2].problem


def test_truncated_array_and_gzip_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('[{"a": 1}, {"a": 2}, {"a"')
    good, again, bad = read_records(file)
    assert (good.value, again.value) == ({"a": 1}, {"a": 2}) and "not JSON" in bad.problem
    cut = tmp_path / "rows.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-20])
    assert "damaged gzip" in list(read_records(cut))[-1].problem
