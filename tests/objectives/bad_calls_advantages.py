"""The mistakes that rewards and advantages must notice."""

# ruff: noqa: E501  (a table is read by its lines)

import math

import torch
from bad_calls import ADV, HOLE, IDS, INF_R, LP, MASK, R, of_groups, of_tokens, table

from rlcore.objectives import (
    batch_mean_advantages,
    equal_groups,
    group_advantages,
    kl_penalized_rewards,
    largest_group_advantage,
    leave_one_out_advantages,
    probability_all_equal,
)

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
    leave_one_out_advantages=of_groups(leave_one_out_advantages),
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
    kl_penalized_rewards=[
        *of_tokens(lambda lp, m: kl_penalized_rewards(ADV, lp, LP, m, beta=0.1), "old_logprobs")[:9],
        *of_tokens(lambda lp, m: kl_penalized_rewards(ADV, LP, lp, m, beta=0.1), "ref_logprobs")[:7],
        (lambda: kl_penalized_rewards(ADV, LP, LP, HOLE, beta=0.1), "response_mask row 1 is empty"),
        (lambda: kl_penalized_rewards(R, LP, LP, MASK, beta=0.1), r"rewards must be of shape \(2,\), one per row of response_mask; got a tensor of shape \(4,\)"),
        (lambda: kl_penalized_rewards(ADV[:, None], LP, LP, MASK, beta=0.1), r"rewards must be real and of shape \(B,\)"),
        (lambda: kl_penalized_rewards([1, 0, 1], LP, LP, MASK, beta=0.1), r"rewards must be of shape \(2,\).*got a tensor of shape \(3,\)"),
        (lambda: kl_penalized_rewards(INF_R[:2], LP, LP, MASK, beta=0.1), r"rewards must be finite or missing \(NaN\); got inf in row 1"),
        (lambda: kl_penalized_rewards(ADV, LP, LP, MASK, beta=-0.1), "beta must be a finite number >= 0 and <= 1e\\+30; got -0.1"),
    ],
)  # fmt: skip
