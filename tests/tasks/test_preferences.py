"""Preference pairs: who is chosen, what is kept of it, and that a file comes back as it went."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
import torch

from rlcore import models
from rlcore.tasks import REVIEWS, SORT, PreferencePairs, load_pairs, sample_pairs
from rlcore.tasks.preferences import _sigmoid

COLUMNS = {
    "prompts": ("12=", "345="),
    "chosen": ("12", "345"),
    "rejected": ("21", "34"),
    "chosen_cut": (False, False),
    "rejected_cut": (True, False),
    "margins": (1.0, 0.5),
    "chosen_rewards": (1.0, 0.0),
    "rejected_rewards": (0.0, 0.0),
}


@pytest.fixture(scope="module")
def policy():
    """A random model of digits: its two responses nearly always differ."""
    tokenizer = models.build_tokenizer(SORT.symbols)
    return models.build_model("nano", tokenizer, seed=0, device="cpu"), tokenizer


def worth(problem: str, response: str) -> float:
    """A true reward on a scale of its own: 2 for each "7" in the response, up to 4."""
    return 2.0 * min(response.count("7"), 2)


SEVENS = replace(SORT, name="sevens", verify=worth, preference_scale=3.0)


def test_pairs_are_of_the_split_differ_and_repeat_by_seed(policy) -> None:
    pairs = sample_pairs(*policy, SEVENS, 40, split="held-out", seed=3)
    assert len(pairs) == 40
    assert {SEVENS.split_of(prompt) for prompt in pairs.prompts} == {"held-out"}
    for chosen, rejected in zip(pairs.chosen, pairs.rejected, strict=True):
        assert chosen != rejected
    assert pairs == sample_pairs(*policy, SEVENS, 40, split="held-out", seed=3)
    assert pairs != sample_pairs(*policy, SEVENS, 40, split="held-out", seed=4)
    assert {SEVENS.split_of(p) for p in sample_pairs(*policy, SEVENS, 20, seed=3).prompts} == {
        "train"
    }


def test_the_true_rewards_and_the_cut_are_kept(policy) -> None:
    pairs = sample_pairs(*policy, SEVENS, 200, seed=0)
    for side in ("chosen", "rejected"):
        texts, cut = getattr(pairs, side), getattr(pairs, f"{side}_cut")
        found = [worth(p, text) for p, text in zip(pairs.prompts, texts, strict=True)]
        assert getattr(pairs, f"{side}_rewards") == tuple(found)
        # Eight tokens are the limit. A response with an end has at most seven before it.
        for text, is_cut in zip(texts, cut, strict=True):
            assert is_cut == (len(models.encode(policy[1], [text])[0]) == SORT.max_new_tokens)
    assert any(pairs.chosen_cut)
    assert not all(pairs.chosen_cut)


def test_the_rater_is_bradley_and_terry_on_the_true_reward(policy) -> None:
    """Per gap of the true rewards: the better one is chosen as often as the model says."""
    n = 1000
    pairs = sample_pairs(*policy, SEVENS, n, seed=0)  # noise: the task's, 3
    gaps = [a - b for a, b in zip(pairs.chosen_rewards, pairs.rejected_rewards, strict=True)]
    for gap in (2.0, 4.0):
        won, lost = gaps.count(gap), gaps.count(-gap)
        expected = 1 / (1 + math.exp(-gap / 3))
        error = math.sqrt(expected * (1 - expected) / (won + lost))
        assert won + lost > 30
        assert won / (won + lost) == pytest.approx(expected, abs=4 * error)
    exact = sample_pairs(*policy, SEVENS, 300, seed=0, noise=0)
    assert all(a > b for a, b in zip(exact.chosen_rewards, exact.rejected_rewards, strict=True))
    assert exact.agreement == 1.0
    noisy = sample_pairs(*policy, SEVENS, n, seed=0, noise=1e9)
    assert noisy.agreement == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(n))


def test_agreement_counts_a_tie_as_half() -> None:
    assert PreferencePairs(**COLUMNS).agreement == 0.75
    bare = PreferencePairs(**{name: COLUMNS[name] for name in ("prompts", "chosen", "rejected")})
    with pytest.raises(ValueError, match="agreement: these pairs have no true rewards"):
        _ = bare.agreement


def test_a_huge_gap_does_not_overflow() -> None:
    assert [_sigmoid(x) for x in (-1e6, 0.0, 1e6)] == [0.0, 0.5, 1.0]
    assert _sigmoid(-2.0) == pytest.approx(1 / (1 + math.exp(2.0)))


def test_a_task_without_a_scale_is_rated_without_noise(policy) -> None:
    pairs = sample_pairs(*policy, replace(SEVENS, preference_scale=None), 50, seed=0)
    assert pairs.agreement == 1.0


def test_words_make_pairs_too() -> None:
    tokenizer = models.build_tokenizer(REVIEWS.vocabulary)
    model = models.build_model("nano", tokenizer, seed=0, device="cpu")
    pairs = sample_pairs(model, tokenizer, REVIEWS, 4, seed=0)
    assert all(r < 0 for r in pairs.chosen_rewards)  # nothing was learned yet
    assert models.encode(tokenizer, pairs.chosen + pairs.rejected)


def test_responses_that_cannot_be_rated_make_no_pairs(policy) -> None:
    def sometimes(problem: str, response: str) -> float | None:
        if "3" in response:
            raise RuntimeError("no threes")
        return None if "4" in response else worth(problem, response)

    pairs = sample_pairs(*policy, replace(SEVENS, verify=sometimes), 10, seed=0)
    assert not any(set(text) & {"3", "4"} for text in pairs.chosen + pairs.rejected)
    with pytest.raises(ValueError, match="n: 5 pairs wanted; 128 prompts gave 0 with two diff"):
        sample_pairs(*policy, replace(SEVENS, verify=lambda p, r: None), 5, seed=0)


def test_a_policy_that_says_one_thing_makes_no_pairs(policy) -> None:
    with pytest.raises(ValueError, match="64 prompts gave 0 with two different, rated"):
        sample_pairs(*policy, SEVENS, 2, seed=0, temperature=1e-6)
    with pytest.raises(ValueError, match=r"gave 0 with two .* responses of unlike reward"):
        sample_pairs(*policy, replace(SEVENS, verify=lambda p, r: 1.0), 2, seed=0, noise=0)


def test_the_global_random_state_is_left_alone(policy) -> None:
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.rand(2), random.random()
    torch.manual_seed(1)
    random.seed(1)
    sample_pairs(*policy, SEVENS, 5, seed=0)
    assert torch.equal(torch.rand(2), expected[0])
    assert random.random() == expected[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, "n: found 0"),
        ({"seed": -1}, "seed: found -1"),
        ({"noise": -1.0}, "noise: found -1.0"),
        ({"noise": math.nan}, "noise: found nan"),
        ({"noise": True}, "noise: found True"),
        ({"split": "test"}, "split: found 'test'"),
        ({"temperature": 0}, "temperature: found 0"),
        ({"prompts_per_batch": 0}, "prompts_per_batch: found 0"),
    ],
)
def test_bad_arguments(change: dict, message: str, policy) -> None:
    with pytest.raises(ValueError, match=message):
        sample_pairs(*policy, SEVENS, **{"n": 5, "seed": 0, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": (), "chosen": (), "rejected": ()}, "prompts: found none"),
        ({"prompts": "ab"}, "prompts: found 'ab'; wanted a tuple"),
        ({"prompts": ("12=", "")}, "prompts: pair 1 has an empty prompt"),
        ({"chosen": ("12",)}, "chosen: found 1 rows; wanted 2"),
        ({"chosen": ("12", 3)}, "chosen: found 3 in pair 1; wanted text"),
        ({"rejected": ("21", "345")}, "rejected: pair 1 has twice the same response, '345'"),
        ({"rejected": ("", "34")}, "rejected: pair 0 has a response without a token"),
        ({"margins": (1.0, math.nan)}, "margins: found nan in pair 1; wanted a finite number"),
        ({"chosen_cut": (0, 1)}, "chosen_cut: found 0 in pair 0; wanted a boolean"),
        ({"chosen_rewards": (1.0,)}, "chosen_rewards: found 1 rows"),
        ({"chosen_rewards": ()}, "chosen_rewards: true rewards are for both"),
    ],
)
def test_what_is_no_pair(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PreferencePairs(**{**COLUMNS, **change})


def test_one_response_cut_and_not_cut_is_a_pair() -> None:
    pairs = PreferencePairs(("1=",), ("12",), ("12",), (False,), (True,))
    assert len(pairs) == 1


def test_lists_become_tuples_and_an_empty_answer_with_an_end_is_an_answer() -> None:
    pairs = PreferencePairs(["1="], [""], ["2"])  # type: ignore[arg-type]
    assert pairs == PreferencePairs(("1=",), ("",), ("2",))


def test_take_is_a_slice_of_every_column() -> None:
    pairs = PreferencePairs(**COLUMNS)
    assert pairs.take(1) == PreferencePairs(**{name: c[1:] for name, c in COLUMNS.items()})
    assert pairs.take(0, 2) == pairs
    with pytest.raises(ValueError, match="prompts: found none"):
        pairs.take(2)


@pytest.mark.parametrize("optional", [True, False])
def test_a_file_comes_back_as_it_went(optional: bool, tmp_path) -> None:
    kept = list(COLUMNS) if optional else list(COLUMNS)[:3]
    pairs = PreferencePairs(**{name: COLUMNS[name] for name in kept})
    path = pairs.save(tmp_path / "a" / "pairs.jsonl")
    assert load_pairs(path) == pairs
    assert load_pairs(path).fingerprint == pairs.fingerprint
    assert [file.name for file in path.parent.iterdir()] == ["pairs.jsonl"]
    odd = replace(pairs, chosen=("\u2028\n\"'", "é\x00"))
    assert load_pairs(odd.save(path)) == odd
    assert odd.fingerprint != pairs.fingerprint


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "JSONDecodeError"),
        ("3", "ValueError: 3 has no columns"),
        ('["prompts", "chosen", "rejected"]', "has no columns"),
        (
            '{"prompts": "a", "chosen": "b"}',
            "column 'rejected' is missing; wanted prompts, chosen, rejected",
        ),
        (
            '{"prompts": "a", "chosen": "b", "rejected": "c", "score": 1}',
            "column 'score' is unknown; wanted prompts",
        ),
        ('{"prompt": "a"}', "column 'prompt' is unknown; wanted prompts, chosen, rejected; others"),
        ('{"prompts": "a", "chosen": "b", "rejected": "b"}', "twice the same response"),
        ('{"prompts": "a", "chosen": "b", "rejected": ["c"]}', "wanted text"),
        (
            '{"prompts": "a", "chosen": "b", "rejected": "c", "margins": 1}',
            "'margins' is not in lin",
        ),
        ("\xff", "JSONDecodeError|UnicodeDecodeError"),
    ],
)
def test_a_damaged_line_is_named(line: str, said: str, tmp_path) -> None:
    good = json.dumps({"prompts": "a", "chosen": "b", "rejected": "c"})
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(f"{good}\n".encode() + line.encode("latin-1") + b"\n" + good.encode())
    with pytest.raises(ValueError, match=f"{path}: line 2 is not a pair .*({said})"):
        load_pairs(path)


def test_columns_of_another_name_are_called_unknown_and_not_missing(tmp_path) -> None:
    """The first line has an unknown column and lacks all the wanted ones."""
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a"}\n')
    said = "line 1 is not a pair .*column 'prompt' is unknown; wanted prompts, chosen, rejected;"
    with pytest.raises(ValueError, match=said):
        load_pairs(path)
    path.write_text('{"prompts": "a", "chosen": "b", "rejected": "c", "margins": 1}\n' * 2)
    assert load_pairs(path).margins == (1, 1)
    lines = path.read_text().splitlines()
    path.write_text(lines[0] + "\n" + lines[1].replace(', "margins": 1', "") + "\n")
    with pytest.raises(ValueError, match=r"line 2 .*column 'margins' is missing; .* margins"):
        load_pairs(path)


def test_an_empty_file_holds_no_pairs(tmp_path) -> None:
    (tmp_path / "pairs.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no pairs"):
        load_pairs(tmp_path / "pairs.jsonl")
    with pytest.raises(OSError, match="No such file"):
        load_pairs(tmp_path / "nothing.jsonl")
