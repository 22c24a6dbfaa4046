r"""The 74 proved vectors of tests/data/parity_vectors.json, each computed with rlcore.

A vector states inputs, the values to expect (float64, from a calculation of its own in numpy), the
tolerance to hold, and most of them what TRL's, verl's or a paper's own code gave for the same
inputs.  ``VECTORS`` says how each is computed with rlcore; ``comparison`` puts the numbers side by
side.  The tests use this file, and so does the book's page of conventions:

    from tests.parity.vectors import VECTORS, comparison      (with the project's root on the path)
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms import DR_GRPO, REINFORCE, RLOO, compute_advantages, compute_loss
from rlcore.objectives import (
    beta_normalized_advantages,
    conditioned_rewards,
    decoupled_advantages,
    dynamic_clip_range,
    entropy,
    generalized_advantages,
    group_advantages,
    implied_rewards,
    importance_ratio,
    informative_rows,
    kl_penalized_rewards,
    kl_per_token,
    kl_shaped_rewards,
    kto_loss,
    largest_group_advantage,
    leave_one_out_advantages,
    length_adaptive_lam,
    optimal_policy,
    overlong_filter,
    overlong_penalty,
    policy_loss,
    preference_loss,
    ranking_loss,
    regularized_value,
    reward_model_loss,
    self_critical_advantages,
    sft_loss,
    smoothed_advantages,
    token_logprobs,
    value_loss,
    whiten,
)
from rlcore.objectives.surrogates import gamma_weight

FILE = Path(__file__).parents[1] / "data" / "parity_vectors.json"
STATED: dict[str, dict[str, Any]] = {
    vector["name"]: vector for vector in json.loads(FILE.read_text("utf-8"))["vectors"]
}
HOW = {
    "seq_mean_token_mean": "sequence_mean",
    "token_mean": "token_mean",
    "const": "constant",
    "seq_mean_token_sum": "sequence_sum",
}

Make = Callable[[Any], Tensor]  # numbers -> a leaf tensor of the dtype under test
Results = dict[str, Tensor]  # key of the vector's `expected` ("" if that is no dict) -> our value
Check = Callable[[dict, Make], Results]


def prompts(rewards: Tensor, group_size: int) -> Tensor:
    return torch.arange(len(rewards)) // group_size


def mask_of(lengths: list[float], slots: int) -> Tensor:
    return torch.arange(slots) < torch.tensor(lengths)[:, None]


# --- rewards and advantages without a critic ----------------------------------------------------


def z_score(inputs: dict, make: Make, **arguments: Any) -> Results:
    rewards = make(inputs["rewards"])
    return {"": group_advantages(rewards, prompts(rewards, inputs["G"]), **arguments)}


def z_score_as_stated(inputs: dict, make: Make) -> Results:
    return z_score(inputs, make, ddof=inputs["ddof"], eps=inputs["eps"])


def z_score_of_batch(inputs: dict, make: Make) -> Results:
    return z_score(inputs, make, scale="batch", ddof=inputs["ddof"], eps=inputs["eps"])


def zero_std(inputs: dict, make: Make) -> Results:
    return z_score(inputs, make, ddof=1, eps=inputs["eps"])


def mean_only(inputs: dict, make: Make) -> Results:
    rewards = make(inputs["rewards"])
    advantages = compute_advantages(DR_GRPO, rewards, prompts(rewards, inputs["G"])).advantages
    return {"": advantages}


def leave_one_out(inputs: dict, make: Make) -> Results:
    rewards = make(inputs["rewards"])
    return {"": leave_one_out_advantages(rewards, prompts(rewards, inputs["G"]))}


def leave_one_out_with_kl(inputs: dict, make: Make) -> Results:
    rewards, mask = make(inputs["rewards"]), torch.tensor(inputs["mask"])
    old, ref = make(inputs["old_logp"]), make(inputs["ref_logp"])
    estimates = compute_advantages(
        replace(RLOO, beta=inputs["beta"]),
        rewards,
        prompts(rewards, inputs["G"]),
        old_logprobs=old,
        ref_logprobs=ref,
        response_mask=mask,
    )
    return {
        "kl_seq_k1": kl_per_token(old, ref, mask, estimator="k1").sum(dim=1),
        "adv": estimates.advantages,
    }


def bound(inputs: dict, make: Make) -> Results:
    results = {}
    for size in inputs["G"]:
        one_hot = make([1.0] + [0.0] * (size - 1))
        for ddof, kind, formula in ((0, "population", "sqrt(G-1)"), (1, "sample", "(G-1)/sqrt(G)")):
            best = group_advantages(one_hot, torch.zeros(size, dtype=torch.int64), ddof=ddof).max()
            results[f"{size}/max_adv_{kind}_std"] = best
            largest = torch.tensor(largest_group_advantage(size, ddof=ddof), dtype=torch.float64)
            results[f"{size}/{formula}"] = largest
    return results


def soft_overlong(inputs: dict, make: Make) -> Results:
    penalty = overlong_penalty(
        torch.tensor(inputs["lengths"]),
        max_length=inputs["L_max"],
        cache_length=inputs["L_cache"],
    )
    return {"": penalty}


def dynamic_sampling(inputs: dict, make: Make) -> Results:
    rewards = make(inputs["is_correct"])
    groups = torch.arange(len(rewards)).repeat_interleave(rewards.shape[1])
    return {"": informative_rows(rewards.flatten(), groups).view(rewards.shape)[:, 0]}


def beta_normalized(inputs: dict, make: Make) -> Results:
    """The density's parameters are read off its values 1 / weight at the prompts' success rates:
    log f(p) = (alpha - 1) log p + (beta - 1) log (1 - p) + constant, at rates p, 1/2 and 1 - p."""
    rewards = make(inputs["rewards"])
    groups = prompts(rewards, inputs["G"])
    advantages = beta_normalized_advantages(rewards, groups)
    above = group_advantages(rewards, groups, scale="none")
    density = (above / advantages).view(-1, inputs["G"])[:, 0].log()
    rate = rewards.double().view(-1, inputs["G"]).mean(dim=1)
    low, middle, high = rate.log()
    apart = (density[2] - density[0]) / (high - low)
    together = (2 * density[1] - density[0] - density[2]) / (2 * middle - low - high)
    return {
        "alpha": 1 + (together + apart) / 2,
        "beta": 1 + (together - apart) / 2,
        "adv": advantages,
    }


def by_reward(inputs: dict, make: Make) -> Results:
    """GDPO: rewards (B, n), first normalised one by one."""
    rewards = make(inputs["rewards"])
    groups = prompts(rewards, inputs["G"])
    choices: dict[str, Any] = {
        "ddof": inputs.get("ddof", 1),
        "eps": inputs.get("eps", 1e-4),
        "weights": make(inputs["weights"]) if "weights" in inputs else None,
    }
    return {
        "A_k": torch.stack(
            [
                group_advantages(each, groups, ddof=choices["ddof"], eps=choices["eps"])
                for each in rewards.unbind(dim=1)
            ],
            dim=1,
        ),
        "A_sum": decoupled_advantages(rewards, groups, scale_batch=False, **choices),
        "A_hat": decoupled_advantages(rewards, groups, batch_eps=choices["eps"], **choices),
    }


def collapse(inputs: dict, make: Make) -> Results:
    results, total = by_reward(inputs, make), make(inputs["rewards"]).sum(dim=1)
    groups = prompts(total, inputs["G"])
    return {
        "grpo_sum_then_normalize": group_advantages(total, groups, ddof=1, eps=1e-4),
        "gdpo_A_sum": results["A_sum"],
        "gdpo_normalize_then_sum": results["A_hat"],
    }


def figure_2(inputs: dict, make: Make) -> Results:
    """Each case is one group of two responses with two rewards."""
    return {
        case: decoupled_advantages(
            make(inputs[case]),
            torch.zeros(2, dtype=torch.int64),
            ddof=inputs["ddof"],
            scale_batch=inputs["batch_norm"],
        )
        for case in ("case_0_1", "case_0_2")
    }


def conditioned(inputs: dict, make: Make) -> Results:
    easy, hard = make(inputs["r_easy"]), make(inputs["r_hard"])
    return {"": conditioned_rewards(easy, hard, threshold=inputs["t"])}


def whitened_over_tokens(inputs: dict, make: Make) -> Results:
    """The authors' verl branch: each response counts once per token in the batch's statistics."""
    mask = mask_of(inputs["lengths"], max(inputs["lengths"]))
    tokens = make(inputs["A_sum"])[:, None].expand(mask.shape)
    return {"A_hat_per_row": whiten(tokens, mask)[:, 0]}


def smoothed(inputs: dict, make: Make) -> Results:
    """DCPO: one prompt, visited once per row of rewards."""
    ddof = inputs.get("ddof", 0)
    results, history = {}, None
    for visit, rewards in enumerate(make(inputs["history"])):
        prompt = torch.zeros(len(rewards), dtype=torch.int64)
        new = smoothed_advantages(rewards, prompt, ddof=ddof)  # as if never visited before
        advantages, history = smoothed_advantages(rewards, prompt, history, ddof=ddof)
        i, std = history.visits[0].double(), history.variance.sqrt()[0]
        from_all = (rewards.double() - history.mean[0]) / std
        weights = torch.stack([i - 1, i.new_ones(())]) / i
        mixed = {
            "A_new": new.advantages,
            "A_total": from_all,
            "SA_new": weights[0] * new.advantages + weights[1] * from_all,
            "SA_total": weights[1] * new.advantages + weights[0] * from_all,
            "A": advantages,
            "i": i,
            "mu_new": new.history.mean[0],
            "sigma_new": new.history.variance.sqrt()[0],
            "mu_total": history.mean[0],
            "sigma_total": std,
        }
        results |= {f"{visit}/{key}": value for key, value in mixed.items()}
    return results


def pooled(inputs: dict, make: Make) -> Results:
    visits = make(inputs["history"])
    step_by_step = smoothed({"history": inputs["history"]}, make)
    at_once = []
    for count in range(1, len(visits) + 1):
        rewards = visits[:count].flatten()
        prompt = torch.zeros(len(rewards), dtype=torch.int64)
        at_once.append(smoothed_advantages(rewards, prompt).history.variance.sqrt()[0])
    return {
        "recursive_sigma_total": torch.stack(
            [step_by_step[f"{visit}/sigma_total"] for visit in range(len(visits))]
        ),
        "direct_pooled_std": torch.stack(at_once),
    }


# --- advantages with a critic -------------------------------------------------------------------


def shaped_reward(inputs: dict, make: Make) -> Results:
    rewards = (make(inputs["score"]), make(inputs["old_logp"]), make(inputs["ref_logp"]))
    mask = torch.tensor(inputs["mask"])
    return {
        "per_token": kl_shaped_rewards(*rewards, mask, beta=inputs["beta"]),
        "sum_equals_score_minus_beta_logratio": kl_penalized_rewards(
            *rewards, mask, beta=inputs["beta"]
        ),
    }


def advantages_of_tokens(inputs: dict, make: Make) -> Results:
    mask = torch.tensor(inputs["mask"])
    advantages, returns = generalized_advantages(
        make(inputs["rewards"]),
        make(inputs["values"]),
        mask,
        gamma=inputs["gamma"],
        lam=inputs["lam"],
    )
    return {"advantages": advantages, "returns": returns}


def textbook(inputs: dict, make: Make) -> Results:
    results = advantages_of_tokens(inputs, make)
    mask = torch.tensor(inputs["mask"])
    return results | {"whitened_advantages": whiten(results["advantages"], mask)}


def score_behind_the_end(inputs: dict, make: Make) -> Results:
    """TRL 1.12's PPO: a response shorter than the padded width is one slot longer, the score and a
    value in that slot; only whitening looks at the real tokens."""
    values = make(inputs["values"])
    slots = values.shape[1]
    longer = mask_of([min(length + 1, slots) for length in inputs["lengths"]], slots)
    rewards = kl_shaped_rewards(
        make(inputs["score"]),
        make(inputs["old_logp"]),
        make(inputs["ref_logp"]),
        longer,
        beta=inputs["kl_coef"],
    )
    advantages, returns = generalized_advantages(
        rewards, values, longer, gamma=inputs["gamma"], lam=inputs["lam"]
    )
    return {
        "rewards": rewards,
        "advantages_whitened": whiten(advantages, mask_of(inputs["lengths"], slots)),
        "returns_before_mask": returns,
    }


def length_adaptive(inputs: dict, make: Make) -> Results:
    return {"": length_adaptive_lam(torch.tensor(inputs["lengths"]), alpha=inputs["alpha"])}


def decoupled_critic(inputs: dict, make: Make) -> Results:
    mask = torch.tensor(inputs["mask"])
    rewards, values = make(inputs["rewards"]), make(inputs["values"])
    lam = length_adaptive_lam(mask.sum(dim=1).long(), alpha=inputs["alpha"])
    return {
        "policy_advantages": generalized_advantages(rewards, values, mask, lam=lam).advantages,
        "critic_returns": generalized_advantages(
            rewards, values, mask, lam=inputs["lambda_critic"]
        ).returns,
    }


# --- KL and the RLHF objective ------------------------------------------------------------------


def logs(probabilities: list[float], make: Make) -> Tensor:
    return make([math.log(probability) for probability in probabilities])


def distribution(logits: Tensor) -> Tensor:
    """Log-probs that sum to probability 1 in float32 or wider, whatever rounding did to them."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


