"""The same row in TRL: its config object, or the reason why TRL cannot express it.

With a task or with pairs, all that TRL's trainer needs but the model: see ``rlcore.trl_data``.

Written for TRL 1.16; ``pip install .[trl]`` brings it.  TRL is imported when ``to_trl`` is called,
never before.
"""

import math
import reprlib
import warnings
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlcore.algorithms import BNPO_TRL, Algorithm
from rlcore.objectives._checks import check_count, describe
from rlcore.preferences import Method, PreferenceMethod, RewardModelMethod, UnpairedMethod

if TYPE_CHECKING:
    from rlcore.tasks import PreferencePairs, Task
    from rlcore.trl_data import TrlTraining

GROUP_SIZE = 8  # TRL's num_generations where the caller gives none: no row says it
OVERLONG = "overlong penalty"
TRL_EPS = 1e-4  # what TRL adds to every std


class TrlDifference(UserWarning):
    """What TRL computes otherwise than the row, where that is a factor or needs another setting."""


@dataclass
class _Plan:
    """A row in TRL's words."""

    config: str  # module:class
    row: dict[str, Any] = field(default_factory=dict)  # what the row decides
    free: dict[str, Any] = field(default_factory=dict)  # what it leaves open, with a default
    gaps: list[str] = field(default_factory=list)  # why TRL cannot express it
    differences: list[str] = field(default_factory=list)


def to_trl(
    method: Algorithm | Method,
    *,
    task: "Task | None" = None,
    pairs: "PreferencePairs | None" = None,
    problems: int = 1000,
    **overrides: Any,
) -> Any:
    r"""The TRL config of a row of ``rlcore.algorithms`` or ``rlcore.preferences``.

    Returns a ``GRPOConfig``, ``RLOOConfig``, ``DPOConfig``, ``KTOConfig``, ``RewardConfig``, or a
    ``CPOConfig`` or ``ORPOConfig`` of ``trl.experimental``, in which every field that makes the
    objective is set explicitly, also where TRL's default would do.

    ``overrides``: any other field of that config, such as ``output_dir``, ``learning_rate`` or
    what a row leaves open: ``num_generations`` (8), ``temperature`` (1), ``num_iterations`` (1),
    ``max_completion_length`` (TRL's), which is also the constant of Dr. GRPO.  Without a GPU
    ``use_cpu`` is set.

    What TRL computes otherwise by a mere factor, or does elsewhere (a reward function, the first
    update only), is a warning of the category ``TrlDifference`` that names it.  The spelling of
    CISPO's cap is translated: TRL's ``epsilon_high`` is $1 + \epsilon_{high}$ there.

    ``task``: for a row that samples; then a ``TrlTraining`` comes back: the config, a data set of
    ``problems`` different prompts of the training split (by the config's ``seed``), and the task's
    verifier, or its several rewards, as reward functions; its ``build(model, tokenizer)`` is TRL's
    trainer.  The longest response is the task's ``max_new_tokens``, ``reward_weights`` are by name,
    and the overlong penalty is one of the reward functions.  A missing reward is None: TRL leaves
    it out of the group's statistics as the row does, but not out of what the loss is divided by:
    TRL's loss is the row's multiplied by the share of responses (or tokens) that have a reward.

    ``pairs``: for a row over preference pairs; likewise, with the pairs as data set, and ``task``
    only to say that its tokens are words.

    ValueError: TRL has no such structure, with what and why (DCPO, VAPO, SCST, PPO, the mean of a
    batch, BNPO's Beta, dynamic sampling, ...); a field that the row decides is overridden; TRL's
    config does not know a field, or does not take its value.  ImportError: TRL is not installed.
    """
    plan = _plan(method, overrides)
    feed = task is not None or pairs is not None
    if feed:
        overrides = _fed(method, plan, task, pairs, overrides)
    if plan.gaps:
        raise ValueError(f"{method.name} cannot be expressed in TRL: {'; '.join(plan.gaps)}")
    config = _config(plan.config)
    known = {one.name for one in fields(config)}
    for name in overrides:
        if name in plan.row:
            raise ValueError(
                f"{name} is the row's ({plan.row[name]!r}): change the row with "
                f"dataclasses.replace; got {describe(overrides[name])}"
            )
    for name in (*overrides, *plan.row, *plan.free):
        if name not in known:
            raise ValueError(f"{config.__name__} of this TRL ({_version()}) has no field {name!r}")
    if "num_generations" in overrides:  # TRL compares it with a number before it looks at it
        check_count("num_generations", overrides["num_generations"])
    for difference in plan.differences:
        warnings.warn(f"{method.name}: {difference}", TrlDifference, stacklevel=2)
    try:
        made = config(**{**_machine(), **plan.row, **plan.free, **overrides})
    except TypeError as error:
        given = ", ".join(f"{name}={reprlib.repr(overrides[name])}" for name in sorted(overrides))
        raise ValueError(
            f"{config.__name__} of this TRL ({_version()}) does not take {given}: {error}"
        ) from error
    return _training(method, plan, made, task, pairs, problems) if feed else made


