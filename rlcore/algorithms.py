"""An algorithm is one row of answers to the five questions of the book.

REINFORCE, RLOO, GRPO and Dr. GRPO below differ in nothing but their rows; the arithmetic is in
``rlcore.objectives``.  A new row needs no new code:

    MY_GRPO = dataclasses.replace(GRPO, name="my-grpo", beta=0.0, kl="none", epsilon_high=0.28)
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rlcore.objectives import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    RATIO_LEVELS,
    SURROGATES,
    batch_mean_advantages,
    fixed_clip_range,
    group_advantages,
    kl_penalized_rewards,
    leave_one_out_advantages,
    policy_loss,
)
from rlcore.objectives._checks import MAX_WEIGHT, Rewards, check_choice, check_ddof, check_number

ADVANTAGES = ("batch_mean", "leave_one_out", "group_mean", "group_zscore")
KL_PLACES = ("none", "reward", "loss")
QUESTIONS = (
    "What was the response worth?",
    "Worth more than what?",
    "How far may one token move?",
    "How much does each token count?",
    "How far from where we started?",
)


@dataclass(frozen=True)
class Algorithm:
    """One row.  Fields and their values are those of ``rlcore.objectives``; nothing is hidden.

    beta is the weight of the KL term (per nat); ddof and eps belong to "group_zscore".
    ValueError for a value that no objective knows, and for a KL term without weight (or a weight
    without a KL term).
    """

    name: str
    title: str
    source: str
    reward: str = "verifier"
    advantage: str = "group_zscore"
    ddof: int = 0
    eps: float = 0.0
    surrogate: str = "clip"
    ratio_level: str = "token"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    aggregation: str = "sequence_mean"
    kl: str = "none"
    kl_estimator: str = "k3"
    kl_importance_weighted: bool = False
    beta: float = 0.0

    def __post_init__(self) -> None:
        choices = {
            "reward": ("verifier",),
            "advantage": ADVANTAGES,
            "surrogate": SURROGATES,
            "ratio_level": RATIO_LEVELS,
            "aggregation": AGGREGATIONS,
            "kl": KL_PLACES,
            "kl_estimator": KL_ESTIMATORS,
        }
        for field, allowed in choices.items():
            check_choice(field, getattr(self, field), allowed)
        check_ddof(self.ddof)
        fixed_clip_range(self.epsilon_low, self.epsilon_high)
        check_number("eps", self.eps, at_least=0)
        check_number("beta", self.beta, at_least=0, at_most=MAX_WEIGHT)
        if self.beta > 0 and self.kl == "none":
            raise ValueError(f'beta must be 0 when kl="none"; got {self.beta}')
        if self.kl == "reward" and self.kl_estimator != "k1":
            raise ValueError(f'kl_estimator must be k1 when kl="reward"; got {self.kl_estimator!r}')

    def five_answers(self) -> dict[str, str]:
        """The row in words: question -> answer, in the order of the book."""
        answers = (_worth(self), _than_what(self), _how_far(self), _counts(self), _from_start(self))
        return dict(zip(QUESTIONS, answers, strict=True))


def compute_advantages(
    algorithm: Algorithm,
    rewards: Rewards,
    group_ids: Tensor,
    *,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    response_mask: Tensor | None = None,
) -> Tensor:
    """Questions 1 and 2: rewards (B,), group_ids (B,) -> advantages (B,).

    A row whose KL term is in the reward needs the three tensors (B, T) too (unless its beta is 0);
    for the others they change nothing.  ValueError: as the functions of rlcore.objectives.
    """
    if algorithm.kl == "reward" and algorithm.beta > 0:
        if old_logprobs is None or ref_logprobs is None or response_mask is None:
            raise ValueError(
                f"old_logprobs, ref_logprobs and response_mask must be given: {algorithm.name} has "
                f"its KL term in the reward (beta={algorithm.beta}); got None"
            )
        rewards = kl_penalized_rewards(
            rewards, old_logprobs, ref_logprobs, response_mask, beta=algorithm.beta
        )
    if algorithm.advantage == "batch_mean":
        return batch_mean_advantages(rewards)
    if algorithm.advantage == "leave_one_out":
        return leave_one_out_advantages(rewards, group_ids)
    scale = "group" if algorithm.advantage == "group_zscore" else "none"
    return group_advantages(rewards, group_ids, scale=scale, ddof=algorithm.ddof, eps=algorithm.eps)


def compute_loss(
    algorithm: Algorithm,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    constant: float | None = None,
    total: Any = None,
    allow_empty: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Questions 3 to 5: the loss to minimise and its statistics, as policy_loss gives them.

    constant: the L of rows that aggregate over a constant (Dr. GRPO: the longest response allowed);
    the other rows do not look at it.  ref_logprobs: needed when the KL term is in the loss with
    beta > 0; for the other rows it only measures the KL.
    """
    return policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        response_mask,
        surrogate=algorithm.surrogate,
        ratio_level=algorithm.ratio_level,
        epsilon_low=algorithm.epsilon_low,
        epsilon_high=algorithm.epsilon_high,
        aggregation=algorithm.aggregation,
        constant=constant if algorithm.aggregation == "constant" else None,
        total=total,
        ref_logprobs=ref_logprobs,
        beta=algorithm.beta if algorithm.kl == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        kl_importance_weighted=algorithm.kl_importance_weighted,
        allow_empty=allow_empty,
    )


