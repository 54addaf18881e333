"""A small OpenAI-compatible server on loopback for tests; a script or a policy replies."""

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
    """Returns the JSON of a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}


def served_by(policy: Any) -> Callable[[dict, int], dict]:
    """Returns a reply function that asks a policy, one request at a time."""
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
    """A server that answers with `reply(body, number)`, or with a policy.

    A reply is a completion, `(status, headers, text)`, "drip" (one byte at a time, for seconds), or
    None, which cuts the connection.
    """

    def __init__(self, reply: Any):
        self.reply = served_by(reply) if hasattr(reply, "respond") else reply
        # one entry per request
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.lock = threading.Lock()
        chat_server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with chat_server.lock:
                    number = len(chat_server.bodies)
                    chat_server.bodies.append(body)
                    chat_server.headers.append(dict(self.headers))
                    chat_server.paths.append(self.path)
                    chat_server.times.append(time.monotonic())
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.answer(chat_server.reply(body, number))

            def answer(self, reply: Any) -> None:
                if reply is None:
                    return
                if reply == "drip":
                    self.send_head(200, {}, 60)
                    for _ in range(60):
                        self.wfile.write(b" ")
                        self.wfile.flush()
                        time.sleep(0.1)
                    return
                if isinstance(reply, dict):
                    reply = (200, {}, json.dumps(reply))
                status, headers, text = reply
                data = text.encode()
                self.send_head(status, headers, len(data))
                self.wfile.write(data)

            def send_head(self, status: int, headers: dict, length: int) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(length))
                self.end_headers()

            def log_message(self, *values: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self) -> ChatServer:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.server.shutdown()
        self.server.server_close()
