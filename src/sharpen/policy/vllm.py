"""A policy behind a vLLM 0.32 server, over its own routes: token ids in and out, with
log-probabilities, and adapters that are exchanged while it runs.

The server is started with `vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs`;
for adapters also `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`. Log-probabilities are
those at the sampling temperature; below a `top_p` of 1 they are shares of the nucleus.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import httpx2

from sharpen.calls import compact_json
from sharpen.policy import remote
from sharpen.policy.local import respond
from sharpen.policy.remote import Refused, RemoteLimits
from sharpen.records import sha256_folder
from sharpen.render import Renderer
from sharpen.types import Dialog, Json, Sampled, Sampling, SharpenError, StopReason, ToolSpec, Turn

GENERATE, MODELS = "/inference/v1/generate", "/v1/models"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NO_LOGPROB = -9999.0  # what the server sends where it has none
# The server queues and batches by itself: it is given everything at once.
LIMITS = RemoteLimits(concurrency=1024, timeout_s=600.0)


class VLLMPolicy:
    """`url` is the server's root (`http://host:8000`), `model` the name it serves, `renderer` that
    of the same model. `adapter` is a PEFT folder that the server can read."""

    def __init__(
        self,
        url: str,
        model: str,
        renderer: Renderer,
        adapter: str | Path = "",
        api_key_env: str = "",
        limits: RemoteLimits = LIMITS,
    ):
        self.url, self.model, self.renderer = remote.checked_url(url), model, renderer
        self.api_key_env, self.limits, self.rows = api_key_env, limits, limits.concurrency
        self.serving, self.digest = model, ""  # the name that answers, its adapter's SHA-256
        self.under_way: dict[Future[Any], Any] = {}
        self.refused: list[tuple[Any, Sampled]] = []
        self.gate = asyncio.Semaphore(self.limits.concurrency)
        headers = remote.bearer(remote.key_from(api_key_env))
        pool = httpx2.Limits(max_connections=self.limits.concurrency)
        self.client = httpx2.AsyncClient(headers=headers, timeout=None, limits=pool)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True, name="vllm").start()
        cards = self.served()
        if model not in cards:
            names = ", ".join(cards)
            raise SharpenError(f"vLLM at {self.url}: serves {names}, not {model!r}")
        self.context = int(cards[model].get("max_model_len") or 0)
        self.check_logprobs()
        if adapter:
            self.load_adapter(adapter)

    def respond(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]:
        return respond(self, dialogs, sampling)

    def submit(
        self, key: Any, prompt: Sequence[int], sampling: Sampling, tools: Sequence[ToolSpec] = ()
    ) -> None:
        if sampling.constrained and tools:
            raise SharpenError("constrained decoding: the vLLM policy has none; use a local model")
        if len(prompt) + sampling.max_tokens > (self.context or math.inf):
            why = f"{len(prompt)} + {sampling.max_tokens} tokens: over {self.context}"
            self.refused.append((key, Sampled((), (), StopReason.CONTEXT, why)))
            return
        answer = self.send(GENERATE, self.body(prompt, sampling), self.reader(sampling))
        self.under_way[answer] = key

    def advance(self) -> list[tuple[Any, Sampled]]:
        """Wait until something is answered; nothing is when nothing is under way."""
        done, self.refused = self.refused, []
        if not done and self.under_way:
            for answer in wait(self.under_way, return_when=FIRST_COMPLETED).done:
                try:
                    sampled = answer.result()
                except Refused as refusal:
                    sampled = Sampled(
                        (), (), *remote.failure_of(refusal, remote.key_from(self.api_key_env))
                    )
                done.append((self.under_way.pop(answer), sampled))
        return done

    @property
    def idle(self) -> bool:
        return not self.under_way and not self.refused

    def forget(self) -> None:
        """The cache is the server's: which answers share a batch there is not ours to say."""

    def body(self, prompt: Sequence[int], sampling: Sampling, **more: Any) -> Json:
        """Only our stop tokens end a turn, whatever the model's own configuration says."""
        params: Json = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature}
        params |= {"top_p": sampling.top_p, "seed": sampling.seed % (1 << 62), "logprobs": 0}
        params |= {"stop_token_ids": sorted(self.renderer.stop_ids), "ignore_eos": True}
        if sampling.stop:
            params |= {"stop": list(sampling.stop), "skip_special_tokens": False}
        return {"model": self.serving, "token_ids": list(prompt), "sampling_params": params | more}

    def reader(self, sampling: Sampling) -> Callable[[bytes], Sampled]:
        stop_ids, serving = self.renderer.stop_ids, self.serving

        def read(content: bytes) -> Sampled:
            answer = json.loads(content)
            choice = answer["choices"][0]
            ids, told = tuple(choice["token_ids"]), choice["logprobs"]["content"]
            logprobs = tuple(float(each["logprob"]) for each in told)
            finish = choice["finish_reason"]
            wrong = finish not in ("stop", "length") and f"finish_reason {finish!r}"
            if answer["model"] != serving:
                wrong = f"{answer['model']!r} answered, not {serving!r}"
            elif ids != tuple(each["token_id"] for each in told) or NO_LOGPROB in logprobs:
                wrong = "not every token has its log-probability"
            elif finish == "stop" and not sampling.stop and ids[-1] not in stop_ids:
                wrong = f"token {ids[-1]} ended the turn, which is no stop token here"
            if wrong:
                raise Refused(wrong, math.inf)
            stop = StopReason.TOKENS if finish == "length" else StopReason.ANSWERED
            return Sampled(ids, logprobs, stop)

        return read

    def check_logprobs(self) -> None:
        """A token that is the only one allowed has log-probability 0 once everything is applied
        that shapes sampling; the raw one of the model would make every ratio wrong."""
        only = min(self.renderer.stop_ids)
        probe = self.body([only], Sampling(1), allowed_token_ids=[only])
        sampled = self.ask(GENERATE, probe, self.reader(Sampling(1)))
        if sampled.logprobs != (0.0,):
            fix = "start it with --logprobs-mode processed_logprobs"
            raise SharpenError(f"vLLM at {self.url}: its log-probabilities are raw; {fix}")

    def load_adapter(self, folder: str | Path) -> str:
        """Answer with another adapter from now on; returns the name it is served under. An adapter
        whose files did not change is an error: a learner's step would be lost unseen."""
        path = Path(folder).resolve()
        if self.under_way:
            raise SharpenError(f"adapter {path}: answers are under way")
        if not (path / "adapter_config.json").is_file():
            raise SharpenError(f"adapter {path}: has no adapter_config.json")
        digest = folder_digest(path)
        if digest == self.digest:
            raise SharpenError(f"adapter {path}: unchanged since it was loaded (SHA-256 {digest})")
        name, before = f"{self.model}-{digest[:16]}", self.serving
        if name not in self.served():  # else from before this process began
            self.ask(LOAD, {"lora_name": name, "lora_path": str(path)})
        cards = self.served()
        if name not in cards:
            raise SharpenError(f"vLLM at {self.url}: does not list adapter {name} after loading it")
        if folder_digest(path) != digest:
            raise SharpenError(f"adapter {path}: changed while it was loaded")
        self.serving, self.digest = name, digest
        if before != self.model and before in cards:
            self.ask(UNLOAD, {"lora_name": before})
        return name

    def served(self) -> dict[str, Json]:
        """The cards of what the server offers, by name."""
        return self.ask(
            MODELS, read=lambda content: {c["id"]: c for c in json.loads(content)["data"]}
        )

    def send(self, route: str, body: Json | None, read: Callable[[bytes], Any]) -> Future[Any]:
        work = remote.asked(self.client, self.gate, self.limits, self.url + route, body, read)
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def ask(
        self, route: str, body: Json | None = None, read: Callable[[bytes], Any] = bytes
    ) -> Any:
        """An answer without which nothing can go on."""
        try:
            return self.send(route, body, read).result()
        except Refused as refusal:
            reason = remote.failure_of(refusal, remote.key_from(self.api_key_env))[1]
            raise SharpenError(f"vLLM at {self.url}{route}: {reason}") from None

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.client.aclose(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)


def folder_digest(path: Path) -> str:
    return hashlib.sha256(compact_json(sha256_folder(path)).encode()).hexdigest()