def _fed(
    method: Any, plan: _Plan, task: Any, pairs: Any, overrides: dict[str, Any]
) -> dict[str, Any]:
    """The overrides with what a task decides; ValueError where row, task and pairs do not fit."""
    from rlcore.tasks import PreferencePairs, Task
    from rlcore.trl_data import weights_in_order

    for name, value, kind in (("task", task, Task), ("pairs", pairs, PreferencePairs)):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}; got {describe(value)}")
    if not isinstance(method, Algorithm):
        if pairs is None:
            raise ValueError(f"pairs: {method.name} learns from preference pairs; got none")
        return overrides
    if task is None or pairs is not None:
        raise ValueError(f"pairs: {method.name} samples its responses, it takes a task alone")
    given = overrides.get("reward_weights")
    if method.reward == "several":
        if task.rewards is None:
            raise ValueError(f"task: {task.name!r} has one reward, {method.name} compares several")
        if method.overlong == "penalty":
            plan.gaps.append("overlong penalty: TRL would weigh it as one of the several rewards")
    elif method.reward != "verifier":
        plan.gaps.append(
            f'reward="{method.reward}": TRL scores a response without its terminal token, at which '
            "our reward model is read"
        )
    elif given is not None:
        raise ValueError(f"reward_weights: {method.name} has one reward; got {describe(given)}")
    plan.differences = [d for d in plan.differences if not d.startswith(OVERLONG)]
    more = {"max_completion_length": task.max_new_tokens, **overrides}
    return {**more, "reward_weights": weights_in_order(task, given)} if given else more


def _training(
    method: Any, plan: _Plan, made: Any, task: Any, pairs: Any, problems: int
) -> "TrlTraining":
    """A config and what it is to be trained on."""
    from rlcore import trl_data

    rewards: list[trl_data.Reward] = []
    if isinstance(method, Algorithm):
        check_count("problems", problems)
        data = trl_data.prompt_dataset(task, problems, made.seed)
        several = method.reward == "several"
        rewards = trl_data.several_rewards(task) if several else [trl_data.verifier(task)]
        if method.overlong == "penalty":
            longest = made.max_completion_length
            cache = round(method.overlong_cache * longest)
            rewards = trl_data.with_overlong_penalty(rewards[0], longest, cache)
    else:
        data = trl_data.pair_dataset(
            pairs,
            between=" " if task is not None and task.words else "",
            unpaired=isinstance(method, UnpairedMethod),
            margins=isinstance(method, RewardModelMethod),
        )
    trainer = _config(plan.config.replace("Config", "Trainer"))
    return trl_data.TrlTraining(trainer, made, data, rewards)


def _plan(method: Any, overrides: dict[str, Any]) -> _Plan:
    if isinstance(method, Algorithm):
        if method.advantage == "leave_one_out":
            return _rloo(method)
        return _grpo(method, overrides)
    if isinstance(method, PreferenceMethod):
        return _preference(method)
    if isinstance(method, UnpairedMethod):
        return _kto(method)
    if isinstance(method, RewardModelMethod):
        return _reward_model(method)
    raise ValueError(
        f"method must be a row of rlcore.algorithms or rlcore.preferences; got {describe(method)}"
    )


