"""The five questions of the book, and a row's answers to them in words."""

from typing import TYPE_CHECKING

from rlcore.objectives import fixed_clip_range

if TYPE_CHECKING:
    from rlcore.choices import Algorithm

QUESTIONS = (
    "What was the response worth?",
    "Worth more than what?",
    "How far may one token move?",
    "How much does each token count?",
    "How far from where we started?",
)
RATIOS = {
    "token": "ratio per token",
    "sequence": "ratio per response, its |y|-th root",
    "sequence_sum": "ratio per response",
    "sequence_token": "ratio per response, its |y|-th root, with each token's own gradient",
}


def five_answers(row: "Algorithm") -> tuple[str, ...]:
    """One answer per question, in their order."""
    return (_worth(row), _than_what(row), _how_far(row), _counts(row), _from_start(row))


def _worth(row: "Algorithm") -> str:
    answer = {
        "verifier": "verifier",
        "reward_model": "reward model",
        "several": "several rewards, "
        + ("kept apart" if row.advantage == "decoupled" else "added up"),
    }[row.reward]
    if row.overlong == "penalty":
        answer += (
            f", minus up to 1 over the last {row.overlong_cache:.0%} of the longest length allowed"
        )
    if row.kl == "reward" and row.beta > 0:
        where = "at each token" if row.advantage == "gae" else "summed over the response"
        answer += f", minus {row.beta:g} × k1 {where}"
    return answer


def _than_what(row: "Algorithm") -> str:
    std, batch_std = _std(row, row.eps), _std(row, row.batch_eps)
    answer = {
        "batch_mean": "the mean of the batch",
        "greedy": "the greedy answer to the same prompt",
        "leave_one_out": "the mean of the other responses of the group",
        "gae": _critic(row),
        "group_mean": "the mean of the group",
        "group_zscore": f"the mean of the group, in units of its {std}",
        "batch_zscore": f"the mean of the group, in units of the batch's {std}",
        "smoothed": "the mean of the group, and that of all visits to the prompt, each in units of "
        f"its {std}; the smaller of two blends",
        "decoupled": f"for each reward, the mean of the group in units of its {std}; their "
        f"weighted sum in units of the batch's {batch_std}",
        "beta_normalized": "the mean of the group, in units of a Beta density at it, fitted to the "
        "means of all groups",
    }[row.advantage]
    if row.dynamic_sampling:
        answer += "; groups that are all equal are drawn anew"
    return answer


def _std(row: "Algorithm", eps: float) -> str:
    kind = "population" if row.ddof == 0 else "sample"
    return f"{kind} std{f' + {eps:g}' if eps else ''}"


def _critic(row: "Algorithm") -> str:
    lam = f"{row.lam:g}"
    if row.length_alpha is not None:
        lam = f"1 - 1/({row.length_alpha:g} |y|)"
    answer = f"a critic, by GAE with γ = {row.gamma:g}, λ = {lam}"
    if row.lam_critic is not None:
        answer += f" (λ = {row.lam_critic:g} for the critic's targets)"
    if row.whiten:
        answer += ", whitened over the batch"
    if row.value_pretraining:
        answer += "; first fitted to Monte-Carlo returns of the start"
    if row.value_coef > 0:
        clip = "" if row.epsilon_value is None else f", clipped to ±{row.epsilon_value:g}"
        answer += f"; {row.value_coef:g} × value loss{clip}"
    return answer


def _how_far(row: "Algorithm") -> str:
    answer = _surrogate(row)
    if row.entropy_coef > 0:
        answer += f"; plus {row.entropy_coef:g} × entropy"
    return answer


def _surrogate(row: "Algorithm") -> str:
    ratio = RATIOS[row.ratio_level]
    if row.surrogate == "reinforce":
        return "no ratio, no clip"
    if row.surrogate == "soft":
        return (
            f"{ratio}, through a soft gate of temperature {row.tau_positive:g} "
            f"({row.tau_negative:g} where A ≤ 0)"
        )
    if row.surrogate == "gamma":
        return f"{ratio}, through a Gamma curve, as a weight of log π without gradient"
    low, high = fixed_clip_range(row.epsilon_low, row.epsilon_high)
    verb = "held" if row.surrogate == "capped" else "clipped"
    if row.clip_range == "dynamic":
        answer = (
            f"{ratio}, {verb} where its probability would move by more than "
            f"{row.epsilon_low:g} down or {row.epsilon_high:g} up"
        )
    elif row.surrogate == "capped" and low == 0:
        answer = f"{ratio}, capped at {high:g}"
    else:
        answer = f"{ratio}, {verb} {'in' if verb == 'held' else 'to'} [{low:g}, {high:g}]"
    if row.ratio_max is not None:
        answer += f", never beyond {row.ratio_max:g}"
    return f"{answer}, as a weight of log π without gradient" if verb == "held" else answer


def _counts(row: "Algorithm") -> str:
    answer = {
        "sequence_mean": "mean over the response, then over responses",
        "token_mean": "mean over all tokens",
        "constant": "sum over the response, divided by a constant, then mean over responses",
        "sequence_sum": "sum over the response, then mean over responses",
        "only_token_mean": "mean over the response, then sum over responses",
    }[row.aggregation]
    if row.overlong == "filter":
        answer += "; truncated responses not at all"
    if row.nll_coef > 0:
        answer += f"; plus {row.nll_coef:g} × likelihood of the correct responses"
    return answer


def _from_start(row: "Algorithm") -> str:
    if row.kl == "none" or row.beta == 0:
        return "no limit"
    ratio = "ratio × " if row.kl_importance_weighted and row.kl == "loss" else ""
    return f"{ratio}{row.kl_estimator} in the {row.kl}, beta = {row.beta:g}"
