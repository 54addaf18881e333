"""On a GPU: the engine's graphs sample what the learner scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sharpen.models.load import LoRAConfig, ModelConfig, attach_lora, load_model
from sharpen.policy.engine import Engine
from sharpen.train.config.learner import LearnerConfig
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


@pytest.mark.parametrize(("heads", "shared", "width"), [(3, 3, 64), (1, 4, 32), (8, 1, 128)])
@pytest.mark.parametrize("window", [None, 40])
def test_kernel_of_a_step_is_plain_attention(heads, shared, width, window):
    from sharpen.models.attention import SlotStep, attend_decode
    from sharpen.models.slot_kernel import attend

    torch.manual_seed(0)
    rows, places, used = 5, 300, torch.tensor([1, 64, 65, 130, 299], dtype=torch.int32)
    used = used.cuda()
    at_N = torch.arange(rows, device="cuda") * places + used - 1

    def some(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    q, cache = (
        some(1, heads * shared, rows, width)[0].transpose(0, 1),
        some(2, rows, places, heads, width),
    )
    k, v = some(rows, heads, width), some(rows, heads, width)
    wanted = cache.clone()
    wanted[0].flatten(0, 1)[at_N], wanted[1].flatten(0, 1)[at_N] = k, v
    found = attend(q, k, v, cache, at_N, used, None, window)
    assert torch.equal(cache, wanted)
    step = SlotStep(cache, at_N, at_N, at_N, used, 1, False, (rows, places, {}))
    plain = attend_decode(q.float().contiguous(), *wanted.float(), step, None, window or places)
    assert (found.float() - plain).abs().max() < 0.02


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


def test_a_cache_that_grows_samples_on(pico_folder, pico_tokenizer):
    """Graphs of the smaller cache, and the pool that was theirs, are gone."""
    sampling = Sampling(max_tokens=20, temperature=1.0, seed=3)
    engine = Engine(lora_model(pico_folder), pico_tokenizer, frozenset())
    for start in (9, 400, 900):
        asked = prompts(3, start=start)
        found = run(engine, asked, sampling)
        fresh = Engine(engine.slots.model, pico_tokenizer, frozenset())
        assert [s.ids for s in run(fresh, asked, sampling)] == [s.ids for s in found]
    assert engine.slots.places > 900