def kl_of_distribution(inputs: dict, make: Make) -> Results:
    policy, ref = logs(inputs["pi_theta"], make)[None], logs(inputs["pi_ref"], make)[None]
    weights = torch.tensor(inputs["pi_theta"], dtype=torch.float64)
    mask = torch.ones(1, 3)
    results = {}
    for name in ("k1", "k2", "k3"):
        each = kl_per_token(policy, ref, mask, estimator=name)[0]
        mean = (weights * each).sum()
        results[f"per_outcome/{name}"] = each
        results[f"E_theta/{name}"] = mean
        results[f"std_theta/{name}"] = (weights * (each - mean).square()).sum().sqrt()
    swapped = kl_per_token(ref, policy, mask, estimator="k3")[0]
    results["exact_KL_theta_ref"] = results["E_theta/k1"]
    results["WRONG_direction_k3_E_theta"] = (weights * swapped).sum()
    return results


def kl_each_token(inputs: dict, make: Make) -> Results:
    new, ref, mask = make(inputs["new_logp"]), make(inputs["ref_logp"]), inputs["mask"]
    return {
        name: kl_per_token(new, ref, torch.tensor(mask), estimator=name)
        for name in ("k1", "k2", "k3")
    }


def kl_gradients(inputs: dict, make: Make) -> Results:
    """Gradient with respect to the logits, exact expectation over the three outcomes."""
    logits = logs(inputs["pi_theta"], make).requires_grad_()
    ref = logs(inputs["pi_ref"], make)[:, None]
    weights = torch.tensor(inputs["pi_theta"], dtype=torch.float64)
    outcomes = torch.tensor([[0, 0], [0, 1], [0, 2]])  # a first token that is given, then v

    def as_loss(estimator: str, weighted: bool = False) -> Tensor:
        logprobs = token_logprobs(logits.expand(3, 2, 3), outcomes)
        losses = [
            policy_loss(  # advantage 0 and beta 1 leave the KL term alone
                logprobs[v, None],
                logprobs[v, None],
                torch.zeros(1),
                torch.ones(1, 1),
                ref_logprobs=ref[v, None],
                beta=1.0,
                kl_estimator=estimator,
                kl_importance_weighted=weighted,
            )[0]
            for v in range(3)
        ]
        return torch.autograd.grad((weights * torch.stack(losses)).sum(), logits)[0]

    policy, reference = distribution(logits.double()), distribution(ref[:, 0].double())
    reverse = -regularized_value(policy, reference, torch.zeros(3), beta=1.0)  # KL, no reward
    forward = (reference.exp() * (reference - policy)).sum()

    return {
        "true_grad_reverse_KL_theta_ref": torch.autograd.grad(reverse, logits, retain_graph=True)[
            0
        ],
        "true_grad_forward_KL_ref_theta": torch.autograd.grad(forward, logits)[0],
        "k1_as_loss": as_loss("k1"),
        "k2_as_loss": as_loss("k2"),
        "k3_as_loss": as_loss("k3"),
        "rho_times_k3_as_loss": as_loss("k3", weighted=True),
    }


