"""The mistakes that rewards, the RLHF objective, baselines and filters must notice."""

# ruff: noqa: E501  (a table is read by its lines)

import math
from collections.abc import Callable

import torch
from bad_calls import ADV, HOLE, IDS, INF_R, LP, MASK, Call, R, of_groups, of_tokens, table

from rlcore.objectives import (
    batch_mean_advantages,
    beta_normalized_advantages,
    conditioned_rewards,
    equal_groups,
    group_advantages,
    implied_rewards,
    informative_rows,
    kl_penalized_rewards,
    kl_shaped_rewards,
    largest_group_advantage,
    leave_one_out_advantages,
    optimal_policy,
    overlong_filter,
    overlong_penalty,
    probability_all_equal,
    refill,
    regularized_value,
    self_critical_advantages,
)

EVEN = torch.full((2, 4), 0.25).log()  # two distributions over four outcomes
GAP = torch.tensor([0.5, 0.5, 0.0, 0.0]).log().expand(2, 4)  # never produces two of them
FAR = torch.tensor([0.0, -1e30])  # the second all but impossible
WORTH = torch.tensor([[1.0, 0.0, 2.0, -1.0], [0.0, 0.5, 1.0, 0.0]])
CUT = torch.tensor([True, False])


def of_pairs(function: Callable, second: str) -> list[tuple[Call, str]]:
    """The mistakes that every function of two rewards per row must notice."""
    return [
        (lambda: function(R, R[:3]), rf"{second} must be of shape \(4,\), as rewards; got a tensor of shape \(3,\)"),
        (lambda: function(R, R[:, None]), rf"{second} must be real and of shape \(B,\), B >= 1; got a tensor of shape \(4, 1\)"),
        (lambda: function(R[:, None], R), r"rewards must be real and of shape \(B,\), B >= 1; got a tensor of shape \(4, 1\)"),
        (lambda: function(R, 1.0), rf"{second} must be a tensor or a list of numbers \(None: missing\); got 1.0"),
        (lambda: function(R, INF_R), rf"{second} must be finite or missing \(NaN\); got inf in row 1"),
        (lambda: function(INF_R, R), r"rewards must be finite or missing \(NaN\); got inf in row 1"),
        (lambda: function(R, R.to(torch.complex64)), f"{second} must be real .* dtype torch.complex64"),
        (lambda: function(R, R.to("meta")), f"{second} must be on cpu, as rewards; got meta"),
    ]  # fmt: skip


def of_kl_rewards(function: Callable) -> list[tuple[Call, str]]:
    """The mistakes that both forms of the KL penalty in the reward must notice."""
    return [
        *of_tokens(lambda lp, m: function(ADV, lp, LP, m, beta=0.1), "old_logprobs")[:9],
        *of_tokens(lambda lp, m: function(ADV, LP, lp, m, beta=0.1), "ref_logprobs")[:7],
        (lambda: function(ADV, LP, LP, HOLE, beta=0.1), "response_mask row 1 is empty"),
        (lambda: function(R, LP, LP, MASK, beta=0.1), r"rewards must be of shape \(2,\), one per row of response_mask; got a tensor of shape \(4,\)"),
        (lambda: function(ADV[:, None], LP, LP, MASK, beta=0.1), r"rewards must be real and of shape \(B,\)"),
        (lambda: function([1, 0, 1], LP, LP, MASK, beta=0.1), r"rewards must be of shape \(2,\).*got a tensor of shape \(3,\)"),
        (lambda: function(INF_R[:2], LP, LP, MASK, beta=0.1), r"rewards must be finite or missing \(NaN\); got inf in row 1"),
        (lambda: function(ADV, LP * 1e30, LP, MASK, beta=1e30), r"old_logprobs must be so near to ref_logprobs that the reward less beta times the difference fits torch.float32; got inf in row 0, beta=1e\+30"),
        (lambda: function(ADV * 3e38, LP * 1e38, LP, MASK, beta=-3e-1 * -1), r"old_logprobs must be so near to ref_logprobs .* got inf in row 0, beta=0.3"),
        (lambda: function(ADV, torch.tensor([[-3e38, 0, 0], [0, 0, 0]]), torch.tensor([[0, -3e38, 0], [0, 0, 0]]), MASK, beta=2.0), "old_logprobs must be so near to ref_logprobs .* got nan in row 0, beta=2"),
        (lambda: function(ADV, LP, LP, MASK, beta=-0.1), "beta must be a finite number >= 0 and <= 1e\\+30; got -0.1"),
    ]  # fmt: skip


