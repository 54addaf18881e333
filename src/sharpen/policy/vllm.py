"""A policy over a vLLM 0.32 server: token ids in and out, with log-probabilities.

A user's program passes `VLLMPolicy` to `rollout` in place of a `LocalPolicy`. It speaks vLLM's own
routes, not the OpenAI ones, and can exchange adapters while the server runs. Start the server with

    vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs

and for adapters also with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.
Log-probabilities are those at the sampling temperature; with `top_p` below 1 they are renormalised
over the nucleus.
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
from typing import Any, TypeVar

import httpx2

from sharpen.calls import compact_json
from sharpen.policy import remote
from sharpen.policy.local import respond
from sharpen.policy.remote import RemoteLimits, RequestFailed
from sharpen.records import sha256_folder
from sharpen.render import Renderer
from sharpen.types import Dialog, Json, Sampled, Sampling, SharpenError, StopReason, ToolSpec, Turn

_GENERATE_ROUTE = "/inference/v1/generate"
_MODELS_ROUTE = "/v1/models"
_LOAD_ADAPTER_ROUTE = "/v1/load_lora_adapter"
_UNLOAD_ADAPTER_ROUTE = "/v1/unload_lora_adapter"
_NO_LOGPROB = -9999.0  # what the server sends for a token without a log-probability
# The server queues and batches by itself, so it gets all requests at once.
_DEFAULT_LIMITS = RemoteLimits(concurrency=1024, timeout_s=600.0)

_Answer = TypeVar("_Answer")


class VLLMPolicy:
    """A `TokenPolicy` over a vLLM server.

    `url` is the root of the server (`http://host:8000`), `model` the name it serves, and `renderer`
    the renderer of the same model. `adapter` is a PEFT folder that the server can read.
    """

    def __init__(
        self,
        url: str,
        model: str,
        renderer: Renderer,
        adapter: str | Path = "",
        api_key_env: str = "",
        limits: RemoteLimits = _DEFAULT_LIMITS,
    ):
        self.url = remote.check_base_url(url)
        self.model = model
        self.renderer = renderer
        self.api_key_env = api_key_env
        self.limits = limits
        self.rows = limits.concurrency
        self.serving = model  # the name that requests go to: the model, or its adapter
        self.digest = ""  # SHA-256 of the adapter that is served
        self._under_way: dict[Future[Sampled], Any] = {}
        self._refused: list[tuple[Any, Sampled]] = []
        self._gate = asyncio.Semaphore(self.limits.concurrency)
        headers = remote.bearer_header(remote.read_api_key(api_key_env))
        connections = httpx2.Limits(max_connections=self.limits.concurrency)
        self._client = httpx2.AsyncClient(headers=headers, timeout=None, limits=connections)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="vllm").start()
        cards = self._fetch_model_cards()
        if model not in cards:
            names = ", ".join(cards)
            raise SharpenError(f"vLLM at {self.url}: serves {names}, not {model!r}")
        self.context = int(cards[model].get("max_model_len") or 0)
        self._check_logprobs()
        if adapter:
            self.load_adapter(adapter)

    def respond(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]:
        return respond(self, dialogs, sampling)

    def submit(
        self, key: Any, prompt: Sequence[int], sampling: Sampling, tools: Sequence[ToolSpec] = ()
    ) -> None:
        if sampling.constrained and tools:
            raise SharpenError("constrained decoding: the vLLM policy has none; use a local model")
        if self.context and len(prompt) + sampling.max_tokens > self.context:
            reason = f"{len(prompt)} + {sampling.max_tokens} tokens: over {self.context}"
            self._refused.append((key, Sampled((), (), StopReason.CONTEXT, reason)))
            return
        body = self._request_body(prompt, sampling)
        answer = self._send(_GENERATE_ROUTE, body, self._sample_reader(sampling))
        self._under_way[answer] = key

    def advance(self) -> list[tuple[Any, Sampled]]:
        """Wait until a prompt is answered. Returns nothing when nothing is under way."""
        answered = self._refused
        self._refused = []
        if answered or not self._under_way:
            return answered
        for answer in wait(self._under_way, return_when=FIRST_COMPLETED).done:
            try:
                sampled = answer.result()
            except RequestFailed as failure:
                stop, reason = self._describe_failure(failure)
                sampled = Sampled((), (), stop, reason)
            answered.append((self._under_way.pop(answer), sampled))
        return answered

    @property
    def idle(self) -> bool:
        return not self._under_way and not self._refused

    def forget(self) -> None:
        """Do nothing: the cache and the batches are the server's own."""

    def _request_body(self, prompt: Sequence[int], sampling: Sampling, **extra_params: Any) -> Json:
        """Returns the JSON body of a generate request.

        Only the renderer's stop tokens end a turn, whatever the model's generation config says.
        """
        params: Json = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed % (1 << 62),
            "logprobs": 0,
            "stop_token_ids": sorted(self.renderer.stop_ids),
            "ignore_eos": True,
        }
        if sampling.stop:
            params["stop"] = list(sampling.stop)
            params["skip_special_tokens"] = False
        params |= extra_params
        return {"model": self.serving, "token_ids": list(prompt), "sampling_params": params}

    def _sample_reader(self, sampling: Sampling) -> Callable[[bytes], Sampled]:
        """Returns a function that reads the answer to a generate request.

        It refuses every answer that would train wrongly. The model that must have answered is the
        one that is served now, when the request is sent.
        """
        serving = self.serving
        stop_ids = self.renderer.stop_ids

        def read(content: bytes) -> Sampled:
            answer = json.loads(content)
            choice = answer["choices"][0]
            ids = tuple(choice["token_ids"])
            logprob_entries = choice["logprobs"]["content"]
            logprobs = tuple(float(entry["logprob"]) for entry in logprob_entries)
            finish = choice["finish_reason"]
            if answer["model"] != serving:
                raise RequestFailed(f"{answer['model']!r} answered, not {serving!r}", math.inf)
            entry_ids = tuple(entry["token_id"] for entry in logprob_entries)
            if ids != entry_ids or _NO_LOGPROB in logprobs:
                raise RequestFailed("not every token has its log-probability", math.inf)
            if finish not in ("stop", "length"):
                raise RequestFailed(f"finish_reason {finish!r}", math.inf)
            # with stop strings the server may end a turn at any token
            if finish == "stop" and not sampling.stop and ids[-1] not in stop_ids:
                reason = f"token {ids[-1]} ended the turn, which is no stop token here"
                raise RequestFailed(reason, math.inf)
            stop = StopReason.TOKENS if finish == "length" else StopReason.ANSWERED
            return Sampled(ids, logprobs, stop)

        return read

    def _check_logprobs(self) -> None:
        """Raise unless the server reports processed log-probabilities.

        Where only one token is allowed, its log-probability is 0 after all sampling settings are
        applied. A server that reports the raw one of the model would make every ratio wrong.
        """
        token = min(self.renderer.stop_ids)
        body = self._request_body([token], Sampling(1), allowed_token_ids=[token])
        sampled = self._ask(_GENERATE_ROUTE, body, self._sample_reader(Sampling(1)))
        if sampled.logprobs != (0.0,):
            fix = "start it with --logprobs-mode processed_logprobs"
            raise SharpenError(f"vLLM at {self.url}: its log-probabilities are raw; {fix}")

    def load_adapter(self, folder: str | Path) -> str:
        """Serve another adapter from now on. Returns the name that it is served under.

        An adapter whose files did not change is an error: an optimizer step would be lost silently.
        """
        path = Path(folder).resolve()
        if self._under_way:
            raise SharpenError(f"adapter {path}: answers are under way")
        if not (path / "adapter_config.json").is_file():
            raise SharpenError(f"adapter {path}: has no adapter_config.json")
        digest = _folder_digest(path)
        if digest == self.digest:
            raise SharpenError(f"adapter {path}: unchanged since it was loaded (SHA-256 {digest})")
        name = f"{self.model}-{digest[:16]}"
        previous = self.serving
        # an earlier process may have loaded the same adapter
        if name not in self._fetch_model_cards():
            self._ask(_LOAD_ADAPTER_ROUTE, {"lora_name": name, "lora_path": str(path)}, bytes)
        cards = self._fetch_model_cards()
        if name not in cards:
            raise SharpenError(f"vLLM at {self.url}: does not list adapter {name} after loading it")
        if _folder_digest(path) != digest:
            raise SharpenError(f"adapter {path}: changed while it was loaded")
        self.serving = name
        self.digest = digest
        if previous != self.model and previous in cards:
            self._ask(_UNLOAD_ADAPTER_ROUTE, {"lora_name": previous}, bytes)
        return name

    def _fetch_model_cards(self) -> dict[str, Json]:
        """Returns the models and adapters that the server lists, by name."""
        return self._ask(_MODELS_ROUTE, None, _read_model_cards)

    def _send(
        self, route: str, body: Json | None, read: Callable[[bytes], _Answer]
    ) -> Future[_Answer]:
        """Start a request on the event loop's thread."""
        request = remote.request_with_retries(
            self._client, self._gate, self.limits, self.url + route, body, read
        )
        return asyncio.run_coroutine_threadsafe(request, self._loop)

    def _ask(self, route: str, body: Json | None, read: Callable[[bytes], _Answer]) -> _Answer:
        """Send a request and wait for its answer; a failure is an error for the user."""
        try:
            return self._send(route, body, read).result()
        except RequestFailed as failure:
            _, reason = self._describe_failure(failure)
            raise SharpenError(f"vLLM at {self.url}{route}: {reason}") from None

    def _describe_failure(self, failure: RequestFailed) -> tuple[StopReason, str]:
        """Returns the stop reason and the text of a failure, without the API key."""
        return remote.describe_failure(failure, remote.read_api_key(self.api_key_env))

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)


def _read_model_cards(content: bytes) -> dict[str, Json]:
    """Read the answer of the models route."""
    cards = {}
    for card in json.loads(content)["data"]:
        cards[card["id"]] = card
    return cards


def _folder_digest(path: Path) -> str:
    """Returns one SHA-256 over all files of a folder."""
    return hashlib.sha256(compact_json(sha256_folder(path)).encode()).hexdigest()
