"""A policy on this machine: a transformers model that answers dialogs in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharpen.models.load import ModelConfig, load_model, load_tokenizer
from sharpen.render import Renderer
from sharpen.types import Dialog, Message, Sampling, StopReason, Turn


class LocalPolicy:
    """Ids in, ids out: prompts are rendered once, and what is sampled is parsed from its ids."""

    def __init__(self, model: Any, renderer: Renderer, batch_size: int = 32):
        self.model, self.renderer, self.batch_size = model, renderer, batch_size
        self.context = int(model.config.max_position_embeddings)

    @classmethod
    def load(cls, config: ModelConfig, template: str = "auto", batch_size: int = 32) -> LocalPolicy:
        tokenizer = load_tokenizer(config.base_model, config.trust_remote_code)
        return cls(load_model(config), Renderer(tokenizer, template), batch_size)

    def respond(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]:
        prompts = [self.renderer.prompt(dialog) for dialog in dialogs]
        turns: dict[int, Turn] = {}
        fitting = []
        for index, prompt in enumerate(prompts):
            if len(prompt) + sampling.max_tokens > self.context:
                empty = Message("assistant")
                turns[index] = Turn(empty, StopReason.CONTEXT, prompt_ids=tuple(prompt))
            else:
                fitting.append(index)
        fitting.sort(key=lambda index: len(prompts[index]))  # like lengths together: less padding
        for start in range(0, len(fitting), self.batch_size):
            chosen = fitting[start : start + self.batch_size]
            sampled = self.sample([prompts[index] for index in chosen], sampling)
            for index, ids in zip(chosen, sampled, strict=True):
                turns[index] = self.turn(prompts[index], ids)
        return [turns[index] for index in range(len(dialogs))]

    def turn(self, prompt: list[int], ids: list[int]) -> Turn:
        stopped = bool(ids) and ids[-1] in self.renderer.stop_ids
        stop = StopReason.ANSWERED if stopped else StopReason.TOKENS
        return Turn(self.renderer.parse(ids), stop, tuple(prompt), tuple(ids))

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
        """One batch: left-padded prompts, each answer cut behind its stop token."""
        import torch

        longest = max(map(len, prompts))
        pad = self.renderer.tokenizer.pad_token_id
        pad = next(iter(self.renderer.stop_ids)) if pad is None else pad
        tokens_B_T = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
        mask_B_T = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        chance = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        device = self.model.device
        with torch.inference_mode(), torch.random.fork_rng(enabled=sampling.temperature > 0):
            torch.manual_seed(sampling.seed)
            output = self.model.generate(
                input_ids=tokens_B_T.to(device),
                attention_mask=mask_B_T.to(device),
                max_new_tokens=sampling.max_tokens,
                do_sample=sampling.temperature > 0,
                eos_token_id=sorted(self.renderer.stop_ids),
                pad_token_id=pad,
                **(chance if sampling.temperature > 0 else {}),
            )
        return [self.cut(row) for row in output[:, longest:].tolist()]

    def cut(self, ids: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(ids) if token in self.renderer.stop_ids), None)
        return ids if end is None else ids[: end + 1]
