"""The mistakes that the rows of rlcore.algorithms must notice."""

# ruff: noqa: E501  (a table is read by its lines)

import dataclasses
import math

import torch
from bad_calls import ADV, IDS, LP, MASK, R, table

from rlcore.algorithms import DR_GRPO, GRPO, RLOO, by_name, compute_advantages, compute_loss

TABLE = table(
    algorithms=[
        (lambda: by_name("ppo2"), "algorithm must be one of reinforce, rloo, grpo, dr-grpo, grpo-mean-only; got 'ppo2'"),
        (lambda: by_name([]), r"algorithm must be one of reinforce, .*; got \[\]"),
        (lambda: dataclasses.replace(GRPO, ddof=True), r"ddof must be 0 .* or 1 .*; got True"),
        (lambda: dataclasses.replace(GRPO, kl=torch.ones(2)), "kl must be one of none, reward, loss; got"),
        (lambda: dataclasses.replace(GRPO, advantage="median"), "advantage must be one of batch_mean, leave_one_out, group_mean, group_zscore; got 'median'"),
        (lambda: dataclasses.replace(GRPO, reward="coin"), "reward must be one of verifier; got 'coin'"),
        (lambda: dataclasses.replace(GRPO, ddof=3), r"ddof must be 0 .* or 1 .*; got 3"),
        (lambda: dataclasses.replace(GRPO, surrogate="none"), "surrogate must be one of clip, reinforce; got 'none'"),
        (lambda: dataclasses.replace(GRPO, ratio_level="word"), "ratio_level must be one of token, sequence, sequence_sum; got 'word'"),
        (lambda: dataclasses.replace(GRPO, aggregation="mean"), "aggregation must be one of sequence_mean, .*; got 'mean'"),
        (lambda: dataclasses.replace(GRPO, kl="both"), "kl must be one of none, reward, loss; got 'both'"),
        (lambda: dataclasses.replace(GRPO, kl_estimator="k0"), "kl_estimator must be one of k1, k2, k3; got 'k0'"),
        (lambda: dataclasses.replace(GRPO, epsilon_low=-1), "epsilon_low must be a finite number >= 0 and <= 1; got -1"),
        (lambda: dataclasses.replace(GRPO, eps=-1), "eps must be a finite number >= 0; got -1"),
        (lambda: dataclasses.replace(GRPO, beta=math.nan), "beta must be a finite number >= 0 and <= 1e\\+30; got nan"),
        (lambda: dataclasses.replace(DR_GRPO, beta=0.1), 'beta must be 0 when kl="none"; got 0.1'),
        (lambda: dataclasses.replace(RLOO, kl_estimator="k3"), "kl_estimator must be k1 when kl=\"reward\"; got 'k3'"),
        (lambda: compute_advantages(RLOO, R, IDS), r"old_logprobs, ref_logprobs and response_mask must be given: rloo has its KL term in the reward \(beta=0.03\); got None"),
        (lambda: compute_advantages(GRPO, R[:1], IDS[:1]), "group_ids: every group needs at least 2 rows"),
        (lambda: compute_loss(GRPO, LP, LP, ADV, MASK), "ref_logprobs must be given when beta > 0; got None with beta=0.04"),
        (lambda: compute_loss(DR_GRPO, LP, LP, ADV, MASK), "constant must be given to aggregate over a constant; got None"),
    ],
)  # fmt: skip
