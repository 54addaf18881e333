"""The engine samples what the model says, whoever is under way and whatever the cache holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sharpen.models.load import ModelConfig, load_model
from sharpen.policy.engine import Engine
from sharpen.policy.local import LocalPolicy
from sharpen.policy.token_sampling import keep_nucleus, sample_tokens, uniform
from sharpen.types import Sampling, SharpenError, StopReason

GREEDY = Sampling(max_tokens=12)
WARM = Sampling(max_tokens=12, temperature=0.8, top_p=0.95, seed=5)


@pytest.fixture(scope="module")
def model(pico_folder):
    return load_model(ModelConfig(base_model=str(pico_folder)))


@pytest.fixture
def engine(model, pico_tokenizer):
    return Engine(model, pico_tokenizer, frozenset({pico_tokenizer.eos_token_id}), rows=4)


def prompts(count, start=3, seed=0):
    chance = np.random.default_rng(seed)
    return [chance.integers(5, 200, start + 7 * i).tolist() for i in range(count)]


def run(engine, asked, sampling):
    """Each prompt with a seed of its own → what was sampled, in order."""
    for number, prompt in enumerate(asked):
        engine.submit(number, prompt, replace(sampling, seed=sampling.seed + number))
    found = {}
    while not engine.idle:
        found.update(engine.advance())
    return [found[number] for number in range(len(asked))]


def logprobs_of(model, prompt, ids, temperature=1.0):
    with torch.no_grad():
        logits_T_V = model(torch.tensor([[*prompt, *ids]])).logits[0].float() / temperature
    scores = torch.log_softmax(logits_T_V, -1)[len(prompt) - 1 : -1]
    return scores.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


def test_greedy_is_what_transformers_generates(model, engine):
    asked = prompts(9)  # more than the engine has rows
    for prompt, sampled in zip(asked, run(engine, asked, GREEDY), strict=True):
        wanted = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=sorted(engine.stop_ids),
            pad_token_id=0,
        )
        assert list(sampled.ids) == wanted[0, len(prompt) :].tolist()


def test_neighbours_change_nothing_and_logprobs_are_the_models(model, engine):
    asked = prompts(6)
    together = run(engine, asked, WARM)
    for number, prompt in enumerate(asked):
        engine.submit("alone", prompt, replace(WARM, seed=WARM.seed + number))
        [(_, alone)] = engine.advance()
        assert alone.ids == together[number].ids
        wanted = logprobs_of(model, prompt, alone.ids, WARM.temperature)
        assert alone.logprobs == pytest.approx(wanted, abs=1e-5)
    other = run(engine, asked, replace(WARM, seed=99))
    assert [s.ids for s in other] != [s.ids for s in together]


def test_the_next_turn_computes_only_what_is_new(model, engine):
    [prompt] = prompts(1, start=40)
    first = run(engine, [prompt], WARM)[0]
    assert engine.computed == len(prompt) - 1
    longer = [*prompt, *first.ids, 7, 8, 9]
    second = run(engine, [longer], WARM)[0]
    # the last sampled token was never an input, the last one of all is the first step's
    assert engine.computed == len(prompt) - 1 + 3
    fresh = Engine(model, engine.tokenizer, engine.stop_ids)
    assert run(fresh, [longer], WARM)[0].ids == second.ids


def test_a_group_computes_its_prompt_once(model, engine):
    [prompt] = prompts(1, start=30)
    group = run(engine, [prompt] * 9, WARM)
    assert engine.computed == len(prompt) - 1  # nine samples in four rows
    assert len({sample.ids for sample in group}) > 1
    for number in range(9):
        engine.submit("x", prompt, replace(WARM, seed=WARM.seed + number))
        [(_, alone)] = engine.advance()
        assert alone.ids == group[number].ids


def test_what_does_not_fit_beside_others_waits_for_them(model, engine, monkeypatch):
    short, [long] = prompts(3), prompts(1, start=300)
    slots = engine.slots
    place = slots.layers * 2 * slots.inner[0] * slots.inner[1] * slots.dtype.itemsize
    monkeypatch.setattr("sharpen.policy.slots.CPU_BYTES", 3 * 256 * place)  # one row of the long
    found, asked = {}, replace(WARM, max_tokens=40)
    for key, prompt in enumerate(short):
        engine.submit(key, prompt, asked)
    engine.submit("last", short[0], WARM)  # answered first, while the others go on
    while "last" not in found:
        found.update(engine.advance())
    engine.submit("long", long, asked)
    while not engine.idle:
        found.update(engine.advance())
        assert "long" not in found or len(found) == 5
    fresh = Engine(model, engine.tokenizer, engine.stop_ids)
    for key, prompt in [*enumerate(short), ("long", long)]:
        assert found[key].ids == run(fresh, [prompt], asked)[0].ids
    assert slots.places == 512 and slots.rows == engine.most_rows == 1
    with pytest.raises(SharpenError, match="no room for 1 sequences of 1024 tokens"):
        run(engine, prompts(1, start=800), asked)


def test_rows_that_are_taken_over_are_not_copied_from(model, engine):
    """Old keys and new ones ask for what other rows hold, in every order."""
    known = prompts(7, start=20)  # in four rows
    fresh = [run(Engine(model, engine.tokenizer, engine.stop_ids), [p], GREEDY)[0] for p in known]
    wanted = {tuple(p): sampled for p, sampled in zip(known, fresh, strict=True)}
    chance = np.random.default_rng(1)
    for _ in range(100):
        asked = [known[i] for i in chance.integers(0, 7, chance.integers(1, 9))]
        keys = chance.permutation(9)[: len(asked)].tolist()
        for key, prompt in zip(keys, asked, strict=True):
            engine.submit(key, prompt, GREEDY)
        while not engine.idle:
            for key, sampled in engine.advance():
                right = wanted[tuple(asked[keys.index(key)])]
                assert sampled.ids == right.ids  # an untrained model's hardly depend on it
                assert sampled.logprobs == pytest.approx(right.logprobs, abs=1e-5)


def test_a_learners_step_is_seen_at_once(pico_folder, engine):
    own = load_model(ModelConfig(base_model=str(pico_folder)))
    engine = Engine(own, engine.tokenizer, engine.stop_ids)
    asked = prompts(3, start=20)
    before = run(engine, asked, GREEDY)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    after = run(engine, asked, GREEDY)
    assert [s.ids for s in after] != [s.ids for s in before]
    fresh = run(Engine(own, engine.tokenizer, engine.stop_ids), asked, GREEDY)
    assert [s.ids for s in after] == [s.ids for s in fresh]
    engine.submit("a", asked[0], replace(GREEDY, max_tokens=200))
    engine.submit("b", asked[1], replace(GREEDY, max_tokens=2))
    assert engine.advance()[0][0] == "b"
    with torch.no_grad():
        own.get_output_embeddings().weight.mul_(2)
    engine.submit("c", asked[2], GREEDY)
    with pytest.raises(SharpenError, match="weights changed while answers were under way"):
        engine.advance()


def test_every_optimiser_tells_that_it_stepped(pico_folder, engine):
    from sharpen.train.config.learner import LearnerConfig
    from sharpen.train.learner import Learner
    from sharpen.types import Datum

    own = load_model(ModelConfig(base_model=str(pico_folder)))
    learner = Learner(own, LearnerConfig(learning_rate=0.5, warmup_ratio=0), 3)
    for group in learner.optimizer.param_groups:
        group["fused"], group["foreach"] = True, False  # which leaves version counters alone
    engine = Engine(own, engine.tokenizer, engine.stop_ids)
    [prompt] = prompts(1, start=20)
    before = run(engine, [prompt], GREEDY)[0]
    row = Datum(np.arange(5, 20, dtype=np.int32), np.ones(15, bool))
    learner.step([row], lambda logprobs, *_: -logprobs.mean())
    run(engine, [[*prompt, *before.ids, 7]], GREEDY)
    assert engine.computed == len(prompt) - 1 + len(prompt) + len(before.ids)  # nothing was reused


def test_adapters_are_read_where_they_lie(pico_folder, engine):
    from peft import LoraConfig, get_peft_model

    asked = prompts(3, start=20)
    tuned = get_peft_model(
        load_model(ModelConfig(base_model=str(pico_folder))),
        LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    with_adapter = Engine(tuned, engine.tokenizer, engine.stop_ids)
    found = run(with_adapter, asked, WARM)
    assert [s.ids for s in found] != [s.ids for s in run(engine, asked, WARM)]
    tuned.eval()
    for prompt, sampled in zip(asked, found, strict=True):
        wanted = logprobs_of(tuned, prompt, sampled.ids, WARM.temperature)
        assert sampled.logprobs == pytest.approx(wanted, abs=1e-4)


def test_limits_and_stop_strings(engine):
    [prompt] = prompts(1, start=20)
    long = engine.slots.context - 5
    engine.submit("long", prompt, Sampling(max_tokens=long))
    [(_, refused)] = engine.advance()
    assert refused.stop is StopReason.CONTEXT and f"20 tokens and {long}" in refused.error
    cut = run(engine, [prompt], GREEDY)[0]
    assert cut.stop is StopReason.TOKENS and len(cut.ids) == 12
    word = engine.tokenizer.decode(cut.ids[3:5])
    ended = run(engine, [prompt], replace(GREEDY, stop=(word,)))[0]
    assert ended.stop is StopReason.ANSWERED and len(ended.ids) <= 5
    engine.stop_ids = frozenset({cut.ids[2]})
    ended = run(engine, [prompt], GREEDY)[0]
    assert ended.stop is StopReason.ANSWERED and ended.ids == cut.ids[: len(ended.ids)]
    with pytest.raises(SharpenError, match="empty prompt"):
        engine.submit("none", [], GREEDY)


def test_draws_follow_the_shares():
    logits_V = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    count = 20_000
    ones = torch.ones(count)
    seeds, places = torch.arange(count), torch.full((count,), 3)
    drawn, logprobs = sample_tokens(logits_V.expand(count, -1), ones, None, seeds, places)
    wanted = torch.softmax(logits_V, -1)
    found = torch.bincount(drawn, minlength=5) / count
    assert torch.allclose(found, wanted, atol=0.015) and found[4] == 0
    assert torch.allclose(logprobs, wanted.log()[drawn])
    cut, _ = sample_tokens(logits_V.expand(count, -1), ones, ones * 0.8, seeds, places)
    assert set(cut.tolist()) == {0, 1}
    kept = keep_nucleus(wanted[None], torch.tensor([0.5]))
    assert kept[0].nonzero().tolist() == [[0]]
    assert len(set(uniform(seeds, places).tolist())) > 19_900  # of 2^23 numbers
    greedy, scores = sample_tokens(logits_V[None], torch.zeros(1), None, seeds[:1], places[:1])
    assert greedy.item() == 0 and scores.item() == pytest.approx(wanted[0].log().item())


def test_the_policy_parses_what_it_sampled(pico_folder, pico_tokenizer):
    from sharpen.types import Dialog, Message

    policy = LocalPolicy.load(ModelConfig(base_model=str(pico_folder)))
    dialogs = [Dialog((Message("user", f"Say {n}."),)) for n in range(3)]
    turns = policy.respond(dialogs, WARM)
    assert [t.prompt_ids for t in turns] == [tuple(policy.renderer.prompt(d)) for d in dialogs]
    assert turns == policy.respond(dialogs, WARM)
    assert all(len(t.ids) == len(t.logprobs) > 0 for t in turns)


def small(kind, **more):
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape | more)).eval()


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_sliding_windows_are_kept_to(kind, engine):
    window = {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}
    model = small(kind, **window if kind == "qwen2" else {"sliding_window": 7})
    windowed = Engine(model, None, frozenset(), rows=4)
    asked = prompts(4, start=20)
    for prompt, sampled in zip(asked, run(windowed, asked, WARM), strict=True):
        with torch.no_grad():
            model.set_attn_implementation("eager")
            wanted = logprobs_of(model, prompt, sampled.ids, WARM.temperature)
        assert sampled.logprobs == pytest.approx(wanted, abs=1e-4)


def test_what_cannot_be_sampled_exactly_is_refused():
    with pytest.raises(SharpenError, match="cohere: logit_scale changes its logits"):
        Engine(small("cohere", logit_scale=0.1), None, frozenset())
    with pytest.raises(SharpenError, match="qwen3_next: layers \\(linear_attention\\)"):
        kinds = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
        Engine(small("qwen3_next", **kinds), None, frozenset())
    with pytest.raises(SharpenError, match="gpt2: layers \\(of another build\\)"):
        Engine(small("gpt2"), None, frozenset())
