"""A policy over any OpenAI-compatible server: chat completions with tools, many at a time.

Evaluation uses `RemotePolicy`, and a judge may. The vLLM policy shares the request functions. When
a server refuses a request, breaks off or never answers, the turn gets `StopReason.POLICY_ERROR` and
the reason. The API key is read from the environment for each use and never stored.
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
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import Field

from sharpen.calls import assistant_text, compact_json, parse_message
from sharpen.config import Config, one_line
from sharpen.rows import call_from_wire, message_from_wire, message_to_wire, tool_to_wire
from sharpen.types import (
    Dialog,
    Json,
    Message,
    RowError,
    Sampling,
    SharpenError,
    StopReason,
    ToolCall,
    Turn,
    UnparsedToolCall,
)

# HTTP statuses after which the same request may succeed later
_RETRY_STATUSES = {408, 409, 425, 429, *range(500, 600)}
# what reading a malformed answer can raise
_READ_ERRORS = (LookupError, TypeError, ValueError, AttributeError, RecursionError, RowError)
_MAX_REASON = 500  # characters of a failure's reason

_Answer = TypeVar("_Answer")


class RemoteLimits(Config):
    """How many requests a server gets at once, and how long they may take."""

    concurrency: int = Field(8, ge=1)
    attempts: int = Field(4, ge=1)
    timeout_s: float = Field(60.0, gt=0)  # one request, until the last byte of its answer
    backoff_s: float = Field(0.5, ge=0)  # before the second attempt; doubled for each later one
    longest_wait_s: float = Field(30.0, ge=0)  # give up on a server that asks for a longer wait


class RequestFailed(Exception):
    """One attempt failed. `min_wait_s` is how long the next one has to wait at least."""

    def __init__(self, reason: str, min_wait_s: float):
        super().__init__(reason, min_wait_s)
        self.reason = reason
        self.min_wait_s = min_wait_s


class RemotePolicy:
    """A policy over the chat completions route of a server.

    `base_url` is what OpenAI clients take (`http://host:8000/v1`). `api_key_env` names the
    environment variable that holds the key.
    """

    def __init__(
        self, base_url: str, model: str, api_key_env: str = "", limits: RemoteLimits | None = None
    ):
        root = check_base_url(base_url)
        if not urlsplit(root).path.strip("/"):
            root += "/v1"
        self.url = f"{root}/chat/completions"
        self.model = model
        self.api_key_env = api_key_env
        self.limits = limits or RemoteLimits()

    def respond(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]:
        # in a thread of its own: the caller, such as a notebook, may run an event loop already
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, self._respond_all(dialogs, sampling)).result()

    async def _respond_all(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]:
        """Send all requests at once and wait for all turns."""
        key = read_api_key(self.api_key_env)
        gate = asyncio.Semaphore(self.limits.concurrency)
        bodies = []
        for index, dialog in enumerate(dialogs):
            # samples of the same prompt must differ, so each request has its own seed
            bodies.append(self._request_body(dialog, sampling, sampling.seed + index))
        async with httpx2.AsyncClient(headers=bearer_header(key), timeout=None) as client:
            requests = [self._request_turn(client, gate, body, key) for body in bodies]
            return await asyncio.gather(*requests)

    def _request_body(self, dialog: Dialog, sampling: Sampling, seed: int) -> Json:
        """Returns the JSON body of a chat completion request."""
        body: Json = {
            "model": self.model,
            "messages": _messages_to_wire(dialog.messages),
            "max_tokens": sampling.max_tokens,
            "seed": seed % (1 << 31),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        # left out when empty
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if dialog.tools:
            body["tools"] = [tool_to_wire(tool) for tool in dialog.tools]
        return body

    async def _request_turn(
        self, client: httpx2.AsyncClient, gate: asyncio.Semaphore, body: Json, key: str
    ) -> Turn:
        """Returns the turn that the server answers, or one that carries the failure."""
        try:
            return await request_with_retries(
                client, gate, self.limits, self.url, body, _turn_from_completion
            )
        except RequestFailed as failure:
            stop, reason = describe_failure(failure, key)
            return Turn(Message("assistant"), stop, error=reason)


async def request_with_retries(
    client: httpx2.AsyncClient,
    gate: asyncio.Semaphore,
    limits: RemoteLimits,
    url: str,
    body: Json | None,
    read: Callable[[bytes], _Answer],
) -> _Answer:
    """Send a request until one attempt succeeds, and return what `read` makes of the answer.

    A request without a body is a GET. Raises the last `RequestFailed` when all attempts failed, or
    when the server asks for too long a wait.
    """
    failure = RequestFailed("no attempt", 0.0)
    for attempt in range(limits.attempts):
        if attempt:
            pause_s = min(limits.backoff_s * 2 ** (attempt - 1), limits.longest_wait_s)
            await asyncio.sleep(max(failure.min_wait_s, pause_s))
        try:
            async with gate:
                return await _request_once(client, limits.timeout_s, url, body, read)
        except RequestFailed as error:
            failure = error
        if failure.min_wait_s > limits.longest_wait_s:
            break
    raise failure


async def _request_once(
    client: httpx2.AsyncClient,
    timeout_s: float,
    url: str,
    body: Json | None,
    read: Callable[[bytes], _Answer],
) -> _Answer:
    """Send a request and read its answer; whatever goes wrong is a `RequestFailed`."""
    method = "GET" if body is None else "POST"
    try:
        async with asyncio.timeout(timeout_s):
            response = await client.request(method, url, json=body)
        if response.status_code == 200:
            return read(response.content)
    except (httpx2.HTTPError, OSError) as error:
        reason = str(error) or f"no answer within {timeout_s:g} s"
        raise RequestFailed(f"{type(error).__name__}: {reason}", 0.0) from None
    except _READ_ERRORS as error:
        raise RequestFailed(f"the answer cannot be read: {error!r}", 0.0) from None
    min_wait_s = math.inf
    if response.status_code in _RETRY_STATUSES:
        min_wait_s = retry_after(response.headers.get("retry-after", ""))
    raise RequestFailed(f"HTTP {response.status_code}: {response.text}", min_wait_s)


def describe_failure(failure: RequestFailed, key: str) -> tuple[StopReason, str]:
    """Returns the stop reason and the error text of a sample that was never answered.

    The key is removed from the text, because servers quote it back.
    """
    reason = failure.reason
    if key:
        reason = reason.replace(key, "***")
    stop = StopReason.POLICY_ERROR
    if "context length" in reason.replace("_", " "):
        stop = StopReason.CONTEXT
    return stop, one_line(reason)[:_MAX_REASON]


def check_base_url(url: str) -> str:
    """Returns the URL without a trailing slash; raises when it is no plain http(s) address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise SharpenError("base_url: expected http(s)://host[:port]/v1 without credentials")
    return url.rstrip("/")


