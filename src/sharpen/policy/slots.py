"""The device's side of the engine: a cache with a row of keys and values for each sequence, and the
two things that are done with it, taking in prompts and sampling one more token of many rows.

On a GPU a decoding step is captured once for each number of rows and replayed as a CUDA graph: a
small model's step is a thousand kernels that take longer to launch than to run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from sharpen.models.attention import (
    SlotStep,
    check_layers,
    no_mask,
    plain_head,
    under_way,
    use_our_attention,
)
from sharpen.models.lora import fuse_lora
from sharpen.policy.token_sampling import choose, likeliest
from sharpen.types import SharpenError

STRIDE = 8  # steps on a GPU between two looks at what was sampled, the most there are
# on a CPU, where a step of rows that are done costs more; in so many
CPU_STRIDE = 4
CPU_ROWS = 8
_PREFILL_TOKENS = {"cuda": 16_384, "cpu": 2048}  # at a time
_GPU_SHARE = 0.4  # of the free memory, for the cache
CPU_BYTES = 4 << 30
_ROUND = 256  # places come in multiples of this
SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # numbers of rows with a graph
_LARGER = 128  # behind them, every so many
_FIELDS = ("token", "position", "used", "seed")
New = tuple[int, int, Sequence[int]]  # row, first new place, ids of the whole row


class Slots:
    """A causal model with its cache. The weights are the model's own: nothing is copied."""

    def __init__(self, model: Any):
        causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.model = model
        self.head = plain_head(causal)
        self.decoder = check_layers(causal)
        fuse_lora(model)
        self.kernel = use_our_attention(model)
        self.parameters = list(model.parameters())
        self.device = self.parameters[0].device
        self.dtype = self.parameters[0].dtype
        text = causal.config.get_text_config()
        self.context = int(text.max_position_embeddings)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self.layers = text.num_hidden_layers
        self.inner = (heads, width)
        self.rows = self.places = 0
        self.cache: Any = None
        self.graphs: dict[Any, Any] = {}
        self.pool: Any = None
        self.calls: list[Any] = []  # compiled layers

    def version(self) -> int:
        """Another number after every change of the weights in place."""
        return sum(parameter._version for parameter in self.parameters)

    def fitting(self, rows: int, places: int) -> tuple[int, int]:
        """How many rows of how many places a further cache can have, of those asked for; more
        places where there is room, so that it seldom has to grow."""
        room = CPU_BYTES
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what a learner's step left is free
            room = int(torch.cuda.mem_get_info(self.device)[0] * _GPU_SHARE)
        token_bytes = self.layers * 2 * self.inner[0] * self.inner[1] * self.dtype.itemsize
        least = max(places, self.places)
        more = (2 * self.places, self.places * 5 // 4) if places > self.places else ()
        for wanted in (*more, least):
            places = -(-max(min(wanted, self.context), least) // _ROUND) * _ROUND
            if places * token_bytes * rows <= room:
                break
        return min(rows, room // (places * token_bytes)), places

    def resize(self, rows: int, places: int, kept: int) -> None:
        """Another cache with the first `kept` rows of the old one; fewer rows than asked where
        memory ends."""
        if not kept:
            # nothing of it is needed, and its room is
            self.cache = None
            self.rows = 0
        # a pool ends with the last of its graphs
        self.graphs = {}
        self.pool = None
        rows, places = self.fitting(rows, places)
        if rows < max(kept, 1):
            raise SharpenError(
                f"no room for {max(kept, 1)} sequences of {places} tokens; "
                "lower max_tokens or the batch size"
            )
        shape = (self.layers, 2, rows, places, *self.inner)
        cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if kept:
            cache[:, :, :kept, : self.places] = self.cache[:, :, :kept]
        self.cache = cache
        self.rows = rows
        self.places = places
        # what a step reads and writes, at addresses that a graph may remember
        self.whole = torch.zeros(len(_FIELDS), rows, dtype=torch.long, device=self.device)
        self.broken = torch.ones(2, rows, device=self.device)  # temperature, top_p
        self.sampled = torch.zeros(STRIDE, rows, dtype=torch.long, device=self.device)
        self.logprobs = torch.zeros(STRIDE, rows, device=self.device)
        self.number = torch.zeros(1, dtype=torch.long, device=self.device)

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        self.cache[:, :, list(targets), :length] = self.cache[:, :, source, None, :length]

    def swap(self, one: int, two: int, first: int, second: int) -> None:
        """Rows that hold `first` and `second` places change them."""
        kept = self.cache[:, :, two, :second].clone()
        self.cache[:, :, two, :first] = self.cache[:, :, one, :first]
        self.cache[:, :, one, :second] = kept

    def size(self, rows: int) -> int:
        """How many rows a step of so many live ones computes."""
        if not self.kernel:
            return min(-(-rows // CPU_ROWS) * CPU_ROWS, self.rows)
        fitting = next((size for size in SIZES if size >= rows), -(-rows // _LARGER) * _LARGER)
        return min(fitting, self.rows)

    # Prompts --------------------------------------------------------------------------------------

    def prefill(self, work: Sequence[New]) -> None:
        """Compute keys and values of new ids; long prompts in pieces."""
        budget = _PREFILL_TOKENS[self.device.type]
        pieces: list[New] = []
        room = budget
        for row, start, ids in work:
            while start < len(ids):
                end = min(len(ids), start + room)
                pieces.append((row, start, ids[:end]))
                room -= end - start
                start = end
                if not room:
                    self.prefill_piece(pieces)
                    pieces = []
                    room = budget
        if pieces:
            self.prefill_piece(pieces)

    def prefill_piece(self, pieces: Sequence[New]) -> None:
        lengths = [len(ids) - start for _, start, ids in pieces]
        tokens = np.concatenate([np.asarray(ids[start:], np.int64) for _, start, ids in pieces])
        places = np.concatenate([np.arange(start, len(ids)) for _, start, ids in pieces])
        rows = np.array([row for row, _, _ in pieces])
        ends = np.cumsum([0, *lengths])
        step = SlotStep(
            self.cache,
            self.on_device(np.repeat(rows * self.places, lengths) + places),
            self.on_device(ends.astype(np.int32)),
            self.on_device((np.append(rows, 0) * self.places).astype(np.int32)),
            self.on_device(np.array([len(ids) for _, _, ids in pieces], np.int32)),
            max(lengths),
            self.kernel,
            [(row, n, len(ids)) for (row, _, ids), n in zip(pieces, lengths, strict=True)],
        )
        self.forward(self.on_device(tokens), self.on_device(places), step)

    def on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def forward(self, tokens_N: Any, positions_N: Any, step: SlotStep) -> Any:
        under_way.step = step
        with compiled(self.decoder.layers, self.calls) if self.kernel else nullcontext():
            found = self.decoder(
                input_ids=tokens_N[None],
                position_ids=positions_N[None],
                attention_mask=no_mask(self.device),
                use_cache=False,
                slots=True,
            )
        return found.last_hidden_state[0]

    # Sampling -------------------------------------------------------------------------------------

    def decode(self, state: np.ndarray, chances: np.ndarray, allowed: Any = None) -> Any:
        """Tokens and log-probabilities of the next steps, steps first. `state` has a column of
        _FIELDS for each row, `chances` temperature and top_p; `allowed` are the only tokens."""
        size = state.shape[1]
        self.whole[:, :size] = self.on_device(state)
        self.broken[:, :size] = self.on_device(chances)
        self.number.zero_()
        greedy = not chances[0].any()
        cut = bool((chances[1] < 1).any())
        graph = self.graph(size, greedy, cut) if self.kernel and allowed is None else None
        steps = 1 if allowed is not None else STRIDE if graph else CPU_STRIDE
        for number in range(steps):
            if graph:
                graph.replay()
            else:
                self.step(size, greedy, cut, int(state[2].max()) + number, allowed)
        return self.sampled[:steps, :size].cpu().numpy(), self.logprobs[:steps, :size].cpu().numpy()

    def step(self, size: int, greedy: bool, cut: bool, read: int, allowed: Any = None) -> None:
        """One token more for the first `size` rows: everything happens in place."""
        token, position, used, seed = self.whole[:, :size].unbind()
        temperature, top_p = self.broken[:, :size].unbind()
        first = torch.arange(size + 1, device=self.device) * self.places
        slots = SlotStep(
            self.cache,
            first[:-1] + position,
            torch.arange(size + 1, dtype=torch.int32, device=self.device),
            first.int(),
            used.int(),
            1,
            self.kernel,
            (size, read, {}),
        )
        hidden_B_D = self.forward(token, position, slots)
        logits_B_V = self.head(hidden_B_D)
        if allowed is not None:
            logits_B_V = logits_B_V.masked_fill(~allowed, float("-inf"))
        if greedy:
            tokens_B, logprobs_B = likeliest(logits_B_V)
        else:
            limit = top_p if cut else None
            tokens_B, logprobs_B = choose(logits_B_V, temperature, limit, seed, position)
        self.sampled[:, :size].index_copy_(0, self.number, tokens_B[None])
        self.logprobs[:, :size].index_copy_(0, self.number, logprobs_B[None])
        token.copy_(tokens_B)
        self.whole[1:3, :size] += 1
        self.number += 1

    def graph(self, size: int, greedy: bool, cut: bool) -> Any:
        """The captured step. What the rehearsals write lies where the next steps write again."""
        key = size, greedy, cut
        if key not in self.graphs:
            whole = self.whole.clone()
            stream = torch.cuda.Stream()
            # one runs at a time, and nothing of it is read behind it: they share their memory
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.step(size, greedy, cut, 0)
            torch.cuda.current_stream().wait_stream(stream)
            self.graphs[key] = torch.cuda.CUDAGraph()
            # other threads (a learner that samples ahead) go on with their own work meanwhile
            how = {"pool": self.pool, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(self.graphs[key], **how):
                self.step(size, greedy, cut, 0)
            self.whole.copy_(whole)
            self.number.zero_()
        return self.graphs[key]


@contextmanager
def compiled(layers: Any, calls: list[Any]) -> Iterator[None]:
    """Layers run compiled, here only: of a small model's kernels most are element-wise, and a third
    of them is left. Training decides for itself. `calls` keeps what was compiled."""
    calls += [torch.compile(layer._call_impl, dynamic=True) for layer in layers[len(calls) :]]
    before = [layer._compiled_call_impl for layer in layers]
    for layer, call in zip(layers, calls, strict=True):
        layer._compiled_call_impl = call
    try:
        # one program for all layers: their number is no constant of it
        with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
            yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer._compiled_call_impl = own
