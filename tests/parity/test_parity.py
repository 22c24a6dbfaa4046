"""rlcore against independent float64 values (tests/data/parity_vectors.json), value and gradient.

Most vectors were also run through TRL or the papers' own code; each names the tolerance to hold.
COVERED says how each is computed with rlcore; LATER says which part of the book covers the rest.
Together they are all of them, and a test says so.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.algorithms import DR_GRPO, GRPO, REINFORCE, RLOO, compute_advantages, compute_loss
from rlcore.objectives import (
    aggregate,
    entropy,
    equal_groups,
    group_advantages,
    kl_penalized_rewards,
    kl_per_token,
    largest_group_advantage,
    leave_one_out_advantages,
    policy_loss,
    sft_loss,
    token_logprobs,
)

FILE = Path(__file__).parents[1] / "data" / "parity_vectors.json"
VECTORS = {vector["name"]: vector for vector in json.loads(FILE.read_text())["vectors"]}
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


# --- advantages ---------------------------------------------------------------------------------


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
    return {"": compute_advantages(DR_GRPO, rewards, prompts(rewards, inputs["G"]))}


def leave_one_out(inputs: dict, make: Make) -> Results:
    rewards = make(inputs["rewards"])
    return {"": leave_one_out_advantages(rewards, prompts(rewards, inputs["G"]))}


def leave_one_out_with_kl(inputs: dict, make: Make) -> Results:
    rewards, mask = make(inputs["rewards"]), torch.tensor(inputs["mask"])
    old, ref = make(inputs["old_logp"]), make(inputs["ref_logp"])
    row = replace(RLOO, beta=inputs["beta"])
    return {
        "kl_seq_k1": kl_per_token(old, ref, mask, estimator="k1").sum(dim=1),
        "adv": compute_advantages(
            row,
            rewards,
            prompts(rewards, inputs["G"]),
            old_logprobs=old,
            ref_logprobs=ref,
            response_mask=mask,
        ),
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


def dynamic_sampling(inputs: dict, make: Make) -> Results:
    rewards = make(inputs["is_correct"])
    groups = torch.arange(len(rewards)).repeat_interleave(rewards.shape[1])
    return {"": ~equal_groups(rewards.flatten(), groups).equal}


# --- KL -----------------------------------------------------------------------------------------


def logs(probabilities: list[float], make: Make) -> Tensor:
    return make([math.log(probability) for probability in probabilities])


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

    def of_kl(reverse: bool) -> Tensor:
        policy, reference = logits.double().log_softmax(-1), ref[:, 0].double()
        p, q = (policy, reference) if reverse else (reference, policy)
        return torch.autograd.grad((p.exp() * (p - q)).sum(), logits)[0]

    return {
        "true_grad_reverse_KL_theta_ref": of_kl(reverse=True),
        "true_grad_forward_KL_ref_theta": of_kl(reverse=False),
        "k1_as_loss": as_loss("k1"),
        "k2_as_loss": as_loss("k2"),
        "k3_as_loss": as_loss("k3"),
        "rho_times_k3_as_loss": as_loss("k3", weighted=True),
    }


# --- losses on the shared batch -----------------------------------------------------------------


def loss_and_gradient(loss: Tensor, leaf: Tensor, name: str = "grad") -> Results:
    (gradient,) = torch.autograd.grad(loss, leaf)
    return {"loss": loss, name: gradient}


def surrogate(**arguments: Any) -> Check:
    """policy_loss with what the vector states, and `arguments` where its name is the statement."""

    def check(inputs: dict, make: Make) -> Results:
        stated: dict[str, Any] = {
            "aggregation": HOW[inputs.get("aggregation", "seq_mean_token_sum")],
            "ratio_level": inputs.get("importance_level", "token"),
            "epsilon_low": inputs.get("eps_lo", 0.2),
            "epsilon_high": inputs.get("eps_hi", 0.2),
            "constant": inputs.get("L"),
        }
        if inputs.get("beta"):
            stated |= {"beta": inputs["beta"], "ref_logprobs": make(inputs["ref_logp"])}
        new = make(inputs["new_logp"]).requires_grad_()
        loss, _ = policy_loss(
            new,
            make(inputs["old_logp"]),
            make(inputs["advantages"]),
            torch.tensor(inputs["mask"]),
            **(stated | arguments),
        )
        if "entropies" in inputs:
            bonus = aggregate(
                make(inputs["entropies"]), torch.tensor(inputs["mask"]), how="token_mean"
            )
            loss = loss - inputs["entropy_coef"] * bonus
        return loss_and_gradient(loss, new)

    return check


def batch_mean_baseline(inputs: dict, make: Make) -> Results:
    rewards = make(inputs["rewards"])
    advantages = compute_advantages(REINFORCE, rewards, prompts(rewards, inputs["G"]))
    new = make(inputs["new_logp"]).requires_grad_()
    mask = torch.tensor(inputs["mask"])
    loss, _ = compute_loss(REINFORCE, new, make(inputs["old_logp"]), advantages, mask)
    return loss_and_gradient(loss, new)


def overlong_filtering(inputs: dict, make: Make) -> Results:
    kept = torch.tensor(inputs["mask"]).bool() & ~torch.tensor(inputs["truncated"])[:, None]
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
    advantage = make([inputs["R_sampled"]]) - make([inputs["R_greedy"]])
    loss, _ = compute_loss(
        REINFORCE, logprobs, logprobs, advantage, torch.ones_like(logprobs, dtype=torch.bool)
    )
    return loss_and_gradient(loss, logits, "grad_logits")


# --- likelihood ---------------------------------------------------------------------------------


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
        "loss_token_mean": sft_loss(logprobs, mask),
        "loss_seq_mean_of_token_means": sft_loss(logprobs, mask, aggregation="sequence_mean"),
    }


COVERED: dict[str, Check] = {
    "grpo_adv_trl_default": z_score_as_stated,
    "grpo_adv_population_std": z_score_as_stated,
    "grpo_adv_sample_std_no_eps": z_score_as_stated,
    "grpo_adv_scale_none": mean_only,
    "grpo_adv_scale_batch": z_score_of_batch,
    "grpo_adv_zero_std_group": zero_std,
    "rloo_adv": leave_one_out,
    "rloo_adv_with_kl_in_reward": leave_one_out_with_kl,
    "adv_bound_sqrt_G_minus_1": bound,
    "dapo_dynamic_sampling_keep": dynamic_sampling,
    "kl_estimators_3way": kl_of_distribution,
    "kl_k3_per_token": kl_each_token,
    "kl_as_loss_gradients": kl_gradients,
    "grpo_loss": surrogate(),
    "grpo_loss_kl_k3_paper": surrogate(kl_estimator="k3"),
    "grpo_loss_kl_k3_trl_default": surrogate(kl_importance_weighted=True),
    "bnpo_loss": surrogate(),
    "dr_grpo_loss": surrogate(),
    "dapo_loss": surrogate(),
    "dapo_loss_entropy_bonus": surrogate(),
    "dapo_overlong_filtering": overlong_filtering,
    "gspo_loss": surrogate(),
    "gspo_loss_wide_clip": surrogate(),
    "gspo_with_dapo_aggregation_WRONG": surrogate(),
    "luspo_loss": surrogate(),
    "reinforce_group_baseline_seq_sum": surrogate(surrogate="reinforce"),
    "reinforce_batch_mean_baseline": batch_mean_baseline,
    "rloo_loss_trl_seq_ratio_clip": surrogate(
        ratio_level="sequence_sum", aggregation="sequence_mean"
    ),
    "rloo_loss_paper_reinforce": surrogate(surrogate="reinforce"),
    "scst": self_critical,
    "token_entropy": entropy_of_logits,
    "sft_nll": supervised,
}

LATER: dict[str, str] = {
    "bt_reward_loss": "4 Preferences and reward models",
    "bt_reward_loss_K4_ranking": "4 Preferences and reward models",
    "closed_form_policy": "5 The RLHF objective",
    "rlhf_kl_shaped_reward": "7 PPO (reward per token; its sum per response: see below)",
    "gae_textbook": "7 PPO",
    "gae_padding_is_ignored": "7 PPO",
    "ppo_losses": "7 PPO (value loss; the policy loss: see below)",
    "trl_ppo_1p12_rewards_adv": "7 PPO",
    "dpo_sigmoid": "8 DPO",
    "cdpo_label_smoothing": "8 DPO",
    "robust_dpo": "8 DPO",
    "dpo_hinge": "8 DPO",
    "ipo_paper_sum": "8 DPO",
    "ipo_trl_token_average": "8 DPO",
    "dpo_length_normalised": "8 DPO",
    "kto": "8 DPO",
    "simpo": "9 SimPO",
    "orpo": "9 SimPO",
    "dapo_soft_overlong": "12 DAPO (overlong penalty)",
    "dapo_soft_overlong_paper_scale": "12 DAPO (overlong penalty)",
    "dapo_loss_two_sided_delta": "12 DAPO (clip range)",
    "dcpo_clip_bounds": "13 DCPO",
    "dcpo_loss_eq8_otm": "13 DCPO",
    "dcpo_loss_readme_seq_mean_token_sum": "13 DCPO",
    "dcpo_loss_code_micro_batch_token_mean": "13 DCPO",
    "dcpo_token_loss_points": "13 DCPO",
    "dcpo_sas_paper_population_std": "13 DCPO",
    "dcpo_sas_pooled_std_identity": "13 DCPO",
    "dcpo_sas_released_code_sample_std": "13 DCPO",
    "gdpo_adv_equal_weights": "14 GDPO",
    "gdpo_adv_weights_1_0p5": "14 GDPO",
    "gdpo_vs_grpo_collapse": "14 GDPO (its GRPO line: see below)",
    "gdpo_paper_fig2_G2": "14 GDPO",
    "gdpo_conditioned_reward": "14 GDPO",
    "gdpo_verl_token_weighted_whitening": "14 GDPO",
    "vapo_length_adaptive_lambda": "15 VAPO",
    "vapo_decoupled_gae": "15 VAPO",
    "bnpo_beta_normalised_adv": "16 All on one task (relatives of GRPO)",
    "cispo_loss_cap_1p28": "16 All on one task (capped weight)",
    "cispo_loss_cap_0p28_TRAP": "16 All on one task (capped weight)",
    "sapo_loss": "16 All on one task (relatives of GRPO)",
    "vespo_loss": "16 All on one task (relatives of GRPO)",
}


def in_dtype(dtype: torch.dtype) -> Make:
    return lambda numbers: torch.tensor(numbers, dtype=dtype)


def rounded_to(dtype: torch.dtype) -> Make:
    """float64 arithmetic on numbers that a tensor of `dtype` can hold."""
    return lambda numbers: torch.tensor(numbers, dtype=dtype).double()


def flat(expected: Any, above: str = "") -> dict[str, Tensor]:
    """Nested dict of numbers -> {"outer/inner": tensor}."""
    if not isinstance(expected, dict):
        return {above: torch.tensor(expected, dtype=torch.float64)}
    parts = (flat(value, f"{above}/{key}" if above else key) for key, value in expected.items())
    return {key: value for part in parts for key, value in part.items()}


def test_every_vector_is_covered_or_listed() -> None:
    assert len(VECTORS) == 74
    assert not COVERED.keys() & LATER.keys()
    assert COVERED.keys() | LATER.keys() == VECTORS.keys()


@pytest.mark.parametrize("name", COVERED)
def test_float64(name: str) -> None:
    vector = VECTORS[name]
    results = COVERED[name](vector["inputs"], in_dtype(torch.float64))
    expected = flat(vector["expected"])
    assert results.keys() == expected.keys()  # all that the vector expects is computed
    for key, ours in results.items():
        assert ours.dtype in (torch.float64, torch.bool), f"{key} was computed in {ours.dtype}"
        torch.testing.assert_close(
            ours.detach().double(),
            expected[key],
            rtol=0,
            atol=vector["tolerance"],
            msg=lambda message, key=key: f"{key}: {message}",
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", COVERED)
def test_lower_precision(name: str, dtype: torch.dtype) -> None:
    """Inputs in float32 or bfloat16 are computed in float32: as close to float64 arithmetic on the
    same (rounded) inputs as float32 allows.  The gradient is stored in the dtype of the leaf."""
    inputs = VECTORS[name]["inputs"]
    results = COVERED[name](inputs, in_dtype(dtype))
    wanted = COVERED[name](inputs, rounded_to(dtype))
    for key, ours in results.items():
        is_gradient = "grad" in key or key.endswith("_as_loss")
        if ours.dtype in (torch.float32, torch.bfloat16):
            assert is_gradient or ours.dtype == torch.float32, f"{key} is in {ours.dtype}"
        step = 2**-8 if is_gradient and dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(
            ours.double(), wanted[key].double(), rtol=step, atol=max(step / 4, 2e-6)
        )


def test_sum_of_the_kl_shaped_reward() -> None:
    vector = VECTORS["rlhf_kl_shaped_reward"]
    inputs, make = vector["inputs"], in_dtype(torch.float64)
    shaped = kl_penalized_rewards(
        make(inputs["score"]),
        make(inputs["old_logp"]),
        make(inputs["ref_logp"]),
        torch.tensor(inputs["mask"]),
        beta=inputs["beta"],
    )
    wanted = make(vector["expected"]["sum_equals_score_minus_beta_logratio"])
    torch.testing.assert_close(shaped, wanted, rtol=0, atol=1e-12)


def test_policy_part_of_the_ppo_losses() -> None:
    vector = VECTORS["ppo_losses"]
    inputs, make = vector["inputs"], in_dtype(torch.float64)
    loss, stats = policy_loss(
        make(inputs["new_logp"]),
        make(inputs["old_logp"]),
        make(inputs["advantages"]),
        torch.tensor(inputs["mask"]),
        epsilon_low=inputs["cliprange"],
        epsilon_high=inputs["cliprange"],
        aggregation="token_mean",
    )
    assert loss.item() == pytest.approx(vector["expected"]["pg_loss"], abs=1e-12)
    fraction = stats["clip_ratio/region_mean"].item()
    assert fraction == pytest.approx(vector["expected"]["pg_clipfrac"], abs=1e-12)


def test_grpo_line_of_the_gdpo_collapse() -> None:
    vector = VECTORS["gdpo_vs_grpo_collapse"]
    totals = torch.tensor(vector["inputs"]["rewards"], dtype=torch.float64).sum(dim=1)
    ours = group_advantages(totals, prompts(totals, vector["inputs"]["G"]), ddof=1, eps=1e-4)
    wanted = torch.tensor(vector["expected"]["grpo_sum_then_normalize"], dtype=torch.float64)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("row", "vector", "constant"),
    [
        (GRPO, "grpo_loss_kl_k3_paper", None),
        (DR_GRPO, "dr_grpo_loss", 8),
        (RLOO, "rloo_loss_paper_reinforce", None),
        (REINFORCE, "reinforce_group_baseline_seq_sum", None),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_row_computes_its_vector(row: Any, vector: str, constant: int | None) -> None:
    """The rows, as they stand in rlcore.algorithms, are the losses of the papers."""
    inputs, expected = VECTORS[vector]["inputs"], VECTORS[vector]["expected"]
    make = in_dtype(torch.float64)
    new = make(inputs["new_logp"]).requires_grad_()
    loss, _ = compute_loss(
        row,
        new,
        make(inputs["old_logp"]),
        make(inputs["advantages"]),
        torch.tensor(inputs["mask"]),
        ref_logprobs=make(inputs["ref_logp"]),
        constant=constant,
    )
    results = loss_and_gradient(loss, new)
    for key, ours in results.items():
        torch.testing.assert_close(ours.detach(), make(expected[key]), rtol=0, atol=1e-12)