def closed_form(inputs: dict, make: Make) -> Results:
    ref = distribution(logs(inputs["pi_ref"], make))
    rewards, beta = make(inputs["R"]), inputs["beta"]
    best, log_partition = optimal_policy(ref, rewards, beta=beta)
    uniform = distribution(make([0.0, 0.0, 0.0]))
    return {
        "Z": log_partition.exp(),
        "pi_star": best.exp(),
        "beta_log_Z": beta * log_partition,
        "J_at_pi_star": regularized_value(best, ref, rewards, beta=beta),
        "J_at_pi_ref": regularized_value(ref, ref, rewards, beta=beta),
        "J_uniform": regularized_value(uniform, ref, rewards, beta=beta),
        "recovered_R": implied_rewards(best, ref, beta=beta, log_partition=log_partition),
        "gap_uniform_equals_beta_KL": -regularized_value(
            uniform, best, torch.zeros_like(rewards), beta=beta
        ),
    }


# --- policy losses on the shared batch ----------------------------------------------------------


def loss_and_gradient(loss: Tensor, leaf: Tensor, name: str = "grad") -> Results:
    (gradient,) = torch.autograd.grad(loss, leaf)
    return {"loss": loss, name: gradient}


def stated_arguments(inputs: dict, make: Make) -> dict[str, Any]:
    """What the vector states, under the names of policy_loss."""
    stated: dict[str, Any] = {
        "aggregation": HOW[inputs.get("aggregation", "seq_mean_token_sum")],
        "ratio_level": inputs.get("importance_level", "token"),
        "epsilon_low": inputs.get("eps_lo", 0.2),
        "epsilon_high": inputs.get("eps_hi", 0.2),
        "constant": inputs.get("L"),
        "ratio_max": inputs.get("delta"),
    }
    if inputs.get("beta"):
        stated |= {"beta": inputs["beta"], "ref_logprobs": make(inputs["ref_logp"])}
    if "r_max" in inputs:
        stated |= {
            "clip_range": "dynamic",
            "epsilon_low": inputs["eps_low"],
            "epsilon_high": inputs["eps_high"],
            "ratio_max": inputs["r_max"],
        }
    if "tau" in inputs:
        positive, negative = inputs["tau"]
        stated |= {"tau_positive": positive, "tau_negative": negative}
    if "entropies" in inputs:
        stated |= {
            "entropies": make(inputs["entropies"]),
            "entropy_coef": inputs["entropy_coef"],
        }
    return stated


