"""Coresets: each strategy against a plain statement of what it promises, and its bad inputs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from sharpen import CoresetSelector, Dialog, Message, SharpenError, ToolCall
from sharpen.data import coreset
from sharpen.data.coreset import easy_to_hard, facility_location, farthest_points
from sharpen.data.features import HashedEncoder, dialog_text, normalize_rows


def dialog(number: int, said: str, answer: str = "Done.", **metadata) -> Dialog:
    messages = (Message("user", said), Message("assistant", answer))
    return Dialog(messages, id=f"d{number}", metadata=metadata)


def rows(count: int, losses: bool = True) -> list[Dialog]:
    chance = np.random.default_rng(1)
    words = [f"word{i}" for i in range(60)]
    texts = [" ".join(chance.choice(words, 8)) for _ in range(count)]
    extra = [{"loss": float(chance.random())} if losses else {} for _ in range(count)]
    return [dialog(i, text, **given) for i, (text, given) in enumerate(zip(texts, extra))]  # noqa: B905


class CountingScorer:
    def __init__(self):
        self.asked: list[str] = []

    def losses(self, dialogs):
        self.asked += [d.id for d in dialogs]
        return [float(d.id[1:]) % 7 for d in dialogs]


class PlaceEncoder:
    """Texts are points; lengths differ, so that what is not normalised goes wrong."""

    def encode(self, texts):
        angles = [float(text.split()[0]) for text in texts]
        return (
            np.array([[np.cos(a), np.sin(a)] for a in angles])
            * np.arange(1, len(texts) + 1)[:, None]
        )


def unit(count: int, dims: int, seed: int = 0) -> np.ndarray:
    return normalize_rows(np.random.default_rng(seed).standard_normal((count, dims)))


# Features ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("near", "far"),
    [
        (("Book a flight to Paris", "please book me a flight to Oslo"), "how is the weather"),
        (("帮我预订明天去巴黎的机票", "帮我预订后天去奥斯陆的机票"), "今天的天气怎么样"),
        (("東京行きの切符を予約して", "大阪行きの切符を予約して"), "天気はどうですか"),
    ],
)
def test_hashed_features_know_what_is_alike(near, far):
    one, other, third = HashedEncoder().encode([*near, far])
    assert one @ other > 0.3 and one @ other > 2 * max(one @ third, other @ third)
    assert np.allclose(np.linalg.norm([one, other, third], axis=1), 1, atol=1e-6)


def test_a_chinese_word_of_two_characters_is_a_feature():
    one, other, third = HashedEncoder(4096).encode(["查天气", "天气呢", "订机票"])
    assert one @ other > 0.25 and abs(one @ third) < 0.1


def test_hashed_features_depend_on_nothing_but_the_text():
    texts = [
        "",
        "a",
        "一",
        "\U0001f642",
        "Word word WORD",
        "x" * 3000,
        *(f"row {i}" for i in range(1500)),
    ]
    whole = HashedEncoder(128).encode(texts)
    assert whole.shape == (len(texts), 128) and np.isfinite(whole).all()
    assert np.allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-6)  # the empty text too
    for index in (0, 2, 5, 600, len(texts) - 1):
        assert np.array_equal(HashedEncoder(128).encode([texts[index]])[0], whole[index])
    assert not np.array_equal(*HashedEncoder().encode(["ab cd", "cd ab"]))
    assert HashedEncoder().encode([]).shape == (0, 256)


def test_calls_are_part_of_the_text_and_results_are_not():
    call = Message("assistant", tool_calls=(ToolCall("book_flight", {"to": "Paris"}),))
    seen = dialog_text(
        Dialog((Message("system", "sys"), Message("user", "hi"), call, Message("tool", "res")))
    )
    assert "book_flight" in seen and "Paris" in seen and "sys" not in seen and "res" not in seen


# Strategies ----------------------------------------------------------------------------------


def test_loss_topk_asks_the_model_only_for_what_is_unknown():
    data = rows(20, losses=False)
    data[3] = replace(data[3], metadata={"loss": 100.0})
    data[4] = replace(data[4], metadata={"loss": -1})
    scorer = CountingScorer()
    chosen = CoresetSelector("loss_topk", 5, scorer=scorer).select(data)
    assert [d.id for d in chosen] == ["d3", "d6", "d13", "d5", "d12"]
    assert scorer.asked == [d.id for d in data if d.id not in ("d3", "d4")]


def test_loss_topk_with_a_real_model(pico_folder):
    from sharpen.train.scoring import ModelScorer

    scorer, data = ModelScorer.load(str(pico_folder), "cpu"), rows(12, losses=False)
    found = scorer.losses(data)
    wanted = sorted(range(12), key=lambda i: -found[i])[:4]
    assert CoresetSelector("loss_topk", 4, scorer=scorer).indices(data) == wanted


def test_losses_are_never_made_up():
    for strategy in ("loss_topk", "hybrid", "curriculum"):
        with pytest.raises(SharpenError, match=f"d0: no loss, and coreset strategy {strategy}"):
            CoresetSelector(strategy, 3).select(rows(10, losses=False))


def plain_farthest(vectors, count, first, weight):
    chosen = [first]
    while len(chosen) < count:
        near = (1 - vectors @ vectors[chosen].T).min(1)
        score = weight * near
        score[chosen] = -np.inf
        chosen.append(int(score.argmax()))
    return chosen


@pytest.mark.parametrize("pool", [1, 3, 17, 5000])
@pytest.mark.parametrize("weighted", [False, True])
def test_farthest_points_are_exact_whatever_the_pool(monkeypatch, pool, weighted):
    vectors = unit(200, 6)
    weight = np.random.default_rng(2).random(200).astype(np.float32) if weighted else None
    wanted = plain_farthest(vectors, 60, 4, 1 if weight is None else weight)
    monkeypatch.setattr(coreset, "POOL", pool)
    monkeypatch.setattr(coreset, "BATCH", 64)
    assert list(farthest_points(vectors, 60, 4, weight)) == wanted


def test_farthest_points_are_within_twice_the_best_radius():
    """Gonzalez' bound, in Euclidean distance on the sphere, against every choice there is."""
    vectors = unit(11, 3, seed=5)
    distance = np.sqrt(np.maximum(2 - 2 * vectors @ vectors.T, 0))
    best = min(distance[:, list(c)].min(1).max() for c in itertools.combinations(range(11), 4))
    for first in range(11):
        chosen = farthest_points(vectors, 4, first)
        assert len(set(chosen)) == 4 and distance[:, chosen].min(1).max() <= 2 * best + 1e-6