def read_api_key(variable: str) -> str:
    """Returns the key that an environment variable holds, or "" when none is named."""
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise SharpenError(f"environment variable {variable}: unset or not a key")
    return key


def bearer_header(key: str) -> dict[str, str]:
    """Returns the HTTP headers that carry the key; none without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def _messages_to_wire(messages: Sequence[Message]) -> list[Json]:
    """Returns messages as servers require them.

    Every call gets an id, and every tool message names the call that it answers. Missing ids are
    counted up: the n-th answer without an id belongs to the n-th call without one.
    """
    wire_messages = []
    call_numbers = itertools.count()
    answer_numbers = itertools.count()
    for message in messages:
        row = message_to_wire(message, arguments_as_text=True)
        row["content"] = assistant_text(replace(message, tool_calls=()), "")
        for call in row.get("tool_calls", []):
            call.setdefault("id", f"call_{next(call_numbers)}")
        if message.role == "tool":
            row.setdefault("tool_call_id", f"call_{next(answer_numbers)}")
        wire_messages.append(row)
    return wire_messages


def _turn_from_completion(content: bytes) -> Turn:
    """Read a chat completion. A call whose arguments are not JSON is kept as unparsed."""
    completion: Any = json.loads(content)
    choice = completion["choices"][0]
    finish = choice["finish_reason"]
    message = choice["message"]
    if finish not in ("stop", "tool_calls", "length"):
        raise RequestFailed(f"finish_reason {finish!r}", math.inf)
    stop = StopReason.TOKENS if finish == "length" else StopReason.ANSWERED
    text = message_from_wire({"role": "assistant", "content": message.get("content")}).content
    if not message.get("tool_calls"):  # a server without a tool parser leaves calls in the text
        return Turn(parse_message(text), stop)
    calls: list[ToolCall] = []
    unparsed: list[UnparsedToolCall] = []
    for value in message["tool_calls"]:
        try:
            call = call_from_wire(value)
            compact_json(call.arguments)  # refuses NaN, which `json` reads
            calls.append(call)
        except (RowError, ValueError) as error:
            unparsed.append(UnparsedToolCall(json.dumps(value), str(error)))
    return Turn(Message("assistant", text, tuple(calls), tuple(unparsed)), stop)


def retry_after(value: str) -> float:
    """Returns the seconds of a `Retry-After` header, a number or a date; 0 if it is unreadable."""
    if value.isdigit():
        return float(value)
    date = parsedate_tz(value)
    if not date:
        return 0.0
    return max(0.0, mktime_tz(date) - time.time())