# --- what is sampled while training ---------------------------------------------------------------

# aggregation -> loss_type, for the clipped surrogate
CLIPPED = {
    "sequence_mean": "grpo",
    "token_mean": "dapo",
    "constant": "dr_grpo",
    "sequence_sum": "luspo",
}
# surrogate -> its only aggregation in TRL, and loss_type
OTHERS = {
    "capped": ("token_mean", "cispo"),
    "soft": ("sequence_mean", "sapo"),
    "gamma": ("token_mean", "vespo"),
}
SCALES = {
    "group_mean": "none",
    "group_zscore": "group",
    "batch_zscore": "batch",
    "decoupled": "group",  # not looked at
}
NO_BASELINE = {
    "batch_mean": "no trainer takes the mean of the batch as baseline",
    "greedy": "no trainer takes the greedy answer as baseline",
    "gae": "it has no trainer with a critic (PPOTrainer was removed in 1.13)",
    "smoothed": "no trainer remembers the rewards of earlier visits to a prompt",
    "beta_normalized": 'no trainer normalises by a Beta density (its loss_type="bnpo" is a token '
    "mean)",
}


def _sampled() -> dict[str, Any]:
    """What the online trainers share: responses of the whole distribution, dropout off."""
    return {
        "num_generations": GROUP_SIZE,
        "num_iterations": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "disable_dropout": True,
    }


def _grpo(row: Algorithm, overrides: dict[str, Any]) -> _Plan:
    several = row.advantage == "decoupled"
    plan = _Plan("trl:GRPOConfig", free={**_sampled(), "reward_weights": None})
    plan.gaps = [*_common_gaps(row), *_grpo_gaps(row)]
    if plan.gaps:
        return plan
    capped = row.surrogate == "capped"
    plan.row = {
        "loss_type": _loss_type(row),
        "beta": row.beta if row.kl == "loss" else 0.0,
        "use_bias_correction_kl": row.kl_importance_weighted,
        "epsilon": row.epsilon_low,
        "epsilon_high": 1 + row.epsilon_high if capped else row.epsilon_high,
        "delta": row.ratio_max,
        "importance_sampling_level": "sequence" if "sequence" in _level(row) else "token",
        "scale_rewards": SCALES[row.advantage],
        "multi_objective_aggregation": "normalize_then_sum" if several else "sum_then_normalize",
        "mask_truncated_completions": row.overlong == "filter",
        "entropy_coef": row.entropy_coef,
        "use_adaptive_entropy": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "sapo_temperature_pos": row.tau_positive,
        "sapo_temperature_neg": row.tau_negative,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    }
    plan.differences = [*_scale(row, overrides), *_elsewhere(row), *_divisors(row)]
    return plan


def _level(row: Algorithm) -> str:
    """VESPO computes the ratio of the response by itself, whatever the level."""
    return "token" if row.surrogate == "gamma" else row.ratio_level


def _loss_type(row: Algorithm) -> str:
    if row.surrogate != "clip":
        return OTHERS[row.surrogate][1]
    if row.name == BNPO_TRL.name:  # the same mean; what differs is how TRL splits a step
        return "bnpo"
    return CLIPPED[row.aggregation]


def _common_gaps(row: Algorithm) -> list[str]:
    """Structures that no online trainer of TRL has."""
    gaps = []
    if row.advantage in NO_BASELINE:
        gaps.append(f'advantage="{row.advantage}": {NO_BASELINE[row.advantage]}')
    if row.clip_range == "dynamic":
        gaps.append('clip_range="dynamic": its clip range is the same for all tokens')
    if row.dynamic_sampling:
        gaps.append(
            "dynamic_sampling: it samples once per step; "
            "dataclasses.replace(row, dynamic_sampling=False) can be expressed"
        )
    if row.nll_coef > 0:
        gaps.append("nll_coef: its losses have no likelihood term on correct responses")
    return gaps


