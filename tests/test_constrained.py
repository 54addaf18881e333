"""Constrained decoding: whatever is sampled is free text, or calls that parse and fit the schema of
a tool on offer."""

from __future__ import annotations

import random
import sys

import pytest

from sharpen.models.load import ModelConfig, load_model
from sharpen.policy.constrained import CallGrammar
from sharpen.policy.local import LocalPolicy
from sharpen.render import Renderer
from sharpen.tools import check_call
from sharpen.types import Dialog, Message, Sampling, SharpenError, StopReason, ToolSpec


def spec(name: str, required: tuple[str, ...] = (), **properties) -> ToolSpec:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return ToolSpec(name, "", schema | {"additionalProperties": False})


SHORT = {"type": "string", "maxLength": 6}
TOOLS = (
    spec("now"),
    spec("add", ("a", "b"), a={"type": "integer", "minimum": -5}, b={"type": "number"}),
    spec("find", ("text",), text=SHORT, order={"enum": ["up", "down", None]}, all={"const": True}),
    spec("sort", ("type",), type={"enum": ["a", "b"]}, format={"type": "number"}, enum=SHORT),
    spec("tag", ("tags",), tags={"type": "array", "items": SHORT, "minItems": 1, "maxItems": 2}),
    spec("put", ("at",), at=spec("", ("x",), x={"type": ["integer", "null"]}, y=SHORT).parameters),
)


def fits(message: Message) -> bool:
    offered = {tool.name: tool for tool in TOOLS}
    assert not message.unparsed, message
    for call in message.tool_calls:
        assert not check_call(call, offered[call.name]), call
    return bool(message.tool_calls)


@pytest.fixture(scope="module", params=["pico_tokenizer", "smollm2_tokenizer"])
def renderer(request) -> Renderer:
    return Renderer(request.getfixturevalue(request.param))


def walk(renderer: Renderer, seed: int, begun: str) -> tuple[list[int], bool]:
    """Continue a text with ids drawn uniformly from those that are allowed."""
    rng = random.Random(seed)
    ids = renderer.encode([begun])[0]
    matcher = CallGrammar(renderer.tokenizer, TOOLS, renderer.stop_ids).start()
    for token in ids:
        matcher.accept(token)
    while not matcher.done and len(ids) < 400:
        ids.append(int(rng.choice(matcher.mask().nonzero()[0])))
        matcher.accept(ids[-1])
    return ids, matcher.done


@pytest.mark.parametrize("begun", ["<tool_call>", 'Yes.\n<tool_call>{"name":"', "One moment, "])
def test_what_is_allowed_parses_and_fits(renderer, begun):
    ended = 0
    for seed in range(8):
        ids, done = walk(renderer, seed, begun)
        if done:
            called = fits(renderer.parse(ids))
            assert ids[-1] in renderer.stop_ids and called >= ("<tool_call>" in begun)
            ended += 1
    assert ended >= 4 or "<tool_call>" not in begun


def test_a_call_of_every_tool_can_be_said_and_nothing_else(renderer):
    calls = {
        '{"name":"now","arguments":{}}': True,
        '{"name":"add","arguments":{"a":-5,"b":2.5}}': True,
        '{"name":"find","arguments":{"text":"né\\n","all":true}}': True,
        '{"name":"put","arguments":{"at":{"x":null}}}': True,
        '{"name":"add","arguments":{"a":-6,"b":2}}': False,
        '{"name":"add","arguments":{"a":1}}': False,
        '{"name":"away","arguments":{}}': False,
        '{"name":"now","arguments":{"more":1}}': False,
        '{"name":"now", "arguments":{}}': False,
    }
    for call, right in calls.items():
        matcher = CallGrammar(renderer.tokenizer, TOOLS, renderer.stop_ids).start()
        text = f"Yes.\n<tool_call>{call}</tool_call>\n<tool_call>{call}</tool_call><|im_end|>"
        try:
            for token in renderer.encode([text])[0]:
                matcher.accept(token)
            accepted = matcher.done
        except SharpenError as error:
            accepted = "is not allowed here" not in str(error)
        assert accepted is right, call


@pytest.fixture(scope="module")
def small(tmp_path_factory, smollm2_tokenizer) -> LocalPolicy:
    """Pico's layers under SmolLM2's real tokenizer, with logits wider than its vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("small")
    config = LlamaConfig(
        vocab_size=len(smollm2_tokenizer) + 64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    model = load_model(ModelConfig(base_model=str(folder)))
    embeddings = model.get_input_embeddings().weight.data
    embeddings[-64:] *= 40  # what has no text is likely, unless it is forbidden
    return LocalPolicy(model, Renderer(smollm2_tokenizer))


def test_a_model_samples_calls_that_fit(small, pico_folder):
    pico = LocalPolicy.load(ModelConfig(base_model=str(pico_folder)))
    for policy in (pico, small):
        start, begun = policy.renderer.encode(["<|im_start|>assistant\n", "<tool_call>"])
        for seed in range(8):
            matcher = policy.grammar(TOOLS).start()
            for token in begun:
                matcher.accept(token)
            sampling = Sampling(300, 1.0, seed=seed)
            policy.engine.submit(seed, start + begun, sampling, matcher)
        answers = {}
        while len(answers) < 8:
            answers |= dict(policy.advance())
        ended = [s for s in answers.values() if s.stop is StopReason.ANSWERED]
        assert len(ended) >= 4
        assert all(fits(policy.renderer.parse((*begun, *sampled.ids))) for sampled in ended)


def test_constrained_turns_are_free_text_or_calls(small):
    dialogs = [Dialog((Message("user", "hello"),), TOOLS)] * 8
    known = len(small.renderer.tokenizer)
    structure = set(small.renderer.special.values()) - small.renderer.stop_ids

    def forbidden_ids(turns):
        ids = [token for turn in turns for token in turn.ids]
        return [token for token in ids if token in structure or token >= known]

    free = small.respond(dialogs, Sampling(24, 1.0, seed=3))
    assert forbidden_ids(free)
    constrained = small.respond(dialogs, Sampling(24, 1.0, seed=3, constrained=True))
    assert not forbidden_ids(constrained)
    for turn in constrained:
        assert turn.stop is StopReason.TOKENS or not turn.message.unparsed


def test_a_schema_without_a_grammar_is_named(smollm2_tokenizer):
    odd = spec("odd", a={"type": "string", "pattern": "(?=x)y"})
    with pytest.raises(SharpenError, match="tool odd: no grammar for its schema") as caught:
        CallGrammar(smollm2_tokenizer, [*TOOLS, odd])
    assert "\n" not in str(caught.value)


def test_without_llguidance_the_fix_is_named(monkeypatch, pico_folder):
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    policy = LocalPolicy.load(ModelConfig(base_model=str(pico_folder)))
    with pytest.raises(SharpenError, match=r"pip install 'sharpen\[constrained\]'"):
        policy.submit(0, [1], Sampling(constrained=True), TOOLS)
