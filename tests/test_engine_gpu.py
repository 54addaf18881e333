"""On a GPU: the engine's graphs sample what the learner scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sharpen.models.load import LoRAConfig, ModelConfig, attach_lora, load_model
from sharpen.policy.engine import Engine
from sharpen.train.config import LearnerConfig
from sharpen.train.learner import Learner
from sharpen.types import Datum, Sampling
from test_engine import prompts, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def lora_model(pico_folder):
    model = load_model(ModelConfig(base_model=str(pico_folder), device="cuda", dtype="bfloat16"))
    return attach_lora(model, LoRAConfig(lora_r=4, lora_dropout=0.0))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=50),
        Sampling(max_tokens=50, temperature=1.0),
        Sampling(max_tokens=50, temperature=1.0, top_p=0.9),
    ],
)
def test_logprobs_are_the_learners(pico_folder, pico_tokenizer, sampling):
    model = lora_model(pico_folder)
    engine = Engine(model, pico_tokenizer, frozenset({pico_tokenizer.eos_token_id}))
    learner = Learner(model, LearnerConfig(learning_rate=1e-2, warmup_ratio=0), 3)
    asked = [*prompts(20, start=9), *prompts(5, start=9)]
    for _ in range(2):
        found = run(engine, asked, sampling)
        longer = [[*p, *s.ids, 7, 8, 9] for p, s in zip(asked, found, strict=True)]
        again = run(engine, longer, sampling)
        assert engine.computed  # of the second turn only what is new
        rows, wanted = [], []
        for prompt, sampled in zip([*asked, *longer], [*found, *again], strict=True):
            mask = np.arange(len(prompt) + len(sampled.ids)) >= len(prompt)
            rows.append(Datum(np.array([*prompt, *sampled.ids], np.int32), mask))
            wanted.append(sampled.logprobs)
        scored = learner.logprobs(rows)
        for ours, theirs in zip(wanted, scored, strict=True):
            assert np.abs(np.array(ours) - theirs).max() < 0.15
        # the next round is sampled from weights that moved, in place
        learner.step(rows, lambda logprobs, *_: -logprobs.mean())


def test_alone_as_together(pico_folder, pico_tokenizer):
    engine = Engine(lora_model(pico_folder), pico_tokenizer, frozenset())
    sampling = Sampling(max_tokens=20, temperature=1.0, seed=3)
    asked = prompts(10, start=9)
    together = run(engine, asked, sampling)
    alone = []
    for number, prompt in enumerate(asked):
        engine.submit("x", prompt, replace(sampling, seed=3 + number))
        alone += [sampled for _, sampled in engine.advance()]
    same = sum(a.ids == t.ids for a, t in zip(alone, together, strict=True))
    assert same >= 8  # rounding differs with the batch, and may tip a draw