def of_distributions(function: Callable, first: str) -> list[tuple[Call, str]]:
    """The mistakes that functions of whole distributions and the rewards of all outcomes notice."""
    return [
        (lambda: function(EVEN.exp(), WORTH), f"{first} must hold log-probabilities, <= 0; got 0.25"),
        (lambda: function(EVEN - 1, WORTH), f"{first} must be a distribution over its last axis, .* got a sum of 0.367"),
        (lambda: function(EVEN[:, :3], WORTH[:, :3]), f"{first} must be a distribution .* got a sum of 0.75"),
        (lambda: function(EVEN * math.nan, WORTH), f"{first} must hold log-probabilities, <= 0; got nan"),
        (lambda: function(EVEN.to(torch.complex64), WORTH), f"{first} must be a real tensor of at least 1 axis .* torch.complex64"),
        (lambda: function(EVEN.tolist(), WORTH), rf"{first} must be a real tensor of at least 1 axis and 1 outcome; got \[\["),
        (lambda: function(EVEN[0, 0], WORTH[0, 0]), rf"{first} must be a real tensor of at least 1 axis .* shape \(\)"),
        (lambda: function(EVEN.to_sparse(), WORTH), f"{first} must be a real tensor .* layout torch.sparse_coo"),
        (lambda: function(EVEN, WORTH[0]), r"rewards must be a real tensor of shape \(2, 4\), one per outcome; got a tensor of shape \(4,\)"),
        (lambda: function(EVEN, WORTH.tolist()), r"rewards must be a real tensor of shape \(2, 4\), one per outcome; got \[\["),
        (lambda: function(EVEN, WORTH * math.nan), "rewards must be finite for every possible outcome; got nan"),
        (lambda: function(EVEN, WORTH * math.inf), "rewards must be finite for every possible outcome; got inf"),
        (lambda: function(EVEN, WORTH.to("meta")), "rewards must be on cpu; got meta"),
    ]  # fmt: skip


