"""What rlcore.to_trl adds for a task or for pairs: data sets, reward functions, what is refused.

That TRL trains on it as our own loops do is in tests/parity/test_trl_training.py.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlcore.algorithms import DAPO, DR_GRPO, GDPO, GRPO, RLOO
from rlcore.preferences import DPO, KTO, ORPO, REWARD_MODEL, SIMPO
from rlcore.tasks import REVIEWS, SORT, SORT_BOX, SORT_BOX_UNEVEN, PreferencePairs
from rlcore.trl_export import TrlDifference, to_trl

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed: pip install '.[trl]'", allow_module_level=True)

PAIRS = PreferencePairs(
    ("352041=", "998877="), ("012345", "778899"), ("543210", "99"), margins=(0.5, 1.0)
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def export(tmp_path: Path, method: Any, **given: Any) -> Any:
    return to_trl(method, output_dir=str(tmp_path), report_to="none", **given)


def test_a_task_comes_with_its_row(tmp_path: Path) -> None:
    training = export(tmp_path, DR_GRPO, task=SORT, problems=20, seed=3, learning_rate=1e-4)
    assert training.trainer.__name__ == "GRPOTrainer"
    assert training.args.loss_type == "dr_grpo"
    assert training.args.learning_rate == 1e-4
    assert training.args.max_completion_length == SORT.max_new_tokens  # Dr. GRPO's constant
    assert training.train_dataset.column_names == ["prompt"]
    assert training.train_dataset["prompt"][:] == SORT.prompts("train", 20, seed=3)
    (reward,) = training.reward_funcs
    assert reward.__name__ == "sort"
    assert reward(prompts=["352041="] * 2, completions=["012345", "543210"]) == [1.0, 0.0]
    assert export(tmp_path, RLOO, task=SORT).trainer.__name__ == "RLOOTrainer"
    longer = export(tmp_path, DR_GRPO, task=SORT, max_completion_length=12)
    assert longer.args.max_completion_length == 12


def test_a_reward_that_is_missing_is_none_and_counted(tmp_path: Path) -> None:
    worth = {"a": None, "b": math.nan, "c": 1.0}

    def verify(problem: str, response: str) -> float | None:
        return worth[response]  # raises for another one

    (reward,) = export(tmp_path, DR_GRPO, task=replace(SORT, verify=verify)).reward_funcs
    counted: dict[str, float] = {}
    found = reward(
        prompts=["p"] * 4,
        completions=["a", "b", "c", "d"],
        completion_ids=[[2]] * 4,
        log_metric=counted.__setitem__,
    )
    assert found == [None, None, 1.0, None]
    assert counted == {"verifier_errors": 1.0}


def test_several_rewards_are_functions_that_rate_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def rewards(problem: str, response: str) -> dict[str, float | None]:
        asked.append(response)
        return {**SORT_BOX_UNEVEN.rewards(problem, response), "box": None}

    task = replace(SORT_BOX_UNEVEN, rewards=rewards)
    weights = {"short": 3.0, "correct": 1.0, "box": 0.5}
    training = export(tmp_path, GDPO, task=task, reward_weights=weights)
    assert [f.__name__ for f in training.reward_funcs] == ["correct", "box", "short"]
    assert training.args.reward_weights == [1.0, 0.5, 3.0]
    batch = {"prompts": ["352041="] * 2, "completions": ["[012345]", ".543210"]}
    found = [f(**batch) for f in training.reward_funcs]
    assert found == [[0.1, 0.0], [None, None], [2.0, 0.0]]
    assert asked == ["[012345]", ".543210"]
    training.reward_funcs[0](**{**batch, "completions": ["", ""]})
    assert asked[2:] == ["", ""]


def test_the_overlong_penalty_is_a_reward_function(tmp_path: Path) -> None:
    def verify(problem: str, response: str) -> float | None:
        return None if response == "?" else 1.0

    row = replace(DAPO, dynamic_sampling=False)
    task = replace(SORT, verify=verify, max_new_tokens=10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TrlDifference)
        training = export(tmp_path, row, task=task)
    assert not [one for one in caught if "overlong" in str(one.message)]
    first, second = training.reward_funcs
    batch = {
        "prompts": ["p"] * 4,
        "completions": ["a", "b", "c", "?"],
        "completion_ids": [[2] * 8, [2] * 9, [2] * 10, [2] * 10],
    }
    assert first(**batch) == [1.0, 1.0, 1.0, None]
    assert second(**batch) == [0.0, -0.5, -1.0, None]  # the last two of ten are the cache


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        (GRPO, {"task": "sort"}, "task must be a Task; got"),
        (GRPO, {"pairs": PAIRS}, "pairs: grpo samples its responses"),
        (GRPO, {"task": SORT, "pairs": PAIRS}, "pairs: grpo samples its responses"),
        (DPO, {"task": SORT}, "pairs: dpo learns from preference pairs; got none"),
        (DPO, {"pairs": [("a", "b", "c")]}, "pairs must be a PreferencePairs"),
        (GDPO, {"task": SORT}, "task: 'sort' has one reward, gdpo compares several"),
        (GDPO, {"task": SORT_BOX, "reward_weights": {"box": 1}}, "must name the rewards"),
        (GDPO, {"task": SORT_BOX, "reward_weights": [1, 2, 3]}, "must name the rewards"),
        (GRPO, {"task": SORT, "reward_weights": [1.0]}, "reward_weights: grpo has one reward"),
        (GRPO, {"task": SORT, "problems": 0}, "problems"),
        (replace(GRPO, reward="reward_model"), {"task": SORT}, "without its terminal token"),
        (
            replace(GRPO, reward="several", overlong="penalty"),
            {"task": SORT_BOX},
            "overlong penalty: TRL would",
        ),
        (DAPO, {"task": SORT}, "dynamic_sampling: it samples once per step"),
        (DPO, {"pairs": replace(PAIRS, chosen_cut=(False, True))}, "chosen response of pair 1 was"),
        (KTO, {"pairs": replace(PAIRS, rejected_cut=(True, True))}, "rejected response of pair 0"),
    ],
)
def test_what_does_not_fit_is_refused(
    method: Any, given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        export(tmp_path, method, **given)


def test_pairs_come_with_their_row(tmp_path: Path) -> None:
    columns = {
        "prompt": ["352041=", "998877="],
        "chosen": ["012345", "778899"],
        "rejected": ["543210", "99"],
    }
    for row, trainer in ((DPO, "DPOTrainer"), (SIMPO, "CPOTrainer"), (ORPO, "ORPOTrainer")):
        training = export(tmp_path, row, pairs=PAIRS)
        assert training.trainer.__name__ == trainer
        assert training.reward_funcs == []
        assert training.train_dataset.to_dict() == columns
    rated = export(tmp_path, REWARD_MODEL, pairs=PAIRS).train_dataset
    assert rated.to_dict() == {**columns, "margin": [0.5, 1.0]}
    single = export(tmp_path, KTO, pairs=PAIRS).train_dataset
    assert single.to_dict() == {
        "prompt": columns["prompt"] * 2,
        "completion": columns["chosen"] + columns["rejected"],
        "label": [True, True, False, False],
    }


def test_words_stand_apart_from_their_prompt(tmp_path: Path) -> None:
    pairs = PreferencePairs(("plot :",), ("i loved the plot .",), (".",))
    data = export(tmp_path, DPO, pairs=pairs, task=REVIEWS).train_dataset
    assert data.to_dict() == {
        "prompt": ["plot :"],
        "chosen": [" i loved the plot ."],
        "rejected": [" ."],
    }