def surrogate(**arguments: Any) -> Check:
    """policy_loss with what the vector states, and `arguments` where its name is the statement."""

    def check(inputs: dict, make: Make) -> Results:
        new = make(inputs["new_logp"]).requires_grad_()
        loss, _ = policy_loss(
            new,
            make(inputs["old_logp"]),
            make(inputs["advantages"]),
            torch.tensor(inputs["mask"]),
            **(stated_arguments(inputs, make) | arguments),
        )
        return loss_and_gradient(loss, new)

    return check


def capped(inputs: dict, make: Make) -> Results:
    """CISPO: the cap is 1 + epsilon_high; no lower limit."""
    return surrogate(surrogate="capped", epsilon_low=1.0, epsilon_high=inputs["cap"] - 1)(
        inputs, make
    )


def capped_below_one(inputs: dict, make: Make) -> Results:
    """A cap below 1 is no offset that a row can have: the capped ratio goes into the advantage."""
    new, old = make(inputs["new_logp"]).requires_grad_(), make(inputs["old_logp"])
    mask = torch.tensor(inputs["mask"])
    weight = importance_ratio(new, old, mask).detach().clamp(max=inputs["cap"])
    weighted = weight * make(inputs["advantages"])[:, None]
    loss, _ = policy_loss(
        new, old, weighted, mask, surrogate="reinforce", aggregation=inputs["aggregation"]
    )
    return loss_and_gradient(loss, new)


def gamma_weighted(inputs: dict, make: Make) -> Results:
    """VESPO."""
    ratio = importance_ratio(
        make(inputs["new_logp"]),
        make(inputs["old_logp"]),
        torch.tensor(inputs["mask"]),
        level="sequence_sum",
    )
    loss = surrogate(surrogate="gamma", ratio_level="sequence_sum", aggregation="token_mean")
    phi = gamma_weight(ratio[:, 0], make(inputs["advantages"]).to(ratio.dtype))
    return loss(inputs, make) | {"phi": phi}


def batch_mean_baseline(inputs: dict, make: Make) -> Results:
    rewards = make(inputs["rewards"])
    advantages = compute_advantages(REINFORCE, rewards, prompts(rewards, inputs["G"])).advantages
    new = make(inputs["new_logp"]).requires_grad_()
    mask = torch.tensor(inputs["mask"])
    loss, _ = compute_loss(REINFORCE, new, make(inputs["old_logp"]), advantages, mask)
    return loss_and_gradient(loss, new)


def overlong_filtering(inputs: dict, make: Make) -> Results:
    kept = overlong_filter(torch.tensor(inputs["mask"]), torch.tensor(inputs["truncated"]))
    new, old = make(inputs["new_logp"]), make(inputs["old_logp"])
    arguments: dict[str, Any] = {
        "epsilon_low": inputs["eps_lo"],
        "epsilon_high": inputs["eps_hi"],
        "allow_empty": True,
    }
    advantages = make(inputs["advantages"])
    by_token, _ = policy_loss(new, old, advantages, kept, aggregation="token_mean", **arguments)
    by_row, _ = policy_loss(new, old, advantages, kept, total=len(kept), **arguments)
    return {
        "token_mean_loss": by_token,
        "n_tokens": kept.sum().double(),
        "seq_mean_token_mean_loss_trl_divides_by_all_B": by_row,
    }


