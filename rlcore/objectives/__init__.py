"""The objectives: pure functions, tensors in, tensors out.

Every online algorithm answers the same five questions; each has its module:

1. What was the response worth?         rewards
2. Worth more than what?                advantages
3. How far may one token move?          ratios
4. How much does each token count?      aggregation
5. How far from where we started?       kl

``policy`` strings the answers together into one loss, ``likelihood`` is supervised fine-tuning and
``logprobs`` turns a model's logits into what all of them need.  Nothing here knows a model, a
tokenizer or a file, and nothing is random.

Notation: prompt x, response y with tokens y_t, policy pi_theta, sampling policy pi_old, reference
pi_ref, reward R^(g) and advantage A^(g) of the g-th response of a group of G, ratio rho_{g,t}.
Shapes: B responses, T token slots, V tokens in the vocabulary, P prompts.
Everywhere: arithmetic in float32 or wider; slots outside the mask may hold anything, NaN and inf
too; every loss is to be minimised; bad input raises ValueError.
"""

from rlcore.objectives.advantages import (
    EqualGroups,
    batch_mean_advantages,
    equal_groups,
    group_advantages,
    largest_group_advantage,
    leave_one_out_advantages,
    probability_all_equal,
    self_critical_advantages,
)
from rlcore.objectives.aggregation import AGGREGATIONS, aggregate
from rlcore.objectives.beta_normalization import beta_normalized_advantages
from rlcore.objectives.critic import (
    CriticEstimates,
    generalized_advantages,
    length_adaptive_lam,
    value_loss,
    whiten,
)
from rlcore.objectives.decoupled import decoupled_advantages
from rlcore.objectives.filtering import Refill, informative_rows, overlong_filter, refill
from rlcore.objectives.kl import KL_ESTIMATORS, kl_per_token
from rlcore.objectives.kto import kto_loss, kto_weights
from rlcore.objectives.likelihood import sft_loss
from rlcore.objectives.logprobs import entropy, token_logprobs
from rlcore.objectives.policy import policy_loss
from rlcore.objectives.preference import LINKS, SCORES, SMOOTHINGS, preference_loss
from rlcore.objectives.ratios import (
    CLIP_RANGES,
    RATIO_LEVELS,
    dynamic_clip_range,
    fixed_clip_range,
    importance_ratio,
)
from rlcore.objectives.reward_model import (
    last_token_values,
    ranking_loss,
    reward_model_loss,
)
from rlcore.objectives.rewards import (
    conditioned_rewards,
    kl_penalized_rewards,
    kl_shaped_rewards,
    overlong_penalty,
)
from rlcore.objectives.rlhf import (
    OptimalPolicy,
    implied_rewards,
    optimal_policy,
    regularized_value,
)
from rlcore.objectives.smoothing import RewardHistory, SmoothedAdvantages, smoothed_advantages
from rlcore.objectives.surrogates import SURROGATES

__all__ = [
    "AGGREGATIONS",
    "CLIP_RANGES",
    "KL_ESTIMATORS",
    "LINKS",
    "RATIO_LEVELS",
    "SCORES",
    "SMOOTHINGS",
    "SURROGATES",
    "CriticEstimates",
    "EqualGroups",
    "OptimalPolicy",
    "Refill",
    "RewardHistory",
    "SmoothedAdvantages",
    "aggregate",
    "batch_mean_advantages",
    "beta_normalized_advantages",
    "conditioned_rewards",
    "decoupled_advantages",
    "dynamic_clip_range",
    "entropy",
    "equal_groups",
    "fixed_clip_range",
    "generalized_advantages",
    "group_advantages",
    "implied_rewards",
    "importance_ratio",
    "informative_rows",
    "kl_penalized_rewards",
    "kl_per_token",
    "kl_shaped_rewards",
    "kto_loss",
    "kto_weights",
    "largest_group_advantage",
    "last_token_values",
    "leave_one_out_advantages",
    "length_adaptive_lam",
    "optimal_policy",
    "overlong_filter",
    "overlong_penalty",
    "policy_loss",
    "preference_loss",
    "probability_all_equal",
    "ranking_loss",
    "refill",
    "regularized_value",
    "reward_model_loss",
    "self_critical_advantages",
    "sft_loss",
    "smoothed_advantages",
    "token_logprobs",
    "value_loss",
    "whiten",
]