def test_diversity_takes_one_of_each_kind_and_copies_last():
    kinds = ["book a flight to Paris", "取消明天的会议", "what is the weather", "send the report"]
    data = [dialog(i, kinds[i % 4]) for i in range(40)]
    chosen = CoresetSelector("diversity", 6, seed=3).select(data)
    assert {d.messages[0].content for d in chosen[:4]} == set(kinds)
    assert len({d.id for d in chosen}) == 6


def test_vectors_of_any_encoder_are_normalised():
    data = [dialog(i, str(angle)) for i, angle in enumerate((0.0, 0.05, 3.1, 1.6, 0.1, 1.5))]
    chosen = CoresetSelector("diversity", 3, encoder=PlaceEncoder(), seed=0).indices(data)
    vectors = CoresetSelector("diversity", 3, encoder=PlaceEncoder()).vectors(data)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert 2 in chosen and set(chosen) & {3, 5} and set(chosen) & {0, 1, 4}


def test_hybrid_weighs_rank_of_loss_by_distance():
    data = rows(80)
    selector = CoresetSelector("hybrid", 20)
    losses = np.array([d.metadata["loss"] for d in data])
    rank = (losses.argsort().argsort() + 1) / 80
    wanted = plain_farthest(selector.vectors(data), 20, int(losses.argmax()), rank)
    chosen = selector.indices(data)
    assert chosen == wanted
    scaled = [replace(d, metadata={"loss": d.metadata["loss"] ** 3 * 50}) for d in data]
    assert selector.indices(scaled) == chosen  # only the order of the losses counts
    assert losses[chosen].mean() > losses.mean() + 0.1


def cover(vectors, chosen) -> float:
    return float(np.maximum(vectors @ vectors[list(chosen)].T, 0).max(1).sum())


@pytest.mark.parametrize("seed", range(6))
def test_facility_location_is_greedy_and_within_its_bound(seed):
    vectors = unit(14, 4, seed)
    chosen = list(facility_location(vectors, 4))
    best = max(cover(vectors, c) for c in itertools.combinations(range(14), 4))
    assert cover(vectors, chosen) >= (1 - 1 / np.e) * best - 1e-6
    for size in range(4):  # every pick gains the most
        gains = [cover(vectors, [*chosen[:size], j]) for j in range(14)]
        assert gains[chosen[size]] >= max(gains) - 1e-5
    assert len(set(facility_location(vectors, 14))) == 14


