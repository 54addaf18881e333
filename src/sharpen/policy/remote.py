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
from collections.abc import Sequence
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
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise SharpenError("base_url: expected http(s)://host[:port]/v1 without credentials")
        root = base_url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")
        self.url, self.model, self.api_key_env = f"{root}/chat/completions", model, api_key_env
        self.limits = limits or RemoteLimits()

    def respond(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]:
        with ThreadPoolExecutor(1) as pool:  # the caller, such as a notebook, may run its own loop
            return pool.submit(asyncio.run, self.respond_all(dialogs, sampling)).result()

    async def respond_all(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]:
        key = os.environ.get(self.api_key_env, "").strip() if self.api_key_env else ""
        if self.api_key_env and not (key and key.isascii() and key.isprintable()):
            raise SharpenError(f"environment variable {self.api_key_env}: unset or not a key")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        gate = asyncio.Semaphore(self.limits.concurrency)
        # the samples of one prompt must differ: each has its own seed
        bodies = [self.body(d, sampling, sampling.seed + i) for i, d in enumerate(dialogs)]
        async with httpx2.AsyncClient(headers=headers, timeout=None) as client:
            return await asyncio.gather(*(self.one(client, gate, body, key) for body in bodies))

    def body(self, dialog: Dialog, sampling: Sampling, seed: int) -> Json:
        body: Json = {"model": self.model, "messages": wire_messages(dialog.messages)}
        body |= {"max_tokens": sampling.max_tokens, "seed": seed % (1 << 31)}
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        lists = {"stop": list(sampling.stop), "tools": [tool_to_wire(t) for t in dialog.tools]}
        return body | {name: value for name, value in lists.items() if value}

    async def one(self, client: Any, gate: asyncio.Semaphore, body: Json, key: str) -> Turn:
        """One dialog's turn, after as many attempts as it needs or is given."""
        limits, reason, wait = self.limits, "", 0.0
        for attempt in range(limits.attempts):
            if attempt:
                pause = min(limits.backoff_s * 2 ** (attempt - 1), limits.longest_wait_s)
                await asyncio.sleep(max(wait, pause))
            try:
                async with gate:
                    return await self.post(client, body)
            except Refused as refusal:
                reason, wait = refusal.args
            if wait > limits.longest_wait_s:
                break
        reason = reason.replace(key or "\0", "***")  # a server may quote the header back
        full = "context length" in reason.replace("_", " ")
        stop = StopReason.CONTEXT if full else StopReason.POLICY_ERROR
        return Turn(Message("assistant"), stop, error=one_line(reason)[:500])

    async def post(self, client: Any, body: Json) -> Turn:
        """One request → the turn of a good answer, or `Refused`."""
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                response = await client.post(self.url, json=body)
            if (status := response.status_code) == 200:
                return turn_from_wire(json.loads(response.content))
        except (httpx2.HTTPError, OSError) as error:
            reason = str(error) or f"no answer within {self.limits.timeout_s:g} s"
            raise Refused(f"{type(error).__name__}: {reason}", 0.0) from None
        except BROKEN as error:
            raise Refused(f"not a chat completion: {error!r}", 0.0) from None
        wait = retry_after(response.headers.get("retry-after", "")) if status in AGAIN else math.inf
        raise Refused(f"HTTP {status}: {response.text}", wait)


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


def turn_from_wire(answer: Any) -> Turn:
    """A chat completion → a turn. A call whose arguments are not JSON is kept as unparsed."""
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
