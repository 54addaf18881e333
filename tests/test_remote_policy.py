"""The remote policy against a real HTTP server on this machine that speaks the protocol, well and
badly."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from email.utils import formatdate

import pytest

from chat_server import ChatServer, completion
from sharpen.policy.remote import RemoteLimits, RemotePolicy, retry_after
from sharpen.types import (
    Dialog,
    Message,
    Sampling,
    SharpenError,
    StopReason,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
)

QUICK = RemoteLimits(timeout_s=5, backoff_s=0.01, attempts=3)
ASK = Dialog((Message("user", "hello"),))


def answer(server: ChatServer, dialogs=(ASK,), limits=QUICK, sampling=None, key_env=""):
    policy = RemotePolicy(server.url, "tester", key_env, limits)
    return policy.respond(list(dialogs), sampling or Sampling())


def test_request_and_answer():
    spec = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})
    dialog = Dialog(
        (
            Message("system", "be brief"),
            Message("user", "add 1"),
            Message("assistant", "", (ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2}))),
            Message("tool", "1"),
            Message("tool", "2"),
        ),
        (spec,),
    )
    with ChatServer(lambda body, n: completion("done")) as server:
        sampling = Sampling(7, 0.5, 0.9, seed=11, stop=("END",))
        (turn,) = answer(server, [dialog], sampling=sampling)
    assert (turn.message, turn.stop, turn.error) == (
        Message("assistant", "done"),
        StopReason.ANSWERED,
        "",
    )
    (body,) = server.bodies
    assert server.paths == ["/v1/chat/completions"]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("tester", 7, 0.5)
    assert (body["top_p"], body["seed"], body["stop"]) == (0.9, 11, ["END"])
    assert body["tools"][0]["function"]["name"] == "add"
    calls = body["messages"][2]["tool_calls"]
    assert calls[0]["function"]["arguments"] == '{"a": 1}'
    ids = [call["id"] for call in calls]
    assert len(set(ids)) == 2 and [m["tool_call_id"] for m in body["messages"][3:]] == ids


def test_each_request_has_its_own_seed_and_order_is_kept():
    dialogs = [Dialog((Message("user", str(i)),)) for i in range(9)]
    with ChatServer(lambda body, n: completion(body["messages"][0]["content"])) as server:
        turns = answer(server, dialogs, sampling=Sampling(seed=100))
    assert [turn.message.content for turn in turns] == [str(i) for i in range(9)]
    assert sorted(body["seed"] for body in server.bodies) == list(range(100, 109))


def test_tool_calls_good_and_broken():
    calls = [
        {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "c2", "function": {"name": "add", "arguments": '{"a": 1'}},
        {"id": "c3", "function": {"name": "add", "arguments": "[1]"}},
        {"id": "c4", "function": {"name": "add", "arguments": '{"a": NaN}'}},
        {"id": "c5", "function": {}},
    ]
    with ChatServer(lambda body, n: completion(None, calls, "tool_calls")) as server:
        (turn,) = answer(server)
    assert turn.message.tool_calls == (ToolCall("add", {"a": 1}, "c1"),)
    reasons = [bad.reason for bad in turn.message.unparsed]
    assert "not JSON" in reasons[0] and "expected an object" in reasons[1] and len(reasons) == 4
    assert '{\\"a\\": 1"' in turn.message.unparsed[0].raw
    assert turn.stop is StopReason.ANSWERED


def test_calls_in_the_text_are_found():
    text = 'Yes.\n<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
    with ChatServer(lambda body, n: completion(text)) as server:
        (turn,) = answer(server)
    assert turn.message == Message("assistant", "Yes.", (ToolCall("add", {"a": 1}),))


def test_an_unparsed_call_is_sent_back_as_text():
    broken = Message("assistant", "hm", unparsed=(UnparsedToolCall("{oops", "not JSON"),))
    with ChatServer(lambda body, n: completion("ok")) as server:
        answer(server, [Dialog((Message("user", "x"), broken, Message("user", "again")))])
    assert server.bodies[0]["messages"][1]["content"] == "hm\n<tool_call>{oops</tool_call>"


@pytest.mark.parametrize(
    ("finish", "stop"), [("stop", StopReason.ANSWERED), ("length", StopReason.TOKENS)]
)
def test_finish_reasons(finish, stop):
    with ChatServer(lambda body, n: completion("x", finish=finish)) as server:
        assert answer(server)[0].stop is stop


def test_a_filtered_answer_is_an_error_without_a_second_try():
    with ChatServer(lambda body, n: completion("x", finish="content_filter")) as server:
        (turn,) = answer(server)
    assert turn.stop is StopReason.POLICY_ERROR and "content_filter" in turn.error
    assert len(server.bodies) == 1


def test_retries_until_it_succeeds_and_honours_retry_after():
    def serve(body, n):
        if n == 0:
            return 429, {"Retry-After": "1"}, "slow down"
        return (500, {}, "oops") if n == 1 else completion("at last")

    with ChatServer(serve) as server:
        started = time.monotonic()
        (turn,) = answer(server)
    assert turn.message.content == "at last" and len(server.bodies) == 3
    assert server.times[1] - server.times[0] >= 0.95 and time.monotonic() - started < 4


def test_a_wait_that_is_too_long_is_not_waited_for():
    with ChatServer(lambda body, n: (429, {"Retry-After": "3600"}, "later")) as server:
        (turn,) = answer(server)
    assert turn.stop is StopReason.POLICY_ERROR and "HTTP 429" in turn.error
    assert len(server.bodies) == 1


def test_retry_after_reads_numbers_dates_and_nonsense():
    assert retry_after("7") == 7
    assert 8 < retry_after(formatdate(time.time() + 10, usegmt=True)) <= 10
    assert retry_after("soon") == retry_after("") == retry_after("-5") == 0


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((500, {}, "engine is dead"), "HTTP 500: engine is dead"),
        ((200, {}, "{broken"), "the answer cannot be read: JSONDecodeError"),
        ((200, {}, "[]"), "the answer cannot be read"),
        ((200, {}, '{"choices": []}'), "the answer cannot be read"),
        (
            (200, {}, '{"choices": [{"message": {"content": 3}, "finish_reason": "stop"}]}'),
            "RowError",
        ),
        (None, "RemoteProtocolError"),  # the connection is cut
    ],
)
def test_failures_are_turns_with_their_reason_after_all_attempts(reply, reason):
    with ChatServer(lambda body, n: reply) as server:
        (turn,) = answer(server)
    assert turn.stop is StopReason.POLICY_ERROR and reason in turn.error
    assert turn.message == Message("assistant") and len(server.bodies) == 3


def test_a_refusal_is_not_repeated_and_a_full_context_is_called_so():
    with ChatServer(lambda body, n: (401, {}, "no such key")) as server:
        (turn,) = answer(server)
    assert turn.stop is StopReason.POLICY_ERROR and "HTTP 401: no such key" in turn.error
    assert len(server.bodies) == 1
    with ChatServer(lambda body, n: (400, {}, '{"code": "context_length_exceeded"}')) as server:
        assert answer(server)[0].stop is StopReason.CONTEXT


def test_a_hanging_request_does_not_hold_the_others():
    release = threading.Event()

    def serve(body, n):
        if body["messages"][0]["content"] == "hang":
            release.wait(20)
        return completion("ok")

    dialogs = [Dialog((Message("user", text),)) for text in ("a", "hang", "b", "c")]
    with ChatServer(serve) as server:
        started = time.monotonic()
        turns = answer(server, dialogs, RemoteLimits(timeout_s=0.5, attempts=2, backoff_s=0))
        spent = time.monotonic() - started
        release.set()
    assert [turn.stop for turn in turns].count(StopReason.ANSWERED) == 3
    assert turns[1].stop is StopReason.POLICY_ERROR and "no answer within 0.5 s" in turns[1].error
    assert spent < 5


def test_a_dripping_answer_is_cut_off_too():
    with ChatServer(lambda body, n: "drip") as server:
        started = time.monotonic()
        (turn,) = answer(server, limits=RemoteLimits(timeout_s=0.5, attempts=1))
        assert turn.stop is StopReason.POLICY_ERROR and time.monotonic() - started < 4


def test_no_more_requests_at_once_than_allowed():
    running = 0
    most_running = 0
    lock = threading.Lock()

    def serve(body, n):
        nonlocal running, most_running
        with lock:
            running += 1
            most_running = max(most_running, running)
        time.sleep(0.03)
        with lock:
            running -= 1
        return completion("x")

    with ChatServer(serve) as server:
        answer(server, [ASK] * 12, RemoteLimits(concurrency=3))
    assert most_running == 3


def test_nobody_listens():
    policy = RemotePolicy("http://127.0.0.1:9", "m", limits=QUICK)
    (turn,) = policy.respond([ASK], Sampling())
    assert turn.stop is StopReason.POLICY_ERROR and "ConnectError" in turn.error


def test_half_a_surrogate_fails_alone():
    with ChatServer(lambda body, n: completion("ok")) as server:
        turns = answer(server, [ASK, Dialog((Message("user", "\ud800"),))])
    assert [turn.stop for turn in turns] == [StopReason.ANSWERED, StopReason.POLICY_ERROR]


def test_the_key_comes_from_the_environment_and_is_never_shown(monkeypatch):
    monkeypatch.setenv("TEST_KEY", "sk-very-secret-9")

    def serve(body, n):
        echo = "x" * 490 + f" bad key {server.headers[-1]['Authorization']}"
        return 401, {}, echo[400:] if n else echo

    with ChatServer(serve) as server:
        policy = RemotePolicy(server.url, "m", "TEST_KEY", QUICK)
        turns = policy.respond([ASK, ASK], Sampling())
    assert server.headers[0]["Authorization"] == "Bearer sk-very-secret-9"
    for turn in turns:
        assert turn.error.startswith("HTTP 401") and "secret" not in turn.error
        assert "sk-" not in turn.error
    assert "secret" not in repr(vars(policy))


@pytest.mark.parametrize("value", [None, " ", "two\nlines"])
def test_a_missing_or_broken_key_is_one_line(monkeypatch, value):
    monkeypatch.delenv("TEST_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("TEST_KEY", value)
    with pytest.raises(SharpenError, match="environment variable TEST_KEY: unset or not a key"):
        RemotePolicy("http://127.0.0.1:9/v1", "m", "TEST_KEY").respond([ASK], Sampling())


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x/v1", "http://me:pw@host/v1"])
def test_a_wrong_address_is_refused(url):
    with pytest.raises(SharpenError, match="base_url") as caught:
        RemotePolicy(url, "m")
    assert "pw" not in str(caught.value)


def test_it_works_inside_a_running_event_loop():
    with ChatServer(lambda body, n: completion("ok")) as server:

        async def notebook_cell():
            return answer(server)

        (turn,) = asyncio.run(notebook_cell())
    assert turn.message.content == "ok"


def test_it_is_a_public_name():
    import sharpen

    assert sharpen.RemotePolicy is RemotePolicy


def test_a_real_model_answers_through_the_server(pico_folder):
    """pico served over HTTP: what comes back is what the model sampled."""
    from sharpen.models.load import ModelConfig
    from sharpen.policy.local import LocalPolicy

    local = LocalPolicy.load(ModelConfig(base_model=str(pico_folder)))
    with ChatServer(local) as server:
        (turn,) = answer(server, sampling=Sampling(max_tokens=12))
    (direct,) = local.respond([ASK], Sampling(max_tokens=12))
    assert turn.message.content == json.loads(json.dumps(direct.message.content))
    assert turn.stop is direct.stop
