r"""What an algorithm is: one row of choices, checked to fit together.

The fields follow the five questions of the book, and their values are the arguments of
``rlcore.objectives``; nothing is hidden behind a name.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlcore.answers import QUESTIONS, five_answers
from rlcore.naming import check_texts
from rlcore.objectives import (
    AGGREGATIONS,
    CLIP_RANGES,
    KL_ESTIMATORS,
    RATIO_LEVELS,
    SURROGATES,
    fixed_clip_range,
)
from rlcore.objectives._checks import (
    MAX_WEIGHT,
    check_choice,
    check_ddof,
    check_number,
    describe,
)
from rlcore.objectives.surrogates import USE_RANGE

REWARDS = ("verifier", "reward_model", "several")
OVERLONG = ("keep", "filter", "penalty")
ADVANTAGES = (
    "batch_mean",
    "greedy",
    "leave_one_out",
    "gae",
    "group_mean",
    "group_zscore",
    "batch_zscore",
    "smoothed",
    "decoupled",
    "beta_normalized",
)
KL_PLACES = ("none", "reward", "loss")


@dataclass(frozen=True)
class Algorithm:
    r"""One row.  A field that the row's other choices leave without a meaning is not looked at.

    Question 1, what was the response worth?

    - ``reward``: ``"verifier"`` or ``"reward_model"``, one number; ``"several"``, a column each,
      which ``"decoupled"`` compares apart; any other advantage is made of their sum.
    - ``overlong``: ``"keep"``; ``"filter"``, a truncated response is left out of the loss;
      ``"penalty"``, DAPO's soft punishment is added to the reward, over the last
      ``overlong_cache`` (a share) of the longest length.
    - ``dynamic_sampling``: prompts whose rewards are all equal are replaced by new ones.

    Question 2, worth more than what?

    - ``advantage``: one of ``ADVANTAGES``, in the order of the book.
    - ``ddof``, ``eps``: the std of the group, and what is added to it; ``batch_eps`` likewise for
      the std of the batch in ``"decoupled"``.
    - ``gamma``, ``lam``: of GAE, in $[0, 1]$; ``length_alpha``: $\lambda$ follows the length and
      ``lam`` is not looked at; ``lam_critic``: another $\lambda$ for the critic's targets;
      ``whiten``: advantages of mean 0 and std 1 over the tokens of the batch;
      ``value_pretraining``: the critic is first fitted to Monte-Carlo returns of the start policy.

    Question 3, how far may one token move?

    - ``surrogate``, ``ratio_level``, ``clip_range``, ``epsilon_low``, ``epsilon_high``,
      ``ratio_max``, ``tau_positive``, ``tau_negative``: as in ``policy_loss``.

    Question 4, how much does each token count?

    - ``aggregation``: as in ``aggregate``.

    Question 5, how far from where we started?

    - ``kl``: ``"none"``, ``"reward"`` (k1, of the sampling policy, no gradient) or ``"loss"``;
      ``beta`` is its weight per nat; ``kl_estimator``, ``kl_importance_weighted``: as in
      ``policy_loss``.

    Terms added to the loss, each with its weight: ``value_coef`` (with ``epsilon_value``: how far
    a value may move), ``entropy_coef``, ``nll_coef`` (likelihood of the correct responses).

    ``name`` and ``title``: how code and prose call the row.  ``source``: paper and equations.
    ``notes``: what released code, TRL and verl do differently.

    ValueError: a value that no objective knows, and choices that do not fit together (a weight
    ``beta`` without a KL term, ``"decoupled"`` without several rewards, ...).  A KL term of weight
    0 is allowed: it is switched off, and the rest of the row stays what it was.
    """

    name: str
    title: str
    source: str
    reward: str = "verifier"
    overlong: str = "keep"
    overlong_cache: float = 0.2
    dynamic_sampling: bool = False
    advantage: str = "group_zscore"
    ddof: int = 0
    eps: float = 0.0
    batch_eps: float = 1e-4
    gamma: float = 1.0
    lam: float = 0.95
    lam_critic: float | None = None
    length_alpha: float | None = None
    whiten: bool = False
    value_pretraining: bool = False
    surrogate: str = "clip"
    ratio_level: str = "token"
    clip_range: str = "fixed"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    ratio_max: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    aggregation: str = "sequence_mean"
    kl: str = "none"
    kl_estimator: str = "k3"
    kl_importance_weighted: bool = False
    beta: float = 0.0
    value_coef: float = 0.0
    epsilon_value: float | None = None
    entropy_coef: float = 0.0
    nll_coef: float = 0.0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_texts(self)
        _check_values(self)
        for wrong, message in (*_misfits_of_estimates(self), *_misfits_of_loss(self)):
            if wrong:
                raise ValueError(message)

    def five_answers(self) -> dict[str, str]:
        """The row in words: question -> answer, in the order of the book."""
        return dict(zip(QUESTIONS, five_answers(self), strict=True))


def _check_values(row: Algorithm) -> None:
    """Each field by itself."""
    choices = {
        "reward": REWARDS,
        "overlong": OVERLONG,
        "advantage": ADVANTAGES,
        "surrogate": SURROGATES,
        "ratio_level": RATIO_LEVELS,
        "clip_range": CLIP_RANGES,
        "aggregation": AGGREGATIONS,
        "kl": KL_PLACES,
        "kl_estimator": KL_ESTIMATORS,
    }
    for field, allowed in choices.items():
        check_choice(field, getattr(row, field), allowed)
    for field in ("dynamic_sampling", "whiten", "value_pretraining", "kl_importance_weighted"):
        if not isinstance(getattr(row, field), bool):
            raise ValueError(f"{field} must be True or False; got {describe(getattr(row, field))}")
    check_ddof(row.ddof)
    fixed_clip_range(row.epsilon_low, row.epsilon_high)
    for field in ("eps", "batch_eps"):
        check_number(field, getattr(row, field), at_least=0)
    for field in ("gamma", "lam", "overlong_cache"):
        check_number(field, getattr(row, field), at_least=0, at_most=1)
    for field in ("beta", "value_coef", "entropy_coef", "nll_coef"):
        check_number(field, getattr(row, field), at_least=0, at_most=MAX_WEIGHT)
    for field in ("tau_positive", "tau_negative"):
        check_number(field, getattr(row, field), at_least=1e-6, at_most=1e6)
    if row.lam_critic is not None:
        check_number("lam_critic", row.lam_critic, at_least=0, at_most=1)
    if row.ratio_max is not None:
        check_number("ratio_max", row.ratio_max, at_least=1, at_most=MAX_WEIGHT)
    for field in ("length_alpha", "epsilon_value"):
        if getattr(row, field) is not None:
            check_number(field, getattr(row, field), above=0, at_most=MAX_WEIGHT)


def _misfits_of_estimates(row: Algorithm) -> Iterator[tuple[bool, str]]:
    """Choices about rewards and baselines that contradict each other: (do they, what is wrong)."""
    yield (
        row.beta > 0 and row.kl == "none",
        f'beta must be 0 when kl="none"; got {row.beta}',
    )
    yield (
        row.kl == "reward" and row.kl_estimator != "k1",
        f'kl_estimator must be k1 when kl="reward"; got {row.kl_estimator!r}',
    )
    yield (
        row.kl == "reward" and row.advantage in ("greedy", "decoupled", "beta_normalized"),
        f'kl must be none or loss when advantage="{row.advantage}", whose rewards are compared as '
        f"they are; got {row.kl!r}",
    )
    yield (
        row.advantage == "decoupled" and row.reward != "several",
        f'reward must be several when advantage="decoupled"; got {row.reward!r}',
    )
    yield (
        row.advantage == "decoupled" and (row.overlong == "penalty" or row.dynamic_sampling),
        'overlong="penalty" and dynamic_sampling need one reward; got advantage="decoupled"',
    )
    for field in (
        *("whiten", "value_pretraining", "value_coef"),
        *("epsilon_value", "length_alpha", "lam_critic"),
    ):
        value = getattr(row, field) if field != "value_coef" else row.value_coef or None
        yield (
            value is not None and value is not False and row.advantage != "gae",
            f'{field} is for advantage="gae", which has a critic; got {value} with '
            f"{row.advantage!r}",
        )


def _misfits_of_loss(row: Algorithm) -> Iterator[tuple[bool, str]]:
    """The same of ratios, clips and caps."""
    yield (
        row.surrogate == "gamma" and row.ratio_level != "sequence_sum",
        f'ratio_level must be sequence_sum when surrogate="gamma"; got {row.ratio_level!r}',
    )
    yield (
        row.clip_range == "dynamic" and row.surrogate not in USE_RANGE,
        f'clip_range must be fixed when surrogate="{row.surrogate}", which has no range; got '
        f"{row.clip_range!r}",
    )
    yield (
        row.clip_range == "dynamic" and row.ratio_level != "token",
        f'ratio_level must be token when clip_range="dynamic"; got {row.ratio_level!r}',
    )
    yield (
        row.ratio_max is not None and row.surrogate != "clip" and row.clip_range == "fixed",
        f'ratio_max is for surrogate="clip" or clip_range="dynamic"; got {row.ratio_max} with '
        f"{row.surrogate!r}",
    )
    yield (
        row.clip_range == "fixed" and (row.ratio_max or math.inf) < 1 + row.epsilon_high,
        f"ratio_max must be at least 1 + epsilon_high = {1 + row.epsilon_high:g}; got "
        f"{row.ratio_max}",
    )