def by_name(name: str) -> Algorithm:
    """The row of that name.  ValueError, with the names there are, for any other."""
    rows = {row.name: row for row in (*ROWS, GRPO_MEAN_ONLY)}
    return rows[check_choice("algorithm", name, tuple(rows))]


def _worth(row: Algorithm) -> str:
    if row.kl == "reward" and row.beta > 0:
        return f"{row.reward}, minus {row.beta:g} × k1 summed over the response"
    return row.reward


def _than_what(row: Algorithm) -> str:
    kind = "population" if row.ddof == 0 else "sample"
    guard = f" + {row.eps:g}" if row.eps else ""
    return {
        "batch_mean": "the mean of the batch",
        "leave_one_out": "the mean of the other responses of the group",
        "group_mean": "the mean of the group",
        "group_zscore": f"the mean of the group, in units of its {kind} std{guard}",
    }[row.advantage]


def _how_far(row: Algorithm) -> str:
    if row.surrogate == "reinforce":
        return "no ratio, no clip"
    low, high = fixed_clip_range(row.epsilon_low, row.epsilon_high)
    level = {
        "token": "per token",
        "sequence": "per response, its |y|-th root",
        "sequence_sum": "per response",
    }[row.ratio_level]
    return f"ratio {level}, clipped to [{low:g}, {high:g}]"


def _counts(row: Algorithm) -> str:
    return {
        "sequence_mean": "mean over the response, then over responses",
        "token_mean": "mean over all tokens",
        "constant": "sum over the response, divided by a constant, then mean over responses",
        "sequence_sum": "sum over the response, then mean over responses",
    }[row.aggregation]


def _from_start(row: Algorithm) -> str:
    if row.kl == "none" or row.beta == 0:
        return "no limit"
    ratio = "ratio × " if row.kl_importance_weighted and row.kl == "loss" else ""
    return f"{ratio}{row.kl_estimator} in the {row.kl}, beta = {row.beta:g}"


REINFORCE = Algorithm(
    name="reinforce",
    title="REINFORCE",
    source="Williams 1992, with the mean of the batch as baseline",
    advantage="batch_mean",
    surrogate="reinforce",
    aggregation="sequence_sum",
)
RLOO = Algorithm(
    name="rloo",
    title="RLOO",
    source="Ahmadian et al. 2024, arXiv 2402.14740 (beta: TL;DR)",
    advantage="leave_one_out",
    surrogate="reinforce",
    aggregation="sequence_sum",
    kl="reward",
    kl_estimator="k1",
    beta=0.03,
)
GRPO = Algorithm(
    name="grpo",
    title="GRPO",
    source="Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, eqs. 3 and 4",
    advantage="group_zscore",
    kl="loss",
    kl_estimator="k3",
    beta=0.04,
)
DR_GRPO = Algorithm(
    name="dr-grpo",
    title="Dr. GRPO",
    source="Liu et al. 2025, arXiv 2503.20783, sec. 3.2 and listing 1",
    advantage="group_mean",
    aggregation="constant",
)
GRPO_MEAN_ONLY = replace(
    GRPO, name="grpo-mean-only", title="GRPO, mean only", advantage="group_mean"
)
ROWS = (REINFORCE, RLOO, GRPO, DR_GRPO)
