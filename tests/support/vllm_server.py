"""A small server on loopback that speaks the routes of vLLM 0.32 that we use, with a real model.

The routes are `/inference/v1/generate`, `/v1/models`, `/v1/load_lora_adapter` and
`/v1/unload_lora_adapter`. `python vllm_server.py MODEL` prints its port and serves until it is
killed. `VLLMServer(policy)` is the same within a test, with replies that can be made to fail.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sharpen.types import Sampled, Sampling, StopReason

FINISH_REASONS = {StopReason.ANSWERED: "stop", StopReason.TOKENS: "length"}
GENERATE_ROUTE = "/inference/v1/generate"


class VLLMServer:
    """Serves a local policy.

    `trouble` is a queue of `(status, headers, text)`, which are answered before anything else.
    `change` is applied to every generate answer.
    """

    def __init__(self, policy: Any, model: str = "pico", processed: bool = True):
        self.policy = policy
        self.model = model
        self.processed = processed  # False: reports raw log-probabilities
        self.adapters: dict[str, str] = {}
        self.trouble: deque[tuple[int, dict, str]] = deque()
        self.bodies: list[dict] = []
        self.forgets = False  # loads adapters without listing them
        self.change: Any = lambda answer: answer
        self.policy_lock = threading.Lock()
        self.arrived = threading.Condition()
        self.under_way = 0
        self.most_under_way = 0
        self.expected_under_way = 1  # no request is answered before this many have arrived
        vllm_server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, json.dumps({"object": "list", "data": vllm_server.cards()}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                vllm_server.bodies.append(body)
                if self.path == GENERATE_ROUTE and vllm_server.trouble:
                    status, headers, text = vllm_server.trouble.popleft()
                    self.reply(status, text, headers)
                    return
                routes = {
                    GENERATE_ROUTE: vllm_server.generate,
                    "/v1/load_lora_adapter": vllm_server.load,
                    "/v1/unload_lora_adapter": vllm_server.unload,
                }
                if self.path in routes:
                    status, text = routes[self.path](body)
                    self.reply(status, text)
                else:
                    self.reply(404, '{"detail":"Not Found"}')

            def reply(self, status: int, text: str, headers: dict | None = None) -> None:
                data = text.encode()
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *values: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def cards(self) -> list[dict]:
        """Returns what the models route lists."""
        cards = [{"id": self.model, "root": self.model, "parent": None, "max_model_len": 2048}]
        for name, path in self.adapters.items():
            cards.append({"id": name, "root": path, "parent": self.model, "max_model_len": None})
        return cards

    def generate(self, body: dict) -> tuple[int, str]:
        """Returns the status and text of a generate answer."""
        if body["model"] not in {card["id"] for card in self.cards()}:
            return 404, error_text(f"The model `{body['model']}` does not exist.", 404)
        with self.arrived:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            self.arrived.notify_all()
            self.arrived.wait_for(lambda: self.most_under_way >= self.expected_under_way, timeout=5)
        sampled = self.sample(body["token_ids"], body["sampling_params"])
        with self.arrived:
            self.under_way -= 1
        content = []
        for token, logprob in zip(sampled.ids, sampled.logprobs, strict=True):
            content.append({"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []})
        choice = {
            "index": 0,
            "token_ids": list(sampled.ids),
            "logprobs": {"content": content},
            "finish_reason": FINISH_REASONS[sampled.stop],
            "stop_reason": None,
        }
        answer = {"request_id": "generate-tokens-0", "model": body["model"], "choices": [choice]}
        return 200, json.dumps(self.change(answer))

    def sample(self, prompt: list[int], params: dict) -> Sampled:
        """Sample with the policy; where only one token is allowed, answer with it."""
        allowed = params.get("allowed_token_ids")
        if allowed:
            logprob = 0.0 if self.processed else -3.2
            return Sampled(tuple(allowed[:1]), (logprob,), StopReason.ANSWERED)
        sampling = Sampling(
            params["max_tokens"],
            params["temperature"],
            params["top_p"],
            params["seed"],
            tuple(params.get("stop", ())),
        )
        with self.policy_lock:
            self.policy.submit(0, prompt, sampling)
            ((_, sampled),) = self.policy.advance()
        return sampled

    def load(self, body: dict) -> tuple[int, str]:
        """Returns the status and text of loading an adapter."""
        if body["lora_name"] in self.adapters:
            return 400, error_text("has already been loaded", 400)
        if not self.forgets:
            self.adapters[body["lora_name"]] = body["lora_path"]
        return 200, f"Success: LoRA adapter '{body['lora_name']}' added successfully."

    def unload(self, body: dict) -> tuple[int, str]:
        """Returns the status and text of unloading an adapter."""
        if self.adapters.pop(body["lora_name"], None) is None:
            return 404, error_text("cannot be found", 404)
        return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."

    def __enter__(self) -> VLLMServer:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.server.shutdown()
        self.server.server_close()


def error_text(message: str, code: int) -> str:
    """Returns the JSON of an error, as vLLM writes it."""
    return json.dumps({"error": {"message": message, "type": "BadRequestError", "code": code}})


if __name__ == "__main__":
    from sharpen.models.load import ModelConfig
    from sharpen.policy.local import LocalPolicy

    server = VLLMServer(LocalPolicy.load(ModelConfig(base_model=sys.argv[1])))
    print(server.server.server_port, flush=True)
    server.server.serve_forever()
