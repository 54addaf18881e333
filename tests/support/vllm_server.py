"""A little server on loopback that speaks the routes of vLLM 0.32 which we use, with a real model
behind them: `/inference/v1/generate`, `/v1/models`, `/v1/load_lora_adapter` and its opposite.

`python vllm_server.py MODEL` prints its port and serves until it is killed; `VLLMServer(policy)` is
the same within a test, with replies that can be made to fail.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sharpen.types import Sampling, StopReason

FINISH = {StopReason.ANSWERED: "stop", StopReason.TOKENS: "length"}


class VLLMServer:
    """`trouble` is a queue of `(status, headers, text)` that are answered before anything else."""

    def __init__(self, policy: Any, model: str = "pico", processed: bool = True):
        self.policy, self.model, self.processed = policy, model, processed
        self.adapters: dict[str, str] = {}
        self.trouble: deque[tuple[int, dict, str]] = deque()
        self.bodies: list[dict] = []
        self.forgets = False  # loads adapters without listing them
        self.change: Any = lambda answer: answer
        self.lock, self.arrived = threading.Lock(), threading.Condition()
        self.together, self.most, self.wanted = 0, 0, 1
        outer = self

        class Talk(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, json.dumps({"object": "list", "data": outer.cards()}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                if self.path == "/inference/v1/generate" and outer.trouble:
                    status, headers, text = outer.trouble.popleft()
                    return self.reply(status, text, headers)
                route = {
                    "/inference/v1/generate": outer.generate,
                    "/v1/load_lora_adapter": outer.load,
                    "/v1/unload_lora_adapter": outer.unload,
                }.get(self.path)
                self.reply(*(route(body) if route else (404, '{"detail":"Not Found"}')))

            def reply(self, status: int, text: str, headers: dict | None = None) -> None:
                data = text.encode()
                self.send_response(status)
                for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *values: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Talk)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def cards(self) -> list[dict]:
        base = {"id": self.model, "root": self.model, "parent": None, "max_model_len": 2048}
        loras = [
            {"id": name, "root": path, "parent": self.model, "max_model_len": None}
            for name, path in self.adapters.items()
        ]
        return [base, *loras]

    def generate(self, body: dict) -> tuple[int, str]:
        if body["model"] not in {card["id"] for card in self.cards()}:
            return 404, error(f"The model `{body['model']}` does not exist.", 404)
        with self.arrived:  # many are under way at once
            self.together += 1
            self.most = max(self.most, self.together)
            self.arrived.notify_all()
            self.arrived.wait_for(lambda: self.most >= self.wanted, timeout=5)
        params = body["sampling_params"]
        if only := params.get("allowed_token_ids"):
            ids, logprobs, finish = only[:1], [0.0 if self.processed else -3.2], "stop"
        else:
            sampling = Sampling(
                params["max_tokens"],
                params["temperature"],
                params["top_p"],
                params["seed"],
                tuple(params.get("stop", ())),
            )
            with self.lock:
                self.policy.submit(0, body["token_ids"], sampling)
                ((_, sampled),) = self.policy.advance()
            ids, logprobs = sampled.ids, sampled.logprobs
            finish = FINISH[sampled.stop]
        with self.arrived:
            self.together -= 1
        content = [
            {"token_id": i, "logprob": p, "rank": 1, "top_logprobs": []}
            for i, p in zip(ids, logprobs, strict=True)
        ]
        choice = {"index": 0, "token_ids": list(ids), "logprobs": {"content": content}}
        choice |= {"finish_reason": finish, "stop_reason": None}
        answer = {"request_id": "generate-tokens-0", "model": body["model"], "choices": [choice]}
        return 200, json.dumps(self.change(answer))

    def load(self, body: dict) -> tuple[int, str]:
        if body["lora_name"] in self.adapters:
            return 400, error("has already been loaded", 400)
        if not self.forgets:
            self.adapters[body["lora_name"]] = body["lora_path"]
        return 200, f"Success: LoRA adapter '{body['lora_name']}' added successfully."

    def unload(self, body: dict) -> tuple[int, str]:
        if self.adapters.pop(body["lora_name"], None) is None:
            return 404, error("cannot be found", 404)
        return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."

    def __enter__(self) -> VLLMServer:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.server.shutdown()
        self.server.server_close()


def error(message: str, code: int) -> str:
    return json.dumps({"error": {"message": message, "type": "BadRequestError", "code": code}})


if __name__ == "__main__":
    from sharpen.models.load import ModelConfig
    from sharpen.policy.local import LocalPolicy

    found = VLLMServer(LocalPolicy.load(ModelConfig(base_model=sys.argv[1])))
    print(found.server.server_port, flush=True)
    found.server.serve_forever()