def self_critical(inputs: dict, make: Make) -> Results:
    logits = make(inputs["logits"]).requires_grad_()
    sampled = torch.tensor([[0, *inputs["sampled"]]])
    padded = torch.cat([logits, torch.zeros_like(logits[:1])])[None]  # the last row is not used
    logprobs = token_logprobs(padded, sampled)
    advantage = self_critical_advantages(make([inputs["R_sampled"]]), make([inputs["R_greedy"]]))
    loss, _ = policy_loss(
        logprobs,
        logprobs,
        advantage,
        torch.ones_like(logprobs, dtype=torch.bool),
        surrogate="reinforce",
        aggregation="sequence_sum",
    )
    return loss_and_gradient(loss, logits, "grad_logits")


def actor_and_critic(inputs: dict, make: Make) -> Results:
    mask = torch.tensor(inputs["mask"])
    policy, stats = policy_loss(
        make(inputs["new_logp"]),
        make(inputs["old_logp"]),
        make(inputs["advantages"]),
        mask,
        epsilon_low=inputs["cliprange"],
        epsilon_high=inputs["cliprange"],
        aggregation="token_mean",
    )
    values, returns = make(inputs["vpred"]), make(inputs["returns"])
    clipped, _ = value_loss(
        values,
        returns,
        mask,
        old_values=make(inputs["old_values"]),
        epsilon=inputs["cliprange_value"],
    )
    return {
        "pg_loss": policy,
        "vf_loss": clipped,
        "vf_loss_unclipped": value_loss(values, returns, mask)[0],
        "total": policy + inputs["vf_coef"] * clipped,
        "pg_clipfrac": stats["clip_ratio/region_mean"].double(),
    }


def dynamic_range(inputs: dict, make: Make) -> Results:
    old = logs(inputs["q"], make)[None]
    low, high = dynamic_clip_range(
        old,
        torch.ones_like(old, dtype=torch.bool),
        epsilon_low=inputs["eps_low"],
        epsilon_high=inputs["eps_high"],
        ratio_max=inputs["r_max"],
    )
    return {"low": low[0], "high": high[0]}


def one_token_each(inputs: dict, make: Make) -> Results:
    """DCPO's loss of single tokens (q, ratio, advantage)."""
    losses = []
    for q, ratio, advantage in inputs["q_r_A"]:
        old, new = logs([q], make)[None], logs([q * ratio], make)[None]
        given = stated_arguments(inputs, make)
        losses.append(policy_loss(new, old, make([advantage]), torch.ones(1, 1), **given)[0])
    return {"": torch.stack(losses)}


# --- likelihood and reward models -----------------------------------------------------------------


def entropy_of_logits(inputs: dict, make: Make) -> Results:
    return {"": entropy(make(inputs["logits"]))}


def supervised(inputs: dict, make: Make) -> Results:
    labels = torch.tensor(inputs["labels"])
    logprobs = token_logprobs(make(inputs["logits"]), labels.clamp(min=0))
    mask = (labels != -100)[:, 1:]
    # the vector writes 0 where there is no label
    return {
        "token_logp": torch.where(mask, logprobs, 0.0),
        "n_tokens": mask.sum().double(),
        "loss_token_mean": sft_loss(logprobs, mask)[0],
        "loss_seq_mean_of_token_means": sft_loss(logprobs, mask, aggregation="sequence_mean")[0],
    }


def bradley_terry(inputs: dict, make: Make) -> Results:
    chosen, rejected = make(inputs["r_chosen"]).requires_grad_(), make(inputs["r_rejected"])
    plain, _ = reward_model_loss(chosen, rejected)
    margin, _ = reward_model_loss(chosen, rejected, margin=make(inputs["margin"]))
    centred, _ = reward_model_loss(chosen, rejected, center_coef=0.01)
    (gradient,) = torch.autograd.grad(plain, chosen)
    return {
        "plain": plain,
        "with_margin": margin,
        "plain_plus_center_0p01": centred,
        "grad_r_chosen_plain": gradient,
    }


def ranking(inputs: dict, make: Make) -> Results:
    return {"": ranking_loss(make([inputs["scores_best_to_worst"]]))[0]}


# --- preferences ----------------------------------------------------------------------------------


def pairs(inputs: dict, make: Make, rows: slice = slice(None)) -> tuple[list, dict[str, Any]]:
    """The tensors of preference_loss; `rows`: only some of the pairs."""
    slots = {side: len(inputs[f"{side}_logp"][0]) for side in ("chosen", "rejected")}
    masks = [mask_of(inputs[f"{side}_len"][rows], width) for side, width in slots.items()]
    positional = [make(inputs[f"{side}_logp"][rows]) for side in slots] + masks
    refs = {f"ref_{side}_logprobs": make(inputs[f"{side}_ref_logp"][rows]) for side in slots}
    return positional, refs


def preference(**arguments: Any) -> Check:
    """preference_loss with what the vector states, and `arguments` where its name says it."""

    def check(inputs: dict, make: Make) -> Results:
        tensors, refs = pairs(inputs, make)
        beta = inputs.get("beta", inputs.get("tau"))
        smoothing = inputs.get("label_smoothing", 0.0)
        loss, _ = preference_loss(
            *tensors, **refs, beta=beta, label_smoothing=smoothing, **arguments
        )
        return {"": loss}

    return check


