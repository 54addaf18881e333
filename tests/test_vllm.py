"""The vLLM policy against servers on this machine that speak vLLM's routes, with a real model."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from sharpen.envs.one_turn import OneTurn
from sharpen.models.load import ModelConfig
from sharpen.policy.find import find_policy
from sharpen.policy.local import LocalPolicy
from sharpen.policy.remote import RemoteLimits
from sharpen.policy.vllm import VLLMPolicy
from sharpen.rollout import rollout
from sharpen.types import (
    Dialog,
    Message,
    Sampling,
    SharpenError,
    StopReason,
    Task,
    TokenPolicy,
    ToolSpec,
)
from vllm_server import VLLMServer

QUICK = RemoteLimits(timeout_s=5, backoff_s=0.01, attempts=3)
ASK = [Dialog((Message("user", f"hello {i}"),)) for i in range(6)]
WARM = Sampling(12, 0.8, seed=5)


@pytest.fixture(scope="module")
def pico(pico_folder) -> LocalPolicy:
    return LocalPolicy.load(ModelConfig(base_model=str(pico_folder)))


@pytest.fixture
def server(pico):
    with VLLMServer(pico) as server:
        yield server


def connect(server: VLLMServer, pico: LocalPolicy, **more) -> VLLMPolicy:
    return VLLMPolicy(server.url, "pico", pico.renderer, limits=QUICK, **more)


def check_equal_turns(remote_turns, local_turns) -> None:
    """The same ids, prompts and messages; log-probabilities but for rounding."""
    for remote, local in zip(remote_turns, local_turns, strict=True):
        assert remote.ids == local.ids and remote.ids
        assert remote.prompt_ids == local.prompt_ids
        assert remote.message == local.message
        assert remote.logprobs == pytest.approx(local.logprobs, abs=1e-5)


def test_ids_and_logprobs_are_those_that_the_model_sampled(server, pico):
    """What comes back is, id for id, what the same model samples here."""
    check_equal_turns(connect(server, pico).respond(ASK, WARM), pico.respond(ASK, WARM))
    params = server.bodies[-1]["sampling_params"]
    assert params["stop_token_ids"] == sorted(pico.renderer.stop_ids) and params["ignore_eos"]
    assert params["logprobs"] == 0
    seeds = {body["sampling_params"]["seed"] for body in server.bodies}
    assert len(seeds) == len(ASK) + 1  # one per prompt, and that of the check at the start


def test_a_server_is_found_by_name(server, pico):
    """`sharpen evaluate --model vllm+http://…#pico` samples what the model samples here."""
    policy = find_policy(f"vllm+{server.url}#pico").open()
    check_equal_turns(policy.respond(ASK, WARM), pico.respond(ASK, WARM))
    with pytest.raises(SharpenError, match="name the served model"):
        find_policy(f"vllm+{server.url}")


class Chat(OneTurn):
    """An environment that never ends the episode."""

    def step(self, message):
        return (Message("user", "and then?"),), None


def test_episodes_go_on_from_sampled_ids_as_they_do_here(server, pico):
    policy = connect(server, pico)
    tasks = [Task(str(i), f"Say {i}.") for i in range(5)]
    assert isinstance(policy, TokenPolicy)
    sampling = Sampling(60, 1.0, seed=2, stop=tuple("aeiou <>,.019"))
    remote_episodes = rollout(policy, tasks, Chat, sampling, max_turns=4)
    local_episodes = rollout(pico, tasks, Chat, sampling, max_turns=4)
    assert max(len(trajectory.turns) for trajectory in remote_episodes) == 4
    for remote, local in zip(remote_episodes, local_episodes, strict=True):
        check_equal_turns(remote.turns, local.turns)
        for before, after in pairwise(remote.turns):
            known = before.prompt_ids + before.ids
            assert after.prompt_ids[: len(known)] == known


def test_many_are_under_way_at_once(server, pico):
    policy = connect(server, pico)
    server.expected_under_way = len(ASK)
    policy.respond(ASK, WARM)
    assert server.most_under_way == len(ASK)


def test_stop_strings_token_limits_and_full_contexts(server, pico):
    policy = connect(server, pico)
    (plain,) = policy.respond(ASK[:1], WARM)
    assert plain.stop is StopReason.TOKENS and len(plain.ids) == 12
    word = pico.renderer.tokenizer.decode(plain.ids)[3:5]
    (cut,) = policy.respond(ASK[:1], Sampling(12, 0.8, seed=5, stop=(word,)))
    assert cut.stop is StopReason.ANSWERED and cut.ids == plain.ids[: len(cut.ids)]
    (full,) = policy.respond(ASK[:1], Sampling(2048))
    assert full.stop is StopReason.CONTEXT and "over 2048" in full.error


def test_busy_servers_are_asked_again_and_dead_ones_given_up(server, pico):
    policy = connect(server, pico)
    server.trouble += [(429, {"Retry-After": "0"}, "busy"), (503, {}, "starting")]
    (turn,) = policy.respond(ASK[:1], WARM)
    assert turn.stop is StopReason.TOKENS and not turn.error
    server.trouble += [(500, {}, "engine is dead")] * 3
    (failed,) = policy.respond(ASK[:1], WARM)
    assert failed.stop is StopReason.POLICY_ERROR and "HTTP 500: engine is dead" in failed.error
    server.trouble.append((400, {}, "maximum context length is 2048"))
    assert policy.respond(ASK[:1], WARM)[0].stop is StopReason.CONTEXT


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("finish_reason", "abort", "finish_reason 'abort'"),
        ("finish_reason", "stop", "ended the turn, which is no stop token here"),
        ("token_ids", [1, 2], "not every token has its log-probability"),
        ("logprobs", None, "the answer cannot be read"),
    ],
)
def test_answers_that_would_train_wrongly_are_refused(server, pico, part, value, reason):
    policy = connect(server, pico)

    def change(answer):
        answer["choices"][0][part] = value
        return answer

    server.change = change
    (turn,) = policy.respond(ASK[:1], WARM)
    assert turn.stop is StopReason.POLICY_ERROR and reason in turn.error and not turn.ids


def write_adapter(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(text)
    return folder


def test_an_adapter_is_served_under_its_hash_and_must_have_changed(server, pico, tmp_path):
    folder = write_adapter(tmp_path / "a", "one")
    policy = connect(server, pico, adapter=folder)
    first = policy.serving
    assert server.adapters == {first: str(folder)} and policy.digest[:16] in first
    with pytest.raises(SharpenError, match="unchanged since it was loaded"):
        policy.load_adapter(folder)
    policy.respond(ASK[:1], WARM)
    assert server.bodies[-1]["model"] == first
    second = policy.load_adapter(write_adapter(folder, "two"))
    assert second != first and [*server.adapters] == [second]
    policy.submit(0, [1], WARM)
    with pytest.raises(SharpenError, match="answers are under way"):
        policy.load_adapter(write_adapter(folder, "three"))
    policy.advance()
    server.change = lambda answer: answer | {"model": "pico"}
    assert "'pico' answered" in policy.respond(ASK[:1], WARM)[0].error


def test_an_adapter_that_is_not_listed_is_an_error(server, pico, tmp_path):
    server.forgets = True
    with pytest.raises(SharpenError, match="does not list adapter pico-"):
        connect(server, pico, adapter=write_adapter(tmp_path / "a", "one"))
    with pytest.raises(SharpenError, match=r"has no adapter_config.json"):
        connect(server, pico, adapter=tmp_path)


def test_wrong_servers_are_named(pico):
    with VLLMServer(pico, processed=False) as raw, pytest.raises(SharpenError, match="are raw"):
        connect(raw, pico)
    with VLLMServer(pico, "other") as other, pytest.raises(SharpenError, match="serves other, not"):
        connect(other, pico)
    with VLLMServer(pico) as shut:
        shut.trouble.append((403, {}, "Scale-out endpoints are disabled."))
        with pytest.raises(SharpenError, match="generate: HTTP 403: Scale-out endpoints"):
            connect(shut, pico)
    with pytest.raises(SharpenError, match="v1/models: ConnectError"):
        connect(shut, pico)
    with VLLMServer(pico) as server, pytest.raises(SharpenError, match="the vLLM policy has none"):
        connect(server, pico).submit(0, [1], Sampling(constrained=True), [ToolSpec("a")])


@pytest.mark.slow
def test_a_server_that_is_killed_fails_its_samples_only(pico, pico_folder):
    command = [
        sys.executable,
        str(Path(__file__).with_name("support") / "vllm_server.py"),
        str(pico_folder),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        policy = VLLMPolicy(url, "pico", pico.renderer, limits=QUICK)
        check_equal_turns(policy.respond(ASK, WARM), pico.respond(ASK, WARM))
        for number in range(4):
            policy.submit(number, [1, 2], Sampling(1500, 1.0, seed=number))
        time.sleep(0.1)
    finally:
        process.kill()
        process.communicate()
    answers = {}
    while len(answers) < 4:
        answers |= dict(policy.advance())
    assert StopReason.POLICY_ERROR in {sampled.stop for sampled in answers.values()}
    assert policy.respond(ASK[:1], WARM)[0].stop is StopReason.POLICY_ERROR
    policy.close()