def _grpo_gaps(row: Algorithm) -> list[str]:
    gaps = []
    if row.surrogate == "reinforce":
        gaps.append(
            'surrogate="reinforce": GRPOTrainer always has a ratio; surrogate="clip" has the same '
            "gradient in the first update of a batch"
        )
    elif row.surrogate == "clip":
        if row.aggregation not in CLIPPED:
            gaps.append(
                f'aggregation="{row.aggregation}": no loss_type sums over responses; '
                '"sequence_mean" is the same divided by their number'
            )
        if row.ratio_level == "sequence_sum":
            gaps.append(
                'ratio_level="sequence_sum": only RLOOTrainer clips the ratio of a whole response'
            )
    else:
        aggregation, loss_type = OTHERS[row.surrogate]
        if row.aggregation != aggregation:
            gaps.append(
                f'aggregation="{row.aggregation}": loss_type="{loss_type}" has "{aggregation}"'
            )
        if row.surrogate == "capped" and row.epsilon_low < 1:
            gaps.append(
                'epsilon_low: loss_type="cispo" has no lower end of the weight; epsilon_low=1 has '
                f"none either; got {row.epsilon_low:g}"
            )
        if row.surrogate != "gamma" and row.ratio_level == "sequence_sum":
            gaps.append('ratio_level="sequence_sum": GRPOTrainer takes the root of that ratio')
    if row.kl == "reward" and row.beta > 0:
        gaps.append('kl="reward": GRPOTrainer has its KL term in the loss; RLOOTrainer has it')
    if row.kl == "loss" and row.beta > 0:
        if row.kl_estimator != "k3":
            gaps.append(f'kl_estimator="{row.kl_estimator}": GRPOTrainer has k3')
        if row.kl_importance_weighted and row.ratio_level in ("sequence_token", "sequence_sum"):
            gaps.append(
                f'kl_importance_weighted with ratio_level="{row.ratio_level}": GRPOTrainer weights '
                "the KL term by the ratio of a token or of |y|-th root"
            )
    return gaps


def _scale(row: Algorithm, overrides: dict[str, Any]) -> list[str]:
    """What TRL divides the advantages by, where the row does not: the exact factor."""
    if row.advantage == "group_mean":
        return []
    kind, eps = ("population", row.eps) if row.ddof == 0 else ("sample", row.eps)
    if row.advantage == "decoupled":
        if (row.ddof, row.eps, row.batch_eps) == (1, TRL_EPS, TRL_EPS):
            return []
        return [
            f"advantages: TRL divides each reward by its group's sample std + {TRL_EPS:g}, and "
            f"their sum by the batch's sample std + {TRL_EPS:g}; the row by the {kind} std + "
            f"{eps:g} and the {kind} std + {row.batch_eps:g}"
        ]
    if (row.ddof, row.eps) == (1, TRL_EPS):
        return []
    factor = f"(s + {eps:g}) / (s + {TRL_EPS:g})" if eps else f"s / (s + {TRL_EPS:g})"
    if row.ddof == 0:
        size = check_count("num_generations", overrides.get("num_generations", GROUP_SIZE))
        if row.advantage == "batch_zscore":
            many = "sqrt((N - 1)/N), N the rewards of the generation batch"
        else:
            many = f"{math.sqrt((size - 1) / size):.6g} = sqrt((G - 1)/G) for G = {size}"
        factor = f"{many}, and by s / (s + {TRL_EPS:g})"
        if eps:
            factor = f"(k s + {eps:g}) / (s + {TRL_EPS:g}) with k = {many}"
    whose = "the batch" if row.advantage == "batch_zscore" else "its group"
    others = " (its KL term is not)" if row.kl == "loss" and row.beta > 0 else ""
    return [
        f"advantages: TRL divides by the sample std of {whose} + {TRL_EPS:g}, the row by the "
        f"{kind} std + {eps:g}: TRL's are the row's multiplied by {factor}, s the sample "
        f"std{others}"
    ]


