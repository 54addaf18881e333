"""A policy behind any OpenAI-compatible server: chat completions with tools, several at a time.

What the server refuses, breaks or never answers becomes a turn with `StopReason.POLICY_ERROR` and
its reason. The key is read from the environment when it is needed and is kept nowhere.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.utils import mktime_tz, parsedate_tz
from typing import Any
from urllib.parse import urlsplit

import httpx2
from pydantic import Field

from sharpen import types
from sharpen.calls import assistant_text, compact_json, parse_message
from sharpen.config import Config, one_line
from sharpen.rows import call_from_wire, message_from_wire, message_to_wire, tool_to_wire
from sharpen.types import Dialog, Json, Message, Sampling, SharpenError, StopReason, Turn

AGAIN = {408, 409, 425, 429, *range(500, 600)}  # the same request may succeed later
BROKEN = (LookupError, TypeError, ValueError, AttributeError, RecursionError, types.RowError)


class RemoteLimits(Config):
    """How hard a server is pressed, and how long it is waited for."""

    concurrency: int = Field(8, ge=1)
    attempts: int = Field(4, ge=1)
    timeout_s: float = Field(60.0, gt=0)  # one request, from its first byte to the answer's last
    backoff_s: float = Field(0.5, ge=0)  # before the second attempt; doubled before each later one
    longest_wait_s: float = Field(30.0, ge=0)  # a server that asks for more patience is given up


class Refused(Exception):
    """One attempt came to nothing: why, and how long the next one has to wait at least."""


class RemotePolicy:
    """`base_url` as OpenAI clients take it (`http://host:8000/v1`); `api_key_env` names the
    variable that holds the key."""

    def __init__(
        self, base_url: str, model: str, api_key_env: str = "", limits: RemoteLimits | None = None
    ):
        root = checked_url(base_url)
        root += "" if urlsplit(root).path.strip("/") else "/v1"
        self.url, self.model, self.api_key_env = f"{root}/chat/completions", model, api_key_env
        self.limits = limits or RemoteLimits()

    def respond(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]:
        with ThreadPoolExecutor(1) as pool:  # the caller, such as a notebook, may run its own loop
            return pool.submit(asyncio.run, self.respond_all(dialogs, sampling)).result()

    async def respond_all(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]:
        key = key_from(self.api_key_env)
        gate = asyncio.Semaphore(self.limits.concurrency)
        # the samples of one prompt must differ: each has its own seed
        bodies = [self.body(d, sampling, sampling.seed + i) for i, d in enumerate(dialogs)]
        async with httpx2.AsyncClient(headers=bearer(key), timeout=None) as client:
            return await asyncio.gather(*(self.one(client, gate, body, key) for body in bodies))

    def body(self, dialog: Dialog, sampling: Sampling, seed: int) -> Json:
        body: Json = {"model": self.model, "messages": wire_messages(dialog.messages)}
        body |= {"max_tokens": sampling.max_tokens, "seed": seed % (1 << 31)}
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        lists = {"stop": list(sampling.stop), "tools": [tool_to_wire(t) for t in dialog.tools]}
        return body | {name: value for name, value in lists.items() if value}

    async def one(self, client: Any, gate: asyncio.Semaphore, body: Json, key: str) -> Turn:
        try:
            return await asked(client, gate, self.limits, self.url, body, turn_from_wire)
        except Refused as refusal:
            stop, reason = failure_of(refusal, key)
            return Turn(Message("assistant"), stop, error=reason)


async def asked(
    client: Any,
    gate: asyncio.Semaphore,
    limits: RemoteLimits,
    url: str,
    body: Json | None,
    read: Callable[[bytes], Any],
) -> Any:
    """What `read` makes of the answer, after as many attempts as it needs or is given; else the
    last `Refused`. Without a body it is a GET."""
    refusal = Refused("no attempt", 0.0)
    for attempt in range(limits.attempts):
        if attempt:
            pause = min(limits.backoff_s * 2 ** (attempt - 1), limits.longest_wait_s)
            await asyncio.sleep(max(refusal.args[1], pause))
        try:
            async with gate:
                return await attempted(client, limits.timeout_s, url, body, read)
        except Refused as error:
            refusal = error
        if refusal.args[1] > limits.longest_wait_s:
            break
    raise refusal


async def attempted(
    client: Any, timeout_s: float, url: str, body: Json | None, read: Callable[[bytes], Any]
) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            method = "GET" if body is None else "POST"
            response = await client.request(method, url, json=body)
        if (status := response.status_code) == 200:
            return read(response.content)
    except (httpx2.HTTPError, OSError) as error:
        reason = str(error) or f"no answer within {timeout_s:g} s"
        raise Refused(f"{type(error).__name__}: {reason}", 0.0) from None
    except BROKEN as error:
        raise Refused(f"the answer cannot be read: {error!r}", 0.0) from None
    wait = retry_after(response.headers.get("retry-after", "")) if status in AGAIN else math.inf
    raise Refused(f"HTTP {status}: {response.text}", wait)


def failure_of(refusal: Refused, key: str) -> tuple[StopReason, str]:
    """How a sample ends that was never answered, and why. A server may quote the key back."""
    reason = refusal.args[0].replace(key or "\0", "***")
    full = "context length" in reason.replace("_", " ")
    return StopReason.CONTEXT if full else StopReason.POLICY_ERROR, one_line(reason)[:500]


def checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise SharpenError("base_url: expected http(s)://host[:port]/v1 without credentials")
    return url.rstrip("/")


def key_from(variable: str) -> str:
    """The key that an environment variable holds; none is named, none is needed."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not (key and key.isascii() and key.isprintable()):
        raise SharpenError(f"environment variable {variable}: unset or not a key")
    return key


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def wire_messages(messages: Sequence[Message]) -> list[Json]:
    """Messages as servers demand them: every call has an id and every tool message names one."""
    wire, made, answered = [], itertools.count(), itertools.count()
    for message in messages:
        row = message_to_wire(message, arguments_as_text=True)
        row["content"] = assistant_text(replace(message, tool_calls=()), "")
        for call in row.get("tool_calls", []):
            call.setdefault("id", f"call_{next(made)}")
        if message.role == "tool":
            row.setdefault("tool_call_id", f"call_{next(answered)}")
        wire.append(row)
    return wire


def turn_from_wire(body: bytes) -> Turn:
    """A chat completion → a turn. A call whose arguments are not JSON is kept as unparsed."""
    answer: Any = json.loads(body)
    finish, message = answer["choices"][0]["finish_reason"], answer["choices"][0]["message"]
    if finish not in ("stop", "tool_calls", "length"):
        raise Refused(f"finish_reason {finish!r}", math.inf)
    stop = StopReason.TOKENS if finish == "length" else StopReason.ANSWERED
    content = message_from_wire({"role": "assistant", "content": message.get("content")}).content
    if not message.get("tool_calls"):  # a server without a tool parser leaves them in the text
        return Turn(parse_message(content), stop)
    calls, unparsed = [], []
    for value in message["tool_calls"]:
        try:
            compact_json((call := call_from_wire(value)).arguments)  # refuses NaN too
            calls.append(call)
        except (types.RowError, ValueError) as error:
            unparsed.append(types.UnparsedToolCall(json.dumps(value), str(error)))
    return Turn(Message("assistant", content, tuple(calls), tuple(unparsed)), stop)


def retry_after(value: str) -> float:
    """`Retry-After` in seconds, from a number or a date; 0 when it says nothing readable."""
    if value.isdigit():
        return float(value)
    date = parsedate_tz(value)
    return max(0.0, mktime_tz(date) - time.time()) if date else 0.0