def direct_preference(inputs: dict, make: Make) -> Results:
    """The whole batch for loss and gradient; pair by pair, the implicit rewards of the statistics.

    The gradient with respect to the log-prob of the whole answer is that of any of its tokens."""
    beta, results = inputs["beta"], []
    for row in range(len(inputs["chosen_len"])):
        tensors, refs = pairs(inputs, make, slice(row, row + 1))
        results.append(preference_loss(*tensors, **refs, beta=beta)[1])
    tensors, refs = pairs(inputs, make)
    chosen = tensors[0].requires_grad_()
    loss, _ = preference_loss(*tensors, **refs, beta=beta)
    (gradient,) = torch.autograd.grad(loss, chosen)

    def each(name: str) -> Tensor:
        return torch.stack([stats[name] for stats in results])

    return {
        "h": each("rewards/margins") / beta,
        "loss": loss,
        "implicit_reward_chosen": each("rewards/chosen"),
        "implicit_reward_rejected": each("rewards/rejected"),
        "grad_wrt_chosen_seq_logp": gradient[:, 0],
    }


def simple_preference(inputs: dict, make: Make) -> Results:
    arguments: dict[str, Any] = {
        "score": "logprob_mean",
        "beta": inputs["beta"],
        "gamma": inputs["gamma"],
    }
    tensors, _ = pairs(inputs, make)
    margins = []
    for row in range(len(inputs["chosen_len"])):
        one, _ = pairs(inputs, make, slice(row, row + 1))
        stats = preference_loss(*one, **arguments)[1]
        margins.append(stats["rewards/margins"] - inputs["gamma"])
    return {"margin": torch.stack(margins), "loss": preference_loss(*tensors, **arguments)[0]}


def odds_ratio(inputs: dict, make: Make) -> Results:
    weight = inputs["lambda"]
    arguments: dict[str, Any] = {
        "score": "log_odds",
        "beta": 1.0,
        "weight": weight,
        "nll_coef": 1.0,
    }
    tensors, _ = pairs(inputs, make)
    loss, stats = preference_loss(*tensors, **arguments)
    each = []
    for row in range(len(inputs["chosen_len"])):
        one, _ = pairs(inputs, make, slice(row, row + 1))
        each.append(preference_loss(*one, **arguments)[1]["log_odds_chosen"])
    return {
        "log_odds_ratio": torch.stack(each),
        "L_OR": -stats["log_odds_ratio"],
        "nll_chosen_response_token_mean": stats["nll_loss"],
        "loss_response_only_nll": loss,
    }


def prospect(inputs: dict, make: Make) -> Results:
    """KTO; the vector gives whole answers, each is one token here."""
    logprobs, ref = make(inputs["logp"])[:, None], make(inputs["ref_logp"])[:, None]
    desirable = torch.tensor(inputs["desirable"]).bool()
    mask = torch.ones_like(desirable)[:, None]
    arguments: dict[str, Any] = {
        "mismatched_log_ratios": make(inputs["kl_logp"]) - make(inputs["kl_ref_logp"]),
        "beta": inputs["beta"],
        "weight_desirable": inputs["lambda_D"],
        "weight_undesirable": inputs["lambda_U"],
    }
    loss, stats = kto_loss(logprobs, ref, mask, desirable, **arguments)
    each = [
        kto_loss(logprobs[i, None], ref[i, None], mask[i, None], desirable[i, None], **arguments)[0]
        for i in range(len(mask))
    ]
    return {"z0": stats["kl"], "per_example": torch.stack(each), "loss": loss}


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vector:
    """How one vector is computed.  ``method``: the row of rlcore.algorithms or rlcore.preferences
    (or the part of the book) that it belongs to; ``headline``: the number that stands for it."""

    name: str
    method: str
    title: str
    check: Check
    headline: str = "loss"

    @property
    def stated(self) -> dict[str, Any]:
        return STATED[self.name]


