"""A little OpenAI-compatible server on loopback for tests: scripted replies, or a policy behind
it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sharpen.rows import dialog_from_row, message_to_wire
from sharpen.types import Sampling, StopReason


def completion(content: str | None, calls: Any = None, finish: str = "stop") -> dict:
    message = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}


def served_by(policy: Any) -> Callable[[dict, int], dict]:
    """A policy as what the server says; one request at a time, as a model on one device is."""
    lock = threading.Lock()

    def reply(body: dict, number: int) -> dict:
        sampling = Sampling(body["max_tokens"], body["temperature"], body["top_p"], body["seed"])
        with lock:
            (turn,) = policy.respond([dialog_from_row(body)], sampling)
        wire = message_to_wire(turn.message, arguments_as_text=True)
        finish = "length" if turn.stop is StopReason.TOKENS else "stop"
        return completion(wire["content"], wire.get("tool_calls"), finish)

    return reply


class ChatServer:
    """`reply(body, number)` gives a completion, `(status, headers, text)`, "drip" or None (cuts the
    connection)."""

    def __init__(self, reply: Any):
        self.reply = served_by(reply) if hasattr(reply, "respond") else reply
        self.bodies, self.headers, self.paths, self.times = [], [], [], []
        self.lock = threading.Lock()
        outer = self

        class Talk(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    number = len(outer.bodies)
                    outer.bodies.append(body)
                    outer.headers.append(dict(self.headers))
                    outer.paths.append(self.path)
                    outer.times.append(time.monotonic())
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.answer(outer.reply(body, number))

            def answer(self, reply: Any) -> None:
                if reply is None:
                    return
                drip = reply == "drip"
                status, headers, text = (200, {}, " " * 60) if drip else (0, {}, "")
                if isinstance(reply, dict):
                    status, headers, text = 200, {}, json.dumps(reply)
                elif not drip:
                    status, headers, text = reply
                data = text.encode()
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(data))}).items():
                    self.send_header(name, value)
                self.end_headers()
                for start in range(0, len(data), 1 if drip else len(data) or 1):
                    self.wfile.write(data[start : start + (1 if drip else len(data))])
                    self.wfile.flush()
                    time.sleep(0.1 if drip else 0)

            def log_message(self, *values: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Talk)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self) -> ChatServer:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.server.shutdown()
        self.server.server_close()