def _elsewhere(row: Algorithm) -> list[str]:
    """What TRL has, though not in its config."""
    if row.overlong != "penalty":
        return []
    return [
        f"{OVERLONG}: not a field; add trl.rewards.get_soft_overlong_punishment("
        "max_completion_length, soft_punish_cache) to reward_funcs, with soft_punish_cache = "
        f"{row.overlong_cache:g} * max_completion_length; TRL sums the rewards, as the row does"
    ]


def _divisors(row: Algorithm) -> list[str]:
    """What TRL counts otherwise."""
    found = []
    if row.overlong == "filter" and row.aggregation != "token_mean":
        found.append(
            "truncated responses: TRL leaves them out of the loss and still divides by all "
            "responses: the row's loss multiplied by the share of responses that are left"
        )
    if row.entropy_coef > 0:
        found.append(
            "entropy: TRL takes its mean over each micro-batch, the row over the tokens of the "
            "step: alike with one micro-batch per step"
        )
    return found


def _rloo(row: Algorithm) -> _Plan:
    """RLOOTrainer: min(W A, clip(W) A) with W the ratio of the whole response."""
    plan = _Plan("trl:RLOOConfig", free={**_sampled(), "reward_weights": None})
    plan.gaps = _common_gaps(row)
    plain = (row.surrogate, row.aggregation) == ("reinforce", "sequence_sum")
    own = (row.surrogate, row.ratio_level, row.aggregation)
    if not plain and own != ("clip", "sequence_sum", "sequence_mean"):
        plan.gaps.append(
            'advantage="leave_one_out": RLOOTrainer has surrogate="clip" on ratio_level='
            '"sequence_sum", aggregated by "sequence_mean", or, in the first update of a batch, '
            f'"reinforce" and "sequence_sum"; got {row.surrogate!r}, {row.ratio_level!r}, '
            f"{row.aggregation!r}"
        )
    if row.ratio_max is not None:
        plan.gaps.append("ratio_max: RLOOTrainer has no such cap")
    if row.kl == "loss" and row.beta > 0:
        plan.gaps.append('kl="loss": RLOOTrainer has its KL term in the reward')
    if row.entropy_coef > 0:
        plan.gaps.append("entropy_coef: RLOOTrainer has no entropy term")
    plan.row = {
        "beta": row.beta if row.kl == "reward" else 0.0,
        "epsilon": row.epsilon_low,
        "epsilon_high": row.epsilon_high,
        "normalize_advantages": False,
        "reward_clip_range": None,
        "mask_truncated_completions": row.overlong == "filter",
    }
    plan.differences = [*_elsewhere(row), *_divisors(row)]
    if plain:
        plan.differences.append(
            "ratio: TRL multiplies by the ratio of the whole response and clips it to "
            f"[{1 - row.epsilon_low:g}, {1 + row.epsilon_high:g}], the row has neither: the same "
            "gradient while num_iterations=1 and steps_per_generation = "
            "gradient_accumulation_steps, when that ratio is 1; the value of the loss differs"
        )
    return plan


# --- preferences --------------------------------------------------------------------------------

# (score, link, smoothed) -> DPOTrainer's loss_type
DPO_LOSSES = {
    ("log_ratio_sum", "sigmoid", None): "sigmoid",
    ("log_ratio_sum", "sigmoid", "robust"): "robust",
    ("log_ratio_sum", "hinge", None): "hinge",
    ("log_ratio_mean", "square", None): "ipo",
    ("log_ratio_mean", "sigmoid", None): "sigmoid_norm",
}


def _preference(row: PreferenceMethod) -> _Plan:
    if row.score == "logprob_mean":
        return _simpo(row)
    if row.score == "log_odds":
        return _orpo(row)
    return _dpo(row)