_TABLE: tuple[Vector, ...] = (
    Vector("grpo_adv_trl_default", "grpo", "advantages with TRL's defaults", z_score_as_stated, ""),
    Vector("grpo_adv_population_std", "grpo", "advantages, population std", z_score_as_stated, ""),
    Vector("grpo_adv_sample_std_no_eps", "grpo", "advantages, sample std", z_score_as_stated, ""),
    Vector("grpo_adv_scale_none", "dr-grpo", "advantages", mean_only, ""),
    Vector("grpo_adv_scale_batch", "grpo", "advantages, std of the batch", z_score_of_batch, ""),
    Vector("grpo_adv_zero_std_group", "grpo", "advantages of an all-equal group", zero_std, ""),
    Vector("rloo_adv", "rloo", "advantages", leave_one_out, ""),
    Vector(
        "rloo_adv_with_kl_in_reward",
        "rloo",
        "advantages, KL in the reward",
        leave_one_out_with_kl,
        "adv",
    ),
    Vector(
        "adv_bound_sqrt_G_minus_1", "grpo", "largest advantage", bound, "8/max_adv_population_std"
    ),
    Vector("dapo_soft_overlong", "dapo", "soft overlong penalty", soft_overlong, ""),
    Vector(
        "dapo_soft_overlong_paper_scale",
        "dapo",
        "soft overlong penalty, the paper's lengths",
        soft_overlong,
        "",
    ),
    Vector(
        "dapo_dynamic_sampling_keep",
        "dapo",
        "prompts that dynamic sampling keeps",
        dynamic_sampling,
        "",
    ),
    Vector(
        "kl_estimators_3way",
        "kl",
        "k1, k2, k3 on three outcomes",
        kl_of_distribution,
        "exact_KL_theta_ref",
    ),
    Vector("kl_k3_per_token", "kl", "k1, k2, k3 per token", kl_each_token, "k3"),
    Vector(
        "kl_as_loss_gradients",
        "kl",
        "gradient of each estimator as a loss",
        kl_gradients,
        "k3_as_loss",
    ),
    Vector("bnpo_beta_normalised_adv", "bnpo", "advantages", beta_normalized, "adv"),
    Vector("grpo_loss", "grpo", "loss", surrogate()),
    Vector(
        "grpo_loss_kl_k3_paper", "grpo", "loss with KL, as the paper", surrogate(kl_estimator="k3")
    ),
    Vector(
        "grpo_loss_kl_k3_trl_default",
        "grpo",
        "loss with KL, as TRL's default",
        surrogate(kl_importance_weighted=True),
    ),
    Vector("bnpo_loss", "bnpo-trl", "loss", surrogate()),
    Vector("dr_grpo_loss", "dr-grpo", "loss", surrogate()),
    Vector("dapo_loss", "dapo", "loss", surrogate()),
    Vector("dapo_loss_two_sided_delta", "dapo", "loss with a cap on the ratio", surrogate()),
    Vector("gspo_loss", "gspo", "loss", surrogate()),
    Vector("gspo_loss_wide_clip", "gspo", "loss with a wide range", surrogate()),
    Vector(
        "gspo_with_dapo_aggregation_WRONG",
        "gspo",
        "loss with DAPO's aggregation (a trap)",
        surrogate(),
    ),
    Vector("luspo_loss", "luspo", "loss", surrogate()),
    Vector("cispo_loss_cap_1p28", "cispo", "loss", capped),
    Vector(
        "cispo_loss_cap_0p28_TRAP",
        "cispo",
        "loss with an offset taken for the cap (a trap)",
        capped_below_one,
    ),
    Vector("sapo_loss", "sapo", "loss", surrogate(surrogate="soft")),
    Vector("dapo_loss_entropy_bonus", "dapo", "loss with an entropy bonus", surrogate()),
    Vector("vespo_loss", "vespo", "loss", gamma_weighted),
    Vector(
        "dapo_overlong_filtering",
        "dapo",
        "loss with overlong filtering",
        overlong_filtering,
        "token_mean_loss",
    ),
    Vector("dcpo_clip_bounds", "dcpo", "clip range", dynamic_range, "high"),
    Vector("dcpo_loss_eq8_otm", "dcpo", "loss", surrogate(aggregation="only_token_mean")),
    Vector(
        "dcpo_loss_readme_seq_mean_token_sum",
        "dcpo",
        "loss as the authors' README prints it",
        surrogate(aggregation="sequence_sum"),
    ),
    Vector(
        "dcpo_loss_code_micro_batch_token_mean",
        "dcpo",
        "loss as the authors' code computes it",
        surrogate(aggregation="token_mean"),
    ),
    Vector("dcpo_token_loss_points", "dcpo", "loss of single tokens", one_token_each, ""),
    Vector("dcpo_sas_paper_population_std", "dcpo", "smoothed advantages", smoothed, "2/A"),
    Vector(
        "dcpo_sas_pooled_std_identity",
        "dcpo",
        "std over all visits",
        pooled,
        "recursive_sigma_total",
    ),
    Vector(
        "dcpo_sas_released_code_sample_std",
        "dcpo",
        "smoothed advantages as the authors' code",
        smoothed,
        "2/A",
    ),
    Vector("gdpo_adv_equal_weights", "gdpo", "advantages, equal weights", by_reward, "A_hat"),
    Vector("gdpo_adv_weights_1_0p5", "gdpo", "advantages, unequal weights", by_reward, "A_hat"),
    Vector(
        "gdpo_vs_grpo_collapse",
        "gdpo",
        "advantages next to GRPO's",
        collapse,
        "gdpo_normalize_then_sum",
    ),
    Vector(
        "gdpo_paper_fig2_G2", "gdpo", "advantages of the paper's figure 2", figure_2, "case_0_2"
    ),
    Vector("gdpo_conditioned_reward", "gdpo", "conditioned reward", conditioned, ""),
    Vector(
        "gdpo_verl_token_weighted_whitening",
        "gdpo",
        "advantages whitened over tokens",
        whitened_over_tokens,
        "A_hat_per_row",
    ),
    Vector(
        "rloo_loss_trl_seq_ratio_clip",
        "rloo",
        "loss as TRL's",
        surrogate(ratio_level="sequence_sum", aggregation="sequence_mean"),
    ),
    Vector("rloo_loss_paper_reinforce", "rloo", "loss", surrogate(surrogate="reinforce")),
    Vector(
        "reinforce_batch_mean_baseline",
        "reinforce",
        "loss, baseline: mean of the batch",
        batch_mean_baseline,
    ),
    Vector(
        "reinforce_group_baseline_seq_sum",
        "reinforce",
        "loss, advantages of a group",
        surrogate(surrogate="reinforce"),
    ),
    Vector("scst", "scst", "loss", self_critical),
    Vector("token_entropy", "likelihood", "entropy", entropy_of_logits, ""),
    Vector("sft_nll", "likelihood", "supervised loss", supervised, "loss_token_mean"),
    Vector("bt_reward_loss", "reward-model", "loss", bradley_terry, "plain"),
    Vector("bt_reward_loss_K4_ranking", "reward-model", "loss of a ranking", ranking, ""),
    Vector("rlhf_kl_shaped_reward", "rlhf", "reward per token", shaped_reward, "per_token"),
    Vector("closed_form_policy", "rlhf", "optimal policy", closed_form, "Z"),
    Vector("gae_textbook", "ppo", "advantages", textbook, "advantages"),
    Vector(
        "gae_padding_is_ignored",
        "ppo",
        "advantages, garbage in the padding",
        advantages_of_tokens,
        "advantages",
    ),
    Vector("ppo_losses", "ppo", "policy and value loss", actor_and_critic, "total"),
    Vector(
        "trl_ppo_1p12_rewards_adv",
        "ppo",
        "advantages as TRL 1.12 places the score",
        score_behind_the_end,
        "advantages_whitened",
    ),
    Vector("vapo_length_adaptive_lambda", "vapo", "length-adaptive lambda", length_adaptive, ""),
    Vector(
        "vapo_decoupled_gae",
        "vapo",
        "advantages and returns",
        decoupled_critic,
        "policy_advantages",
    ),
    Vector("dpo_sigmoid", "dpo", "loss", direct_preference),
    Vector("cdpo_label_smoothing", "cdpo", "loss", preference(), ""),
    Vector("robust_dpo", "robust-dpo", "loss", preference(smoothing="robust"), ""),
    Vector("dpo_hinge", "hinge", "loss", preference(link="hinge"), ""),
    Vector("ipo_paper_sum", "ipo", "loss", preference(link="square"), ""),
    Vector(
        "ipo_trl_token_average",
        "ipo-averaged",
        "loss",
        preference(link="square", score="log_ratio_mean"),
        "",
    ),
    Vector("dpo_length_normalised", "dpo-norm", "loss", preference(score="log_ratio_mean"), ""),
    Vector("simpo", "simpo", "loss", simple_preference),
    Vector("orpo", "orpo", "loss", odds_ratio, "loss_response_only_nll"),
    Vector("kto", "kto", "loss", prospect),
)
VECTORS: dict[str, Vector] = {vector.name: vector for vector in _TABLE}
NOT_APPLICABLE: dict[str, str] = {}  # name -> why rlcore rightly does not compute it


