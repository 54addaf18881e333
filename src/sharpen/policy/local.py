"""A policy on this machine: a transformers model, sampled by the engine."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from sharpen.models.load import ModelConfig, load_model, load_tokenizer
from sharpen.render import Renderer
from sharpen.types import Dialog, Sampled, Sampling, ToolSpec, Turn


class LocalPolicy:
    """Ids in, ids out: prompts are rendered once, and what is sampled is parsed from its ids. The
    weights are read where they lie, so that a learner's step is seen by the next answer."""

    def __init__(self, model: Any, renderer: Renderer, batch_size: int = 0):
        from sharpen.policy.engine import Engine

        self.model, self.renderer = model, renderer
        self.engine = Engine(model, renderer.tokenizer, renderer.stop_ids, batch_size)
        self.context = self.engine.slots.context
        self.grammars: dict[tuple[str, ...], Any] = {}

    @classmethod
    def load(cls, config: ModelConfig, template: str = "auto", batch_size: int = 0) -> LocalPolicy:
        tokenizer = load_tokenizer(config.base_model, config.trust_remote_code)
        return cls(load_model(config), Renderer(tokenizer, template), batch_size)

    def submit(
        self,
        key: Hashable,
        prompt: Sequence[int],
        sampling: Sampling,
        tools: Sequence[ToolSpec] = (),
    ) -> None:
        matcher = self.grammar(tuple(tools)).start() if sampling.constrained and tools else None
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

    def grammar(self, tools: tuple[ToolSpec, ...]) -> Any:
        from sharpen.policy.constrained import CallGrammar

        names = tuple(sorted(tool.name for tool in tools))
        if self.grammars.get(names, (None,))[0] != tools:
            width = self.engine.slots.head.weight.shape[0]
            found = CallGrammar(self.renderer.tokenizer, tools, self.renderer.stop_ids, width)
            self.grammars[names] = tools, found
        return self.grammars[names][1]

    def respond(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]:
        return respond(self, dialogs, sampling)


def respond(policy: Any, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]:
    """The next turn of each dialog from a token policy; each has a seed of its own."""
    prompts = [policy.renderer.prompt(dialog) for dialog in dialogs]
    for number, (dialog, prompt) in enumerate(zip(dialogs, prompts, strict=True)):
        own = replace(sampling, seed=sampling.seed * 1_000_003 + number)
        policy.submit(number, prompt, own, dialog.tools)
    found: dict[int, Turn] = {}
    while len(found) < len(dialogs):
        for number, sampled in policy.advance():
            found[number] = turn_of(policy.renderer, prompts[number], sampled)
    return [found[number] for number in range(len(dialogs))]


def turn_of(renderer: Renderer, prompt: Sequence[int], sampled: Sampled) -> Turn:
    return Turn(
        renderer.parse(sampled.ids),
        sampled.stop,
        tuple(prompt),
        sampled.ids,
        sampled.logprobs,
        error=sampled.error,
    )
