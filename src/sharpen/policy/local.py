"""A policy on this machine: a transformers model, sampled by the engine.

Trainers, evaluation and the pipeline use `LocalPolicy`; `respond` also serves the vLLM policy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sharpen.models.load import ModelConfig, load_model, load_tokenizer
from sharpen.render import Renderer
from sharpen.types import Dialog, Sampled, Sampling, ToolSpec, Turn

if TYPE_CHECKING:
    from sharpen.policy.constrained import CallGrammar, CallMatcher
    from sharpen.policy.vllm import VLLMPolicy

_SEED_STRIDE = 1_000_003  # keeps the seeds of neighbouring calls of `respond` apart


class LocalPolicy:
    """A `TokenPolicy` over a model in memory.

    Prompts are rendered once, and answers are parsed from the sampled ids. The weights are read in
    place, so an optimizer step takes effect in the next answer.
    """

    def __init__(self, model: Any, renderer: Renderer, batch_size: int = 0):
        from sharpen.policy.engine import Engine

        self.model = model
        self.renderer = renderer
        self.engine = Engine(model, renderer.tokenizer, renderer.stop_ids, batch_size)
        self.context = self.engine.slots.context
        # by tool names: the specs that the grammar was compiled from, and the grammar
        self._grammars: dict[tuple[str, ...], tuple[tuple[ToolSpec, ...], CallGrammar]] = {}

    @classmethod
    def load(cls, config: ModelConfig, template: str = "auto", batch_size: int = 0) -> LocalPolicy:
        """Load the tokenizer and the model that `config` names."""
        tokenizer = load_tokenizer(config.base_model, config.trust_remote_code)
        return cls(load_model(config), Renderer(tokenizer, template), batch_size)

    def submit(
        self,
        key: Hashable,
        prompt: Sequence[int],
        sampling: Sampling,
        tools: Sequence[ToolSpec] = (),
    ) -> None:
        matcher: CallMatcher | None = None
        if sampling.constrained and tools:
            matcher = self.grammar(tuple(tools)).start()
        self.engine.submit(key, prompt, sampling, matcher)

    @property
    def rows(self) -> int:
        return self.engine.most_rows

    @property
    def idle(self) -> bool:
        return self.engine.idle

    def forget(self) -> None:
        self.engine.forget()

    def advance(self) -> list[tuple[Any, Sampled]]:
        return self.engine.advance()

    def grammar(self, tools: tuple[ToolSpec, ...]) -> CallGrammar:
        """Returns the grammar of calls to these tools; the last one per set of names is cached."""
        from sharpen.policy.constrained import CallGrammar

        names = tuple(sorted(tool.name for tool in tools))
        if names in self._grammars:
            cached_tools, grammar = self._grammars[names]
            if cached_tools == tools:
                return grammar
        logits_width = self.engine.slots.head.weight.shape[0]
        grammar = CallGrammar(self.renderer.tokenizer, tools, self.renderer.stop_ids, logits_width)
        self._grammars[names] = (tools, grammar)
        return grammar

    def respond(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]:
        return respond(self, dialogs, sampling)


def respond(
    policy: LocalPolicy | VLLMPolicy, dialogs: Sequence[Dialog], sampling: Sampling
) -> list[Turn]:
    """Sample the next turn of each dialog from a token policy, each with its own seed."""
    prompts = [policy.renderer.prompt(dialog) for dialog in dialogs]
    for number, (dialog, prompt) in enumerate(zip(dialogs, prompts, strict=True)):
        dialog_sampling = replace(sampling, seed=sampling.seed * _SEED_STRIDE + number)
        policy.submit(number, prompt, dialog_sampling, dialog.tools)
    turns: dict[int, Turn] = {}
    while len(turns) < len(dialogs):
        for number, sampled in policy.advance():
            turns[number] = _make_turn(policy.renderer, prompts[number], sampled)
    return [turns[number] for number in range(len(dialogs))]


def _make_turn(renderer: Renderer, prompt: Sequence[int], sampled: Sampled) -> Turn:
    """Parse the sampled ids into a message, and keep the ids next to it."""
    return Turn(
        message=renderer.parse(sampled.ids),
        stop=sampled.stop,
        prompt_ids=tuple(prompt),
        ids=sampled.ids,
        logprobs=sampled.logprobs,
        error=sampled.error,
    )