def _dpo(row: PreferenceMethod) -> _Plan:
    plan = _Plan("trl:DPOConfig", free={"disable_dropout": True})
    smoothed = row.smoothing if row.label_smoothing > 0 else None
    loss_type = DPO_LOSSES.get((row.score, row.link, smoothed))
    if smoothed == "conservative":
        plan.gaps.append(
            'smoothing="conservative": cDPO was removed in 0.29, and since then loss_type '
            '"sigmoid" ignores label_smoothing without a word; smoothing="robust" can be expressed'
        )
    elif (row.score, row.link) == ("log_ratio_sum", "square"):
        plan.gaps.append(
            'link="square" on score="log_ratio_sum": its "ipo" averages the log-ratio over the '
            'tokens; score="log_ratio_mean" can be expressed'
        )
    elif loss_type is None:
        plan.gaps.append(
            f"no loss_type has score={row.score!r}, link={row.link!r} and "
            f"label_smoothing={row.label_smoothing:g}"
        )
    if row.gamma > 0:
        plan.gaps.append("gamma: DPOTrainer has no margin")
    if row.nll_coef > 0:
        plan.gaps.append("nll_coef: the likelihood term of DPOTrainer is not the row's token mean")
    plan.row = {
        "loss_type": [loss_type],
        "loss_weights": [row.weight],
        "beta": row.beta,
        "label_smoothing": row.label_smoothing,
        "f_divergence_type": "reverse_kl",
        "ld_alpha": None,
        "use_weighting": False,
    }
    return plan


def _simpo(row: PreferenceMethod) -> _Plan:
    plan = _Plan("trl.experimental.cpo:CPOConfig", free={"disable_dropout": True})
    if row.link != "sigmoid":
        plan.gaps.append(f"link={row.link!r}: CPOTrainer has this score with the sigmoid only")
    if row.label_smoothing > 0:
        plan.gaps.append(
            "label_smoothing: the flipped term of CPOTrainer turns the margin round too"
        )
    if row.weight != 1:
        plan.gaps.append("weight: CPOTrainer has none")
    if row.nll_coef > 0:
        plan.gaps.append("nll_coef: the likelihood term of CPOTrainer is another: cpo_alpha")
    plan.row = {
        "loss_type": "simpo",
        "beta": row.beta,
        "simpo_gamma": row.gamma,
        "cpo_alpha": 0.0,
        "alpha": 0.0,
        "label_smoothing": 0.0,
    }
    return plan


def _orpo(row: PreferenceMethod) -> _Plan:
    plan = _Plan("trl.experimental.orpo:ORPOConfig", free={"disable_dropout": True})
    wanted = {"link": "sigmoid", "beta": 1.0, "gamma": 0.0, "label_smoothing": 0.0, "nll_coef": 1.0}
    for name, value in wanted.items():
        if getattr(row, name) != value:
            plan.gaps.append(f"{name}={getattr(row, name)!r}: ORPOTrainer has {value!r}")
    plan.row = {"beta": row.weight}  # TRL's name for lambda
    plan.differences = [
        "likelihood: TRL's covers the prompt too, the row's the chosen response alone"
    ]
    return plan


def _kto(row: UnpairedMethod) -> _Plan:
    decided = {
        "loss_type": "kto",
        "beta": row.beta,
        "desirable_weight": row.weight_desirable,
        "undesirable_weight": row.weight_undesirable,
    }
    return _Plan("trl:KTOConfig", row=decided, free={"disable_dropout": True})


def _reward_model(row: RewardModelMethod) -> _Plan:
    decided = {"center_rewards_coefficient": row.center_coef or None}
    return _Plan("trl:RewardConfig", row=decided, free={"disable_dropout": True})


# --- the installed TRL ----------------------------------------------------------------------------


def _config(place: str) -> Any:
    """The config class; ImportError that says how to get TRL where it is not installed."""
    module, _, name = place.partition(":")
    try:
        import_module("trl")
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise ImportError(
            "to_trl needs TRL, which is not installed: pip install '.[trl]' brings it"
        ) from None
    return getattr(import_module(module), name)


def _version() -> str:
    return str(import_module("trl").__version__)


def _machine() -> dict[str, Any]:
    """TRL's bf16 default asks for a GPU, or for use_cpu."""
    import torch

    return {} if torch.accelerator.is_available() else {"use_cpu": True}