TABLE = table(
    group_advantages=[
        *of_groups(group_advantages),
        (lambda: group_advantages(R, IDS, scale="std"), "scale must be one of group, batch, none; got 'std'"),
        (lambda: group_advantages(R, IDS, ddof=2), r"ddof must be 0 \(population std\) or 1 \(sample std\); got 2"),
        (lambda: group_advantages(R, IDS, ddof=True), r"ddof must be 0 .* or 1 .*; got True"),
        (lambda: group_advantages(R, IDS, ddof=torch.tensor([0, 1])), r"ddof must be 0 .* or 1 .*; got a tensor of shape \(2,\)"),
        (lambda: group_advantages(R, IDS, eps=10**400), "eps must be a finite number >= 0; got 1000"),
        (lambda: group_advantages(R, IDS, eps=-1e-4), "eps must be a finite number >= 0; got -0.0001"),
        (lambda: group_advantages(R, IDS, eps=math.nan), "eps must be a finite number >= 0; got nan"),
    ],
    leave_one_out_advantages=[
        *of_groups(leave_one_out_advantages),
        (lambda: leave_one_out_advantages(R, torch.tensor([0, 0, 2**63, 2**63], dtype=torch.uint64)), r"group_ids must be below 2\*\*63; got .* torch.uint64"),
        (lambda: leave_one_out_advantages(R, b"aabb"), "group_ids must be a tensor or a list of integers; got b'aabb'"),
        (lambda: leave_one_out_advantages(R, {0, 1}), r"group_ids must be a tensor or a list of integers; got \{0, 1\}"),
    ],
    equal_groups=of_groups(equal_groups),
    batch_mean_advantages=[
        (lambda: batch_mean_advantages(R[:1]), "rewards must hold at least 2 rows for a batch mean; got 1"),
        (lambda: batch_mean_advantages(R.view(2, 2)), r"rewards must be real and of shape \(B,\)"),
        (lambda: batch_mean_advantages(INF_R), "rewards must be finite or missing .* got inf in row 1"),
        (lambda: batch_mean_advantages([1.7e308, -1.7e308]), r"rewards must be at most 2.25e\+307 in size"),
        (lambda: batch_mean_advantages("1234"), "rewards must be a tensor or a list of numbers .* got '1234'"),
    ],
    probability_all_equal=[
        (lambda: probability_all_equal(1.5, 8), r"p must be a probability, in \[0, 1\]; got 1.5"),
        (lambda: probability_all_equal(math.nan, 8), r"p must be a probability, in \[0, 1\]; got nan"),
        (lambda: probability_all_equal(torch.tensor([0.5, -0.1]), 8), r"p must be a probability, in \[0, 1\]; got a tensor of shape \(2,\)"),
        (lambda: probability_all_equal("0.5", 8), r"p must be a probability, in \[0, 1\]; got '0.5'"),
        (lambda: probability_all_equal(10**400, 8), r"p must be a probability, in \[0, 1\]; got 1000"),
        (lambda: probability_all_equal(torch.tensor([0.5j]), 8), r"p must be a probability, in \[0, 1\]; got .* torch.complex64"),
        (lambda: probability_all_equal(torch.tensor([0.5]).to_sparse(), 8), r"p must be a probability, in \[0, 1\]; got .* layout torch.sparse_coo"),
        (lambda: probability_all_equal(torch.tensor([0.5], device="meta"), 8), r"p must be a probability, in \[0, 1\]; got a tensor of shape \(1,\)"),
        (lambda: probability_all_equal(True, 8), r"p must be a probability, in \[0, 1\]; got True"),
        (lambda: probability_all_equal(torch.tensor(math.nan).to(torch.float8_e4m3fn), 8), r"p must be a probability, in \[0, 1\]; got .*float8"),
        (lambda: probability_all_equal(0.5, 10**400), "group_size must be an integer below 2\\*\\*53; got 1000"),
        (lambda: probability_all_equal(0.5, 1), "group_size must be an integer >= 2; got 1"),
        (lambda: probability_all_equal(0.5, 2.5), "group_size must be an integer >= 2; got 2.5"),
    ],
    largest_group_advantage=[
        (lambda: largest_group_advantage(1), "group_size must be an integer >= 2; got 1"),
        (lambda: largest_group_advantage(True), "group_size must be an integer >= 2; got True"),
        (lambda: largest_group_advantage(10**400), "group_size must be an integer below 2\\*\\*53; got 1000"),
        (lambda: largest_group_advantage(8, ddof=True), r"ddof must be 0 .* or 1 .*; got True"),
        (lambda: largest_group_advantage("8"), "group_size must be an integer >= 2; got '8'"),
        (lambda: largest_group_advantage(8, ddof=-1), r"ddof must be 0 .* or 1 .*; got -1"),
    ],
    kl_penalized_rewards=of_kl_rewards(kl_penalized_rewards),
    kl_shaped_rewards=of_kl_rewards(kl_shaped_rewards),
    conditioned_rewards=[
        *of_pairs(lambda r, c: conditioned_rewards(r, c, threshold=0.5), "condition"),
        (lambda: conditioned_rewards(R, R, threshold=math.nan), "threshold must be a finite number; got nan"),
        (lambda: conditioned_rewards(R, R, threshold="1"), "threshold must be a finite number; got '1'"),
    ],
    overlong_penalty=[
        (lambda: overlong_penalty(R, max_length=100, cache_length=20), r"lengths must hold integers \(counts of tokens\); got .* torch.float32"),
        (lambda: overlong_penalty(R.bool(), max_length=100, cache_length=20), r"lengths must hold integers \(counts of tokens\); got .* torch.bool"),
        (lambda: overlong_penalty(["a text"], max_length=100, cache_length=20), "lengths must be a tensor or a list of integers; got .'a text'"),
        (lambda: overlong_penalty(5, max_length=100, cache_length=20), r"lengths must be of shape \(B,\), B >= 1; got a tensor of shape \(\)"),
        (lambda: overlong_penalty([], max_length=100, cache_length=20), r"lengths must be of shape \(B,\), B >= 1; got a tensor of shape \(0,\)"),
        (lambda: overlong_penalty([3, -1], max_length=100, cache_length=20), "lengths must be >= 0; got -1 in row 1"),
        (lambda: overlong_penalty(torch.tensor([3, 2**63], dtype=torch.uint64), max_length=100, cache_length=20), r"lengths must be below 2\*\*63; got .* torch.uint64"),
        (lambda: overlong_penalty({3, 4}, max_length=100, cache_length=20), r"lengths must be a tensor or a list of integers; got \{3, 4\}"),
        (lambda: overlong_penalty(torch.tensor([3], device="meta"), max_length=100, cache_length=20), r"lengths must be of shape \(B,\), B >= 1, and hold data; got a tensor of shape \(1,\)"),
        (lambda: overlong_penalty([3], max_length=100, cache_length=120), "cache_length must be at most max_length = 100, .*; got 120"),
        (lambda: overlong_penalty([3], max_length=100, cache_length=-1), "cache_length must be an integer >= 0; got -1"),
        (lambda: overlong_penalty([3], max_length=100, cache_length=0.2), "cache_length must be an integer >= 0; got 0.2"),
        (lambda: overlong_penalty([3], max_length=0, cache_length=0), "max_length must be an integer >= 1; got 0"),
    ],
    optimal_policy=[
        *of_distributions(lambda lp, r: optimal_policy(lp, r, beta=0.5), "ref_logprobs"),
        (lambda: optimal_policy(EVEN, WORTH, beta=0), r"beta must be a finite number >= 1e-30 and <= 1e\+30; got 0"),
        (lambda: optimal_policy(EVEN, WORTH * 1e5, beta=1e-30), r"rewards must be at most 1e30 beta in size; got 200000, beta=1e-30"),
    ],
    regularized_value=[
        *of_distributions(lambda lp, r: regularized_value(lp, EVEN, r, beta=0.5), "logprobs"),
        (lambda: regularized_value(EVEN, EVEN - 1, WORTH, beta=0.5), "ref_logprobs must be a distribution over its last axis"),
        (lambda: regularized_value(EVEN, EVEN[:1], WORTH, beta=0.5), r"ref_logprobs must be a real tensor of shape \(2, 4\); got a tensor of shape \(1, 4\)"),
        (lambda: regularized_value(EVEN, EVEN.to("meta"), WORTH, beta=0.5), "ref_logprobs must be on cpu, as logprobs; got meta"),
        (lambda: regularized_value(EVEN, GAP, WORTH, beta=0.5), "ref_logprobs must be finite wherever logprobs is .*; got -inf"),
        (lambda: regularized_value(FAR, FAR.flip(0), FAR * 0, beta=1e30), r"logprobs must be so near to ref_logprobs that the value fits torch.float32; got nan, beta=1e\+30"),
        (lambda: regularized_value(FAR.flip(0), FAR, FAR * 0, beta=1e30), r"logprobs must be so near to ref_logprobs that the value fits torch.float32; got nan, beta=1e\+30"),
        (lambda: regularized_value(EVEN, EVEN, WORTH, beta=-0.1), r"beta must be a finite number >= 0 and <= 1e\+30; got -0.1"),
    ],
    implied_rewards=[
        (lambda: implied_rewards(EVEN, EVEN[0], beta=0.5), r"ref_logprobs must be a real tensor of shape \(2, 4\); got a tensor of shape \(4,\)"),
        (lambda: implied_rewards(EVEN.exp(), EVEN, beta=0.5), "logprobs must hold log-probabilities, <= 0; got 0.25"),
        (lambda: implied_rewards(EVEN, EVEN * math.nan, beta=0.5), "ref_logprobs must hold log-probabilities, <= 0; got nan"),
        (lambda: implied_rewards(EVEN, GAP, beta=0.5), "ref_logprobs must be finite wherever logprobs is .*; got -inf"),
        (lambda: implied_rewards(GAP, EVEN, beta=0.5), "logprobs must be finite wherever ref_logprobs is .*; got -inf"),
        (lambda: implied_rewards(EVEN, EVEN, beta=0.0), r"beta must be a finite number >= 1e-30 and <= 1e\+30; got 0.0"),
        (lambda: implied_rewards(EVEN, EVEN, beta=0.5, log_partition=math.inf), "log_partition must be a finite number; got inf"),
        (lambda: implied_rewards(EVEN, EVEN, beta=0.5, log_partition=R), r"log_partition must be a finite number or tensor of shape \(2, 4\) or \(2,\); got a tensor of shape \(4,\)"),
        (lambda: implied_rewards(EVEN, EVEN, beta=0.5, log_partition=ADV * 1j), "log_partition must be a finite number or tensor .* torch.complex64"),
        (lambda: implied_rewards(EVEN, EVEN, beta=0.5, log_partition=ADV.to_sparse()), "log_partition must be a finite number or tensor .* layout torch.sparse_coo"),
        (lambda: implied_rewards(EVEN, EVEN, beta=0.5, log_partition=ADV.to("meta")), "log_partition must be a finite number or tensor"),
        (lambda: implied_rewards(EVEN, EVEN, beta=0.5, log_partition=1e308), "log_partition must be so small that beta times it fits torch.float32; got a reward of inf, beta=0.5"),
        (lambda: implied_rewards(EVEN, EVEN, beta=1e30, log_partition=ADV * 1e30), r"log_partition must be so small that beta times it fits torch.float32; got a reward of inf, beta=1e\+30"),
        (lambda: implied_rewards(EVEN, EVEN, beta=1e30, log_partition=ADV.double() * 1e308), r"log_partition must be so small that beta times it fits torch.float64; got a reward of inf, beta=1e\+30"),
        (lambda: implied_rewards(torch.tensor([-1e20]), torch.tensor([-1.0]), beta=1e30), r"logprobs must be so near to ref_logprobs that the rewards fit torch.float32; got -inf, beta=1e\+30"),
        (lambda: implied_rewards(torch.tensor([-1.0]), torch.tensor([-1e20]), beta=1e30), r"logprobs must be so near to ref_logprobs that the rewards fit torch.float32; got inf, beta=1e\+30"),
        (lambda: implied_rewards(EVEN.to("meta"), EVEN.to("meta"), beta=0.5), "logprobs must be a real tensor .* got a tensor of shape"),
        (lambda: implied_rewards(EVEN, EVEN, beta=0.5, log_partition=ADV * math.nan), "log_partition must be a finite number or tensor"),
    ],
    self_critical_advantages=[
        *of_pairs(self_critical_advantages, "greedy_rewards"),
        (lambda: self_critical_advantages([1.7e308], [-1.7e308]), r"rewards must be at most 4.49e\+307 in size, so that no sum of 1 overflows; got 1.7e\+308 in row 0"),
        (lambda: self_critical_advantages(R, R - 3e38), r"greedy_rewards must be at most 2.13e\+37 in size, .*; got -3e\+38 in row 0"),
    ],
    beta_normalized_advantages=[
        *of_groups(beta_normalized_advantages),
        (lambda: beta_normalized_advantages(R * 2, IDS), r"rewards must be in \[0, 1\], mean rewards being success rates; got 2"),
        (lambda: beta_normalized_advantages(R - 1, IDS), r"rewards must be in \[0, 1\], mean rewards being success rates; got -1"),
        (lambda: beta_normalized_advantages(R, IDS, max_weight=0), r"max_weight must be a finite number > 0 and <= 1e\+30; got 0"),
    ],
    informative_rows=[
        *of_groups(informative_rows),
        (lambda: informative_rows(R, IDS, wanted=-1), "wanted must be an integer >= 0; got -1"),
        (lambda: informative_rows(R, IDS, wanted=0.5), "wanted must be an integer >= 0; got 0.5"),
    ],
    overlong_filter=[
        (lambda: overlong_filter(MASK, R.bool()), r"truncated must be a tensor of shape \(2,\), one per row of response_mask; got a tensor of shape \(4,\)"),
        (lambda: overlong_filter(MASK, [True, False]), r"truncated must be a tensor of shape \(2,\), .*; got \[True, False\]"),
        (lambda: overlong_filter(MASK, CUT[:, None]), r"truncated must be a tensor of shape \(2,\), .*; got a tensor of shape \(2, 1\)"),
        (lambda: overlong_filter(MASK, CUT.float()), "truncated must hold booleans; got .* torch.float32"),
        (lambda: overlong_filter(MASK, CUT.to("meta")), "truncated must be on cpu, as response_mask; got meta"),
        (lambda: overlong_filter(MASK * 2, CUT), r"response_mask must hold only 0 and 1 \(or booleans\); got 2"),
        (lambda: overlong_filter(MASK[0], CUT), r"response_mask must be a tensor of shape \(B, T\); got a tensor of shape \(3,\)"),
    ],
    refill=[
        (lambda: refill(-1, 4, 1, max_rounds=10), "kept must be an integer >= 0; got -1"),
        (lambda: refill(0.5, 4, 1, max_rounds=10), "kept must be an integer >= 0; got 0.5"),
        (lambda: refill(0, 0, 1, max_rounds=10), "wanted must be an integer >= 1; got 0"),
        (lambda: refill(0, 4, -1, max_rounds=10), "rounds must be an integer >= 0; got -1"),
        (lambda: refill(0, 4, 1, max_rounds=0), "max_rounds must be an integer >= 1; got 0"),
        (lambda: refill(0, 4, True, max_rounds=10), "rounds must be an integer >= 0; got True"),
    ],
)  # fmt: skip