def test_facility_location_in_groups_loses_little(monkeypatch):
    centres = unit(12, 16, 1)
    vectors = normalize_rows(np.repeat(centres, 60, 0) + 0.12 * unit(720, 16, 2) * 3)
    whole = cover(vectors, facility_location(vectors, 24))
    monkeypatch.setattr(coreset, "GROUP", 200)
    chosen = facility_location(vectors, 24)
    chance = np.random.default_rng(0)
    by_chance = max(cover(vectors, chance.permutation(720)[:24]) for _ in range(20))
    assert len(set(chosen)) == 24 and cover(vectors, chosen) > 0.97 * whole
    assert cover(vectors, chosen) > by_chance


def test_copies_do_not_slow_or_break_facility_location():
    vectors = np.repeat(unit(5, 8), 30, 0)
    chosen = facility_location(vectors, 20)
    assert len(set(chosen)) == 20 and len({i // 30 for i in chosen[:5]}) == 5


def test_curriculum_goes_from_easy_to_hard_over_the_whole_range():
    data = rows(100)
    selector = CoresetSelector("curriculum", 10)
    losses = [d.metadata["loss"] for d in selector.select(data)]
    ranks = np.searchsorted(np.sort([d.metadata["loss"] for d in data]), losses)
    assert list(ranks) == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95] and selector.ordered
    assert not CoresetSelector("hybrid", 10).ordered
    whole = CoresetSelector("curriculum", 500).select(data)  # ordered even if nothing is left out
    assert [d.metadata["loss"] for d in whole] == sorted(d.metadata["loss"] for d in data)
    data = [dialog(i, "word " * (i * 7 % 50)) for i in range(50)]
    lengths = [
        len(d.messages[0].content) for d in CoresetSelector("curriculum_length", 50).select(data)
    ]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert list(easy_to_hard(np.array([3, 1, 2]), 3)) == [1, 2, 0]


def test_random_is_a_sample_by_seed():
    data = rows(50)
    first, again, other = (CoresetSelector("random", 20, seed=s).indices(data) for s in (0, 0, 1))
    assert first == again == sorted(set(first)) != other and len(first) == 20


@pytest.mark.parametrize("strategy", ["diversity", "hybrid", "facility_location", "curriculum"])
def test_the_same_seed_gives_the_same_rows(strategy):
    data = rows(300)
    first = CoresetSelector(strategy, 40, seed=5).indices(data)
    assert first == CoresetSelector(strategy, 40, seed=5).indices(data)
    assert len(set(first)) == 40 and all(0 <= i < 300 for i in first)


def test_processed_dialogs_are_rows_too(pico_tokenizer):
    from sharpen.spec.data import AgentDialogProcessor

    processed = AgentDialogProcessor(pico_tokenizer, CountingScorer()).process(
        rows(15, losses=False)
    )
    for strategy in ("loss_topk", "diversity", "hybrid", "curriculum_length"):
        chosen = CoresetSelector(strategy, 4).select(processed)
        assert len(chosen) == 4 and all(row in processed for row in chosen)
    assert {p.dialog_id for p in CoresetSelector("loss_topk", 2).select(processed)} == {"d6", "d13"}


# Gradients -----------------------------------------------------------------------------------


def kinds_of_dialogs(count: int) -> list[Dialog]:
    """Four ways to answer the same kind of request: requests do not tell the kinds apart."""
    chance = np.random.default_rng(3)
    made = []
    for number in range(count):
        name = "".join(chance.choice(list("abcdefgh"), 5))
        kind = ("call", "refuse", "ask", "chinese")[number % 4]
        said = {"refuse": "No tool fits.", "ask": f"Which {name}?", "chinese": f"好的，{name}。"}
        calls = (ToolCall("find", {"name": name}),) if kind == "call" else ()
        answer = Message("assistant", said.get(kind, ""), calls)
        made.append(
            Dialog((Message("user", f"Find {name}"), answer), id=f"g{number}", task_type=kind)
        )
    return made


@pytest.fixture(scope="module")
def pico(pico_folder):
    from sharpen.models.load import ModelConfig, load_model, load_tokenizer
    from sharpen.render import Renderer

    model = load_model(ModelConfig(base_model=str(pico_folder), device="cpu"))
    return model, Renderer(load_tokenizer(str(pico_folder)))


@pytest.mark.parametrize("kind", ["call", "refuse", "ask", "chinese"])
def test_gradients_find_the_rows_of_the_targets_kind(pico, kind):
    from sharpen.train.gradients import GradientInfluence

    data = kinds_of_dialogs(96)
    target = [d for d in data[64:] if d.task_type == kind][:4]
    influence = GradientInfluence(*pico, target)
    chosen = CoresetSelector("gradient", 16, influence=influence).select(data[:64])
    assert sum(d.task_type == kind for d in chosen) >= 13  # chance: 4 of 16


def test_projected_gradients_are_the_real_ones(pico):
    """Without a loss of rank the features' dot products are those of each row's own backward."""
    import torch

    from sharpen.train.gradients import GradientInfluence
    from sharpen.train.scoring import ModelScorer

    model, renderer = pico
    data = kinds_of_dialogs(6)
    found = GradientInfluence(model, renderer, data[:1], rank=4096).features(data)
    weights = [m.weight for m in model.model.layers[-1].modules() if isinstance(m, torch.nn.Linear)]
    plain = []
    for row, datum in zip(data, renderer.render(data), strict=True):
        ids = torch.tensor(datum.ids).long()[None]
        labels = torch.where(torch.tensor(datum.mask), ids[0], -100)[None]
        for weight in weights:
            weight.requires_grad_(True)
        loss = model(input_ids=ids, labels=labels).loss
        assert abs(loss.item() - ModelScorer(model, renderer).losses([row])[0]) < 1e-5
        slopes = torch.autograd.grad(loss, weights)
        plain.append(torch.cat([s.flatten() for s in slopes]).numpy())
    plain = np.array(plain)
    assert np.allclose(found @ found.T, plain @ plain.T, rtol=1e-3, atol=1e-5)
    small = GradientInfluence(model, renderer, data[:1], rank=8).features(data)
    assert small.shape[1] == 7 * 64
    assert (
        np.abs(
            normalize_rows(small) @ normalize_rows(small).T
            - normalize_rows(plain) @ normalize_rows(plain).T
        ).max()
        < 0.35
    )


def test_influence_does_not_depend_on_batches_or_leave_traces(pico):
    from sharpen.train.gradients import GradientInfluence

    model, data = pico[0], kinds_of_dialogs(12)
    influence = GradientInfluence(*pico, data[:4])
    found = influence(data)
    influence.token_budget = 1
    assert np.allclose(found, influence(data), atol=1e-5)
    assert not any(m._forward_hooks for m in model.modules())
    assert any(p.requires_grad for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_an_adapter_that_does_nothing_yet_changes_no_influence(pico, pico_folder):
    from sharpen.models.load import LoRAConfig, ModelConfig, attach_lora, load_model
    from sharpen.models.lora import fuse_lora
    from sharpen.train.gradients import GradientInfluence

    plain = load_model(ModelConfig(base_model=str(pico_folder), device="cpu"))
    model = fuse_lora(attach_lora(plain, LoRAConfig(lora_r=4)))
    data = kinds_of_dialogs(12)
    found = GradientInfluence(model, pico[1], data[:2])(data)
    assert np.allclose(found, GradientInfluence(*pico, data[:2])(data), atol=1e-4)


# Bad input -----------------------------------------------------------------------------------


def test_a_small_set_is_kept_whole_and_said(capsys):
    data = rows(5)
    assert CoresetSelector("diversity", 9).select(data) == data
    assert "all 5 rows are kept, the target is 9" in capsys.readouterr().out


class BadEncoder:
    def __init__(self, values):
        self.values = values

    def encode(self, texts):
        return self.values


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: CoresetSelector("best", 3), "'best' is unknown; known are loss_topk, diversity"),
        (lambda: CoresetSelector("random", 0), "target size 0"),
        (lambda: CoresetSelector("random", 3).select([]), "the set has no rows"),
        (lambda: CoresetSelector("gradient", 3).select(rows(9)), "needs influence="),
        (
            lambda: CoresetSelector("loss_topk", 3).select(
                [*rows(9), dialog(9, "x", loss=float("nan"))]
            ),
            "d9: loss nan is not a finite number",
        ),
        (
            lambda: CoresetSelector("hybrid", 3).select([dialog(0, "x", loss="high"), *rows(9)]),
            "d0: loss 'high' is not",
        ),
        (
            lambda: CoresetSelector("diversity", 3, encoder=BadEncoder(np.ones((2, 4)))).select(
                rows(9)
            ),
            "values for 9 rows",
        ),
        (
            lambda: CoresetSelector(
                "diversity", 3, encoder=BadEncoder(np.full((9, 4), np.nan))
            ).select(rows(9)),
            "d0: the encoder's vector is not finite",
        ),
    ],
)
def test_bad_input(make, problem):
    with pytest.raises(SharpenError, match=problem):
        make()
