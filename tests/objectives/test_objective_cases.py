"""Reports from practice that touch the objectives, each with the right answer.

tests/data/cases.json holds 50 such cases, collected from the issues of public projects; the ones
below are those that rlcore.objectives decides.  A test reads its numbers from the file.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.algorithms import DR_GRPO, GRPO, GRPO_MEAN_ONLY, RLOO, compute_advantages, compute_loss
from rlcore.objectives import (
    aggregate,
    dynamic_clip_range,
    group_advantages,
    importance_ratio,
    kl_per_token,
    leave_one_out_advantages,
    policy_loss,
    probability_all_equal,
    sft_loss,
    token_logprobs,
)

FILE = Path(__file__).parents[1] / "data" / "cases.json"
CASES = {case["id"]: case for case in json.loads(FILE.read_text())}


def case(name: str) -> tuple[dict, dict]:
    return CASES[name]["input"], CASES[name]["expected"]


def close(ours: Tensor, wanted: Any, atol: float) -> None:
    wanted = torch.as_tensor(wanted, dtype=ours.dtype)
    torch.testing.assert_close(ours.detach(), wanted, rtol=0, atol=atol)


def one_group(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64)


def test_a01_half_precision_rewards_keep_their_signal() -> None:
    given, expected = case("A01")
    rewards = torch.tensor(given["rewards_bf16"], dtype=torch.bfloat16)
    group = one_group(given["group_size"])
    sample = group_advantages(rewards, group, ddof=1)
    assert sample.dtype == torch.float32
    close(sample, expected["advantages_ddof1_eps0"], 1e-6)
    # 0.0078125 is exact in bfloat16, so nothing is lost: far inside the case's 0.02
    guarded = group_advantages(rewards, group, ddof=1, eps=1e-4)
    close(guarded, expected["with_eps_1e-4_added_to_std"], 1e-6)
    close(group_advantages(rewards, group), expected["advantages_ddof0_eps0"], 1e-6)
    for dtype in (torch.float16, torch.bfloat16):
        constant = group_advantages(torch.full((4,), 0.1, dtype=dtype), group)
        assert constant.tolist() == expected["constant_group"]
    integers = group_advantages(torch.tensor([0, 1, 1, 0]), group)
    assert integers.dtype == torch.float32
    assert integers.tolist() == [-1, 1, 1, -1]


def test_a03_the_four_estimators_on_one_group() -> None:
    given, expected = case("A03")
    rewards, group = torch.tensor(given["rewards"]), one_group(given["k"])
    close(leave_one_out_advantages(rewards, group), expected["rloo"], 1e-6)
    close(group_advantages(rewards, group, ddof=1), expected["grpo_ddof1"], 1e-6)
    close(group_advantages(rewards, group), expected["grpo_ddof0"], 1e-6)
    for row in (DR_GRPO, GRPO_MEAN_ONLY):
        ours = compute_advantages(row, rewards, group).advantages
        close(ours, expected["dr_grpo_mean_only"], 1e-6)
    k = given["k"]
    identity = k / (k - 1) * group_advantages(rewards, group, scale="none")
    close(leave_one_out_advantages(rewards, group), identity, 1e-6)
    # normalising what leave-one-out gave stays small: no division by a std of one side
    again = group_advantages(leave_one_out_advantages(rewards, group), group)
    assert again.abs().max() < 10


def test_a06_sample_or_population_std() -> None:
    given, expected = case("A06")
    rewards = torch.tensor(given["rewards"])
    groups = torch.arange(len(rewards)).repeat_interleave(rewards.shape[1])
    for ddof in (0, 1):
        ours = group_advantages(rewards.flatten(), groups, ddof=ddof)
        close(ours.view(rewards.shape), expected[f"ddof{ddof}"], 1e-6)


@pytest.mark.parametrize("as_list", [True, False])
def test_a08_an_abstaining_verifier_is_not_a_zero(as_list: bool) -> None:
    given, expected = case("A08")
    listed = given["rewards"]
    assert None in listed
    nan = float("nan")
    tensor = torch.tensor([nan if reward is None else reward for reward in listed])
    rewards = listed if as_list else tensor
    group = one_group(given["group_size"])
    for ddof in (0, 1):
        close(group_advantages(rewards, group, ddof=ddof), expected[f"advantages_ddof{ddof}"], 1e-5)
    nothing = [None] * 4 if as_list else torch.full((4,), nan)
    assert group_advantages(nothing, group).tolist() == expected["all_None_group"]
    assert leave_one_out_advantages(rewards, group)[1] == 0
    assert tensor.nanmean().item() == pytest.approx(expected["logged_mean_reward"], abs=1e-6)


def test_a11_k1_may_be_negative_k2_and_k3_not_and_the_log_names_it() -> None:
    given, expected = case("A11")
    policy, ref = torch.tensor([given["logp_policy"]]), torch.tensor([given["logp_ref"]])
    mask = torch.tensor([given["mask"]])
    for name in ("k1", "k2", "k3"):
        values = kl_per_token(policy, ref, mask, estimator=name)
        close(values[0], expected[name], 1e-6)
        close(aggregate(values, mask, how="token_mean"), expected["mean"][name], 1e-6)
        _, stats = policy_loss(
            policy, policy, torch.zeros(1), mask, ref_logprobs=ref, kl_estimator=name
        )
        close(stats[f"kl/{name}"], expected["mean"][name], 1e-6)
        assert stats["kl"] == stats[f"kl/{name}"]
    assert (kl_per_token(policy, ref, mask, estimator="k3") >= 0).all()


def test_a13_an_unbiased_value_is_not_an_unbiased_gradient() -> None:
    given, expected = case("A13")
    theta = torch.tensor(given["theta"], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor(given["ref"], dtype=torch.float64).log()
    policy = theta.log_softmax(0)
    weights, mask = policy.detach().exp(), torch.ones(3, 1)

    kl = (policy.exp() * (policy - ref)).sum()
    close(kl, expected["true_KL"], 1e-6)
    close(torch.autograd.grad(kl, theta, retain_graph=True)[0], expected["grad_true_KL"], 1e-6)
    for name in ("k1", "k2", "k3"):
        mean = (
            weights * kl_per_token(policy[:, None], ref[:, None], mask, estimator=name)[:, 0]
        ).sum()
        close(mean, expected["E_value"][name], 1e-6)
        (gradient,) = torch.autograd.grad(mean, theta, retain_graph=True)
        close(gradient, expected["E_grad_as_loss"][name], 1e-6)


def test_a14_an_extreme_log_ratio_and_an_advantage_of_zero() -> None:
    given, expected = case("A14")
    new = torch.tensor([given["log_ratio"]], requires_grad=True)
    old, mask = torch.zeros(1, 2), torch.ones(1, 2)
    assert new.dtype == torch.float32
    advantages = torch.tensor([given["advantage"]])
    eps = {"epsilon_low": given["eps"], "epsilon_high": given["eps"]}

    loss, _ = policy_loss(new, old, advantages, mask, aggregation="token_mean", **eps)
    # the case wants the unclipped product; with A = 1 and log-ratio 0.1 nothing is clipped
    close(torch.autograd.grad(loss, new)[0][0], expected["grad_of_mean_wrt_log_ratio"], 1e-6)
    for slot, wanted in enumerate(expected["per_token_loss"]):
        only = torch.zeros(1, 2)
        only[0, slot] = 1
        alone, _ = policy_loss(new, old, advantages, only, aggregation="token_mean", **eps)
        close(alone, wanted, 1e-6)
    with pytest.raises(ValueError, match="logprobs must be finite at every real token; got nan"):
        policy_loss(torch.tensor([[float("nan"), 0.1]]), old, advantages, mask)


def test_a16_three_ways_to_average() -> None:
    given, expected = case("A16")
    longest = max(given["lengths"])
    mask = torch.arange(longest) < torch.tensor(given["lengths"])[:, None]
    advantages = torch.tensor(given["advantages"], dtype=torch.float64)
    logprobs = torch.zeros(2, longest, dtype=torch.float64)
    rows = {
        "GRPO": ("sequence_mean_GRPO", {"aggregation": "sequence_mean"}),
        "DAPO": ("token_mean_DAPO", {"aggregation": "token_mean"}),
        "DrGRPO": (
            "constant_divisor_DrGRPO",
            {"aggregation": "constant", "constant": given["max_len_constant"]},
        ),
    }
    for short, (name, arguments) in rows.items():
        loss, _ = policy_loss(logprobs, logprobs, advantages, mask, **arguments)
        close(loss, expected[name], 1e-12)
        values = torch.ones(2, longest, dtype=torch.float64, requires_grad=True)
        arguments = {"how": arguments["aggregation"], "constant": arguments.get("constant")}
        (weights,) = torch.autograd.grad(aggregate(values, mask, **arguments), values)
        wanted = expected["weight_of_each_token_of_seq_2"][short]
        close(weights[1], torch.full((longest,), wanted), 1e-8)


def test_a18_dropping_rows_keeps_every_row_in_its_group() -> None:
    given, expected = case("A18")
    rewards = torch.tensor(given["rewards"]).flatten()
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    kept = torch.arange(8) != given["drop_flat_index"]
    before = group_advantages(rewards, groups, ddof=1)[kept]
    close(before, expected["advantages_kept_ddof1"], 1e-6)
    # dropped first: three rows are a group of three, and the other group does not notice
    after = group_advantages(rewards[kept], groups[kept], ddof=1)
    close(after[3:], expected["advantages_kept_ddof1"][3:], 1e-6)
    close(after[:3], [2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5], 1e-6)
    second = group_advantages(rewards[4:], groups[4:], ddof=1)
    close(second, expected["advantages_kept_ddof1"][3:], 1e-6)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a19_gradient_accumulation_is_not_a_mean_of_means(accumulation: int) -> None:
    given, expected = case("A19")
    first, second = given["micro_batch_1_token_nll"], given["micro_batch_2_token_nll"]
    nll = torch.tensor([first + [0] * 4, second], dtype=torch.float64)
    mask = torch.tensor([[1] * 2 + [0] * 4, [1] * 6])
    logprobs = (-nll).requires_grad_()
    parts = [slice(0, 2)] if accumulation == 1 else [slice(0, 1), slice(1, 2)]
    total = sum(sft_loss(logprobs[part], mask[part], total=mask.sum())[0] for part in parts)
    assert isinstance(total, Tensor)
    close(total, expected["loss"], 1e-12)
    (gradient,) = torch.autograd.grad(total, logprobs)
    close(gradient, -mask / 8, 1e-12)


def test_a26_logits_are_shifted_by_one() -> None:
    given, expected = case("A26")
    logits = torch.tensor([given["probs_by_position"]]).log()
    tokens = torch.tensor([given["tokens"]])
    ours = token_logprobs(logits, tokens)
    assert ours.shape == (1, 2)  # token 0 gets no value
    close(ours[0], expected["logprob_of_token_1_and_2"], 1e-6)
    logits[0, 2] = float("nan")  # the last row is not used
    close(token_logprobs(logits, tokens)[0], expected["logprob_of_token_1_and_2"], 1e-6)


def test_a27_temperature_is_part_of_the_log_probs() -> None:
    given, expected = case("A27")
    logits = torch.tensor(given["logits"]).expand(2, 2, 2)
    tokens = torch.tensor([[0, 0], [0, 1]])
    for temperature in given["temperatures"]:
        ours = token_logprobs(logits, tokens, temperature=temperature)
        close(ours[:, 0], expected[f"logp_T{temperature:g}"], 1e-6)
    same = token_logprobs(logits, tokens, temperature=0.5)
    ratio = importance_ratio(same, same, torch.ones(2, 1))
    assert ratio[:, 0].tolist() == expected["ratio_if_both_sides_T0.5"]
    with pytest.raises(
        ValueError, match=r"temperature must be > 0: greedy decoding .* no log-prob"
    ):
        token_logprobs(logits, tokens, temperature=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a37_the_dynamic_range_of_a_rare_token(dtype: torch.dtype) -> None:
    given, expected = case("A37")
    arguments = {
        "epsilon_low": given["eps_low"],
        "epsilon_high": given["eps_high"],
        "ratio_max": given["cap"],
    }
    old = torch.tensor([given["old_prob"]], dtype=dtype).log()
    # q = 4 eps_low is where the lower end has an infinite slope: what rounding leaves of q there,
    # 1e-7 in float32, is a change of its square root
    for ends, name in zip(
        dynamic_clip_range(old, torch.ones_like(old), **arguments), ("low", "high"), strict=True
    ):
        close(ends[0], expected[name], 1e-5 if dtype == torch.float64 else 3e-4)
    # so rare that exp(log q) is 0: a log-prob of -200
    assert torch.tensor(-200.0).exp() == 0
    assert expected["underflow"].endswith("gives low 0.5 and high = cap, no NaN")
    low, high = dynamic_clip_range(
        torch.full((1, 1), -200.0, dtype=dtype), torch.ones(1, 1), **arguments
    )
    assert (low.item(), high.item()) == (0.5, given["cap"])
    with pytest.raises(ValueError, match="old_logprobs must be finite at every real token"):
        dynamic_clip_range(torch.full((1, 1), -torch.inf), torch.ones(1, 1), **arguments)


def test_f01_a_loss_of_zero_with_a_gradient() -> None:
    given, expected = case("F01")
    logits = torch.tensor(given["logits"], dtype=torch.float64, requires_grad=True)
    logprobs = token_logprobs(logits.expand(2, 2, 2), torch.tensor([[0, 0], [0, 1]]))
    loss, _ = policy_loss(logprobs, logprobs, torch.tensor([1.0, -1.0]), torch.ones(2, 1))
    assert loss.item() == expected["loss"]
    loss.backward()
    assert logits.grad is not None
    close(logits.grad, expected["grad_wrt_logits"], 1e-12)
    after = logits.detach() - logits.grad
    close(after, expected["after_one_SGD_step_lr_1"]["logits"], 1e-12)
    probability = expected["after_one_SGD_step_lr_1"]["prob_action_0"]
    assert after.softmax(0)[0].item() == pytest.approx(probability, abs=1e-8)


@pytest.mark.parametrize("updates", [1, 4])
def test_f05_nothing_is_clipped_at_the_first_update_of_a_batch(updates: int) -> None:
    _, expected = case("F05")
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[0, 0], [0, 1], [0, 2], [0, 0]])
    advantages = compute_advantages(GRPO, torch.tensor([1, 0, 0, 1]), one_group(4)).advantages
    old = token_logprobs(logits.expand(4, 2, 3), tokens).detach()  # once per batch of samples
    fractions, ratios, row = [], [], DR_GRPO
    for _ in range(updates):
        logprobs = token_logprobs(logits.expand(4, 2, 3), tokens)
        loss, stats = compute_loss(row, logprobs, old, advantages, torch.ones(4, 1), constant=1)
        fractions.append(stats["clip_ratio/region_mean"].item())
        ratios.append(importance_ratio(logprobs, old, torch.ones(4, 1)))
        (gradient,) = torch.autograd.grad(loss, logits)
        with torch.no_grad():
            logits -= gradient  # a large step
    assert fractions[0] == expected["updates_1"]["clip_fraction"]
    assert (ratios[0] == 1).all()
    assert logits.abs().max() > 0.1  # the weights did change
    if updates == 4:
        assert all(fraction > 0 for fraction in fractions[1:])


def test_f07_how_often_a_group_teaches_nothing() -> None:
    given, expected = case("F07")
    for size, wanted in zip(given["G"], expected["P_all_equal"], strict=True):
        assert probability_all_equal(given["p"], size) == pytest.approx(wanted, abs=1e-8)
        tensor = probability_all_equal(torch.tensor([given["p"]], dtype=torch.float64), size)
        close(tensor, [wanted], 1e-8)


def test_f09_the_loss_is_minus_the_objective() -> None:
    given, expected = case("F09")
    new = torch.tensor([[given["ratio"]]], dtype=torch.float64).log()
    advantages = torch.tensor([given["advantage"]], dtype=torch.float64)
    loss, _ = policy_loss(
        new,
        torch.zeros_like(new),
        advantages,
        torch.ones(1, 1),
        epsilon_low=given["eps"],
        epsilon_high=given["eps"],
    )
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-15)
    assert -loss.item() == pytest.approx(expected["objective_J"], abs=1e-15)


def test_a03_with_the_kl_term_in_the_reward() -> None:
    """RLOO's row on the group of A03: beta 0 is the plain estimator."""
    given, expected = case("A03")
    rewards, group = torch.tensor(given["rewards"]), one_group(4)
    logprobs = torch.full((4, 2), -1.0)
    ours = compute_advantages(
        RLOO,
        rewards,
        group,
        old_logprobs=logprobs,
        ref_logprobs=logprobs,
        response_mask=torch.ones(4, 2),
    )
    close(ours.advantages, expected["rloo"], 1e-6)