# --- side by side ---------------------------------------------------------------------------------


def in_dtype(dtype: torch.dtype) -> Make:
    return lambda numbers: torch.tensor(numbers, dtype=dtype)


def rounded_to(dtype: torch.dtype) -> Make:
    """float64 arithmetic on numbers that a tensor of `dtype` can hold."""
    return lambda numbers: torch.tensor(numbers, dtype=dtype).double()


def flat(value: Any, above: str = "") -> Results:
    """Nested dicts (and lists of dicts) of numbers -> {"outer/inner": tensor}."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {above: torch.tensor(value, dtype=torch.float64)}
    parts = (flat(each, f"{above}/{key}" if above else str(key)) for key, each in value.items())
    return {key: each for part in parts for key, each in part.items()}


def largest_difference(ours: Results, theirs: Results) -> float:
    """Over all keys of `theirs`; inf where ours lacks one, or has another shape or a NaN."""
    worst = 0.0
    for key, wanted in theirs.items():
        value = ours.get(key, torch.empty(0)).detach().double()
        if value.shape != wanted.shape:
            return math.inf
        worst = max(worst, float((value - wanted).abs().max().nan_to_num(math.inf)))
    return worst


@dataclass(frozen=True)
class CrossCheck:
    """What other code gave for the same inputs."""

    who: str  # "TRL 1.16.0", "verl", "the authors", "the paper", "torch autograd"
    by: str  # with versions and commit
    how: str
    values: Results
    tolerance: float
    stated_difference: float  # between this code and the vector's own numbers, when it was run
    difference: float  # between this code and rlcore, now


@dataclass(frozen=True)
class Comparison:
    """One vector, computed now in float64."""

    vector: Vector
    functions: tuple[str, ...]  # of rlcore, as they were called
    ours: Results
    expected: Results
    tolerance: float
    difference: float
    cross_checks: tuple[CrossCheck, ...]

    @property
    def headline(self) -> tuple[Tensor, Tensor]:
        """Our number(s) and the stated one(s) that stand for the vector."""
        key = self.vector.headline
        return self.ours[key].detach(), self.expected[key]


def comparison(name: str) -> Comparison:
    """Ours, the stated numbers, and what TRL, verl or the authors' code gave."""
    vector = VECTORS[name]
    stated = vector.stated
    functions, ours = _called(lambda: vector.check(stated["inputs"], in_dtype(torch.float64)))
    expected = flat(stated["expected"])
    checks = []
    for other in stated.get("cross_check", []):
        values = flat(other["value"])
        checks.append(
            CrossCheck(
                who=_who(other["by"], vector.method),
                by=other["by"],
                how=other["how"],
                values=values,
                tolerance=other["tolerance"],
                stated_difference=other["max_abs_diff"],
                difference=largest_difference(ours, values),
            )
        )
    return Comparison(
        vector,
        functions,
        ours,
        expected,
        stated["tolerance"],
        largest_difference(ours, expected),
        tuple(checks),
    )


def _who(by: str, method: str) -> str:
    """A short name.  DCPO's authors released a fork of verl: for other methods it is verl."""
    if by.startswith("trl "):
        return "TRL " + by.split()[1].rstrip(",")
    if by.startswith("torch "):
        return "torch autograd"
    if "paper" in by:
        return "the paper"
    if by.startswith("verl ") or ("verl fork" in by and method != "dcpo"):
        return "verl"
    return "the authors"


def _called(call: Callable[[], Results]) -> tuple[tuple[str, ...], Results]:
    """The functions of rlcore that this file calls while `call` runs, in the order of first use."""
    names: dict[str, None] = {}

    def notice(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_back is None or frame.f_code.co_name.startswith("<"):
            return
        module = frame.f_globals.get("__name__", "")
        if module.startswith("rlcore.") and frame.f_back.f_globals is globals():
            names[frame.f_code.co_name] = None

    before = sys.getprofile()
    sys.setprofile(notice)
    try:
        results = call()
    finally:
        sys.setprofile(before)
    return tuple(names), results
