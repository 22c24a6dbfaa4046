"""Bad input gets a ValueError that names the argument, what was found and what is wanted.

One line per mistake: the call, and the message that it must give (as a regular expression).
"""

# ruff: noqa: E501  (a table is read by its lines)

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlcore.algorithms import (
    DR_GRPO,
    GRPO,
    RLOO,
    Algorithm,
    by_name,
    compute_advantages,
    compute_loss,
)
from rlcore.objectives import (
    aggregate,
    batch_mean_advantages,
    entropy,
    equal_groups,
    fixed_clip_range,
    group_advantages,
    importance_ratio,
    kl_penalized_rewards,
    kl_per_token,
    largest_group_advantage,
    leave_one_out_advantages,
    policy_loss,
    probability_all_equal,
    sft_loss,
    token_logprobs,
)

R, IDS = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
LP = torch.tensor([[-1.0, -2.0, -0.5], [-0.5, -1.0, -1.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
HOLE = torch.tensor([[1, 1, 1], [0, 0, 0]])
ADV = torch.tensor([1.0, -1.0])
LOGITS, TOKENS = torch.zeros(2, 3, 5), torch.tensor([[0, 1, 2], [3, 4, 0]])
NAN_LP = LP.clone().index_put_((torch.tensor(1), torch.tensor(0)), torch.tensor(math.nan))
INF_LP = LP.clone().index_put_((torch.tensor(0), torch.tensor(2)), torch.tensor(-math.inf))
INF_R = torch.tensor([1.0, math.inf, 0.0, 0.0])

Call = Callable[[], Any]


def table(**lines: list[tuple[Call, str]]) -> list[Any]:
    return [
        pytest.param(call, message, id=f"{function}-{number}")
        for function, cases in lines.items()
        for number, (call, message) in enumerate(cases)
    ]


def of_groups(function: Callable) -> list[tuple[Call, str]]:
    """The mistakes that every function of rewards and group_ids must notice."""
    return [
        (lambda: function(R[:, None], IDS), r"rewards must be real and of shape \(B,\), B >= 1; got a tensor of shape \(4, 1\)"),
        (lambda: function(R[:0], IDS[:0]), r"rewards must be real and of shape \(B,\), B >= 1; got a tensor of shape \(0,\)"),
        (lambda: function(R.to(torch.complex64), IDS), "rewards must be real .* dtype torch.complex64"),
        (lambda: function(["yes", 0, 1, 1], IDS), r"rewards must be a tensor or a list of numbers \(None: missing\); got \['yes'"),
        (lambda: function(3.0, IDS), "rewards must be a tensor or a list of numbers .* got 3.0"),
        (lambda: function({0: 1.0, 1: 2.0}, [0, 0]), r"rewards must be a tensor or a list of numbers .*; got \{0: 1.0, 1: 2.0\} \(dict\)"),
        (lambda: function({0.0, 1.0}, [0, 0]), r"rewards must be a tensor or a list of numbers .* \(set\)"),
        (lambda: function([10**400, 0], [0, 0]), "rewards must be a tensor or a list of numbers .*; got .1000"),
        (lambda: function(R.to_sparse(), IDS), r"rewards must be real and of shape .* layout torch.sparse_coo"),
        (lambda: function(R, IDS.to_sparse()), r"group_ids must be of shape .* layout torch.sparse_coo"),
        (lambda: function(INF_R, IDS), r"rewards must be finite or missing \(NaN\); got inf in row 1"),
        (lambda: function([1, -math.inf], [0, 0]), r"rewards must be finite or missing \(NaN\); got -inf in row 1"),
        (lambda: function([1.7e308, -1.7e308], [0, 0]), r"rewards must be at most 2.25e\+307 in size, so that no sum of 2 overflows; got 1.7e\+308 in row 0"),
        (lambda: function(torch.tensor([0.0, -3e38]), [0, 0]), r"rewards must be at most 4.25e\+37 in size, .*; got -3e\+38 in row 1"),
        (lambda: function(R, IDS[:3]), r"group_ids must be of shape \(4,\), as rewards; got a tensor of shape \(3,\)"),
        (lambda: function(R, IDS.view(2, 2)), r"group_ids must be of shape \(4,\), as rewards; got a tensor of shape \(2, 2\)"),
        (lambda: function(R, IDS.float()), "group_ids must hold integers, the prompts' ids; got .* dtype torch.float32"),
        (lambda: function(R, IDS.bool()), "group_ids must hold integers, the prompts' ids; got .* dtype torch.bool"),
        (lambda: function(R, ["a", "a", "b", "b"]), r"group_ids must be a tensor or a list of integers; got \['a'"),
        (lambda: function(R, None), "group_ids must be a tensor or a list of integers; got None"),
        (lambda: function(R, torch.tensor([0, 0, 0, 7])), "group_ids: every group needs at least 2 rows to be compared; got 1 of group 7"),
        (lambda: function(R[:1], IDS[:1]), "group_ids: every group needs at least 2 rows to be compared; got 1 of group 0"),
    ]  # fmt: skip


def of_tokens(
    function: Callable, first: str, mask_name: str = "response_mask"
) -> list[tuple[Call, str]]:
    """The mistakes that every function of (first: (B, T), mask) must notice."""
    return [
        (lambda: function(LP[:, :2], MASK), rf"{first} must be a tensor of shape \(2, 3\), that of the mask; got a tensor of shape \(2, 2\)"),
        (lambda: function(LP[:1], MASK), rf"{first} must be a tensor of shape \(2, 3\), that of the mask; got a tensor of shape \(1, 3\)"),
        (lambda: function(LP.tolist(), MASK), rf"{first} must be a tensor of shape \(2, 3\), that of the mask; got \[\["),
        (lambda: function(LP.to(torch.complex64), MASK), rf"{first} must hold real numbers; got .* torch.complex64"),
        (lambda: function(LP.to_sparse(), MASK), rf"{first} must be a tensor of shape \(2, 3\), that of the mask; got .* layout torch.sparse_coo"),
        (lambda: function(NAN_LP, MASK), f"{first} must be finite at every real token; got nan in row 1, slot 0"),
        (lambda: function(INF_LP, MASK), f"{first} must be finite at every real token; got -inf in row 0, slot 2"),
        (lambda: function(LP, MASK[0]), rf"{mask_name} must be a tensor of shape \(B, T\); got a tensor of shape \(3,\)"),
        (lambda: function(LP, MASK.tolist()), rf"{mask_name} must be a tensor of shape \(B, T\); got \[\["),
        (lambda: function(LP[:0], MASK[:0]), rf"{mask_name} must hold at least one row and one slot; got shape \(0, 3\)"),
        (lambda: function(LP, MASK * 2), f"{mask_name} must hold only 0 and 1 \\(or booleans\\); got 2"),
        (lambda: function(LP, MASK * math.nan), f"{mask_name} must hold only 0 and 1 \\(or booleans\\); got nan"),
        (lambda: function(LP, MASK.to(torch.complex64)), f"{mask_name} must hold only 0 and 1 \\(or booleans\\); got .* torch.complex64"),
        (lambda: function(LP, MASK.to_sparse()), rf"{mask_name} must be a tensor of shape \(B, T\); got .* layout torch.sparse_coo"),
        (lambda: function(LP, HOLE), f"{mask_name} row 1 is empty: a response needs at least one real token"),
    ]  # fmt: skip


def loss(*arguments: Any, **options: Any) -> Any:
    given = [LP, LP, ADV, MASK]
    return policy_loss(*arguments, *given[len(arguments) :], **options)


TABLE = table(
    token_logprobs=[
        (lambda: token_logprobs(LOGITS[0], TOKENS[0]), r"logits must be floating and of shape \(B, T, V\); got a tensor of shape \(3, 5\)"),
        (lambda: token_logprobs(LOGITS.to_sparse(), TOKENS), "logits must be floating .* layout torch.sparse_coo"),
        (lambda: token_logprobs(LOGITS, TOKENS.to_sparse()), "input_ids must be of shape .* layout torch.sparse_coo"),
        (lambda: token_logprobs(LOGITS.long(), TOKENS), "logits must be floating .* dtype torch.int64"),
        (lambda: token_logprobs(LOGITS.tolist(), TOKENS), "logits must be floating"),
        (lambda: token_logprobs(LOGITS, TOKENS[:, :2]), r"input_ids must be of shape \(2, 3\), the first two of logits; got a tensor of shape \(2, 2\)"),
        (lambda: token_logprobs(LOGITS, TOKENS.tolist()), r"input_ids must be of shape \(2, 3\)"),
        (lambda: token_logprobs(LOGITS, TOKENS.float()), "input_ids must hold integers; got .* dtype torch.float32"),
        (lambda: token_logprobs(LOGITS[:, :1], TOKENS[:, :1]), "input_ids must hold at least 2 tokens a row; got 1"),
        (lambda: token_logprobs(LOGITS, TOKENS + 1), r"input_ids must lie in \[0, 4\] \(V of logits\); got 5"),
        (lambda: token_logprobs(LOGITS, TOKENS - 1), r"input_ids must lie in \[0, 4\] \(V of logits\); got -1"),
        (lambda: token_logprobs(LOGITS[:0], TOKENS[:0]), r"logits must hold at least one row and one word; got a tensor of shape \(0, 3, 5\)"),
        (lambda: token_logprobs(LOGITS, TOKENS, temperature=0), "temperature must be > 0: greedy decoding .* got 0"),
        (lambda: token_logprobs(LOGITS, TOKENS, temperature=-1.0), "temperature must be a finite number > 0; got -1.0"),
        (lambda: token_logprobs(LOGITS, TOKENS, temperature=math.nan), "temperature must be a finite number > 0; got nan"),
        (lambda: token_logprobs(LOGITS, TOKENS, temperature=math.inf), "temperature must be a finite number > 0; got inf"),
        (lambda: token_logprobs(LOGITS, TOKENS, temperature="1"), "temperature must be a finite number > 0; got '1'"),
        (lambda: token_logprobs(LOGITS, TOKENS, temperature=torch.tensor([1.0, 2.0])), r"temperature must be a finite number > 0; got a tensor of shape \(2,\)"),
        (lambda: token_logprobs(LOGITS, TOKENS, temperature=10**400), "temperature must be a finite number > 0; got 1000"),
        (lambda: token_logprobs(LOGITS, TOKENS, temperature=1e-40), "temperature must be a finite number >= 1e-30; got 1e-40"),
        (lambda: token_logprobs(LOGITS, TOKENS, temperature=True), "temperature must be a finite number > 0; got True"),
    ],
    entropy=[
        (lambda: entropy(torch.tensor(1.0)), r"logits must be floating and of shape \(..., V\); got a tensor of shape \(\)"),
        (lambda: entropy(LOGITS.to_sparse()), "logits must be floating .* layout torch.sparse_coo"),
        (lambda: entropy(LOGITS.int()), "logits must be floating .* dtype torch.int32"),
        (lambda: entropy(LOGITS[..., :0]), r"logits must have a vocabulary axis; got shape \(2, 3, 0\)"),
        (lambda: entropy(LOGITS, temperature=0.0), "temperature must be > 0: greedy"),
        (lambda: entropy(LOGITS, temperature=1e-300), "temperature must be a finite number >= 1e-30; got 1e-300"),
        (lambda: entropy(LOGITS, temperature=-2), "temperature must be a finite number > 0; got -2"),
    ],
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
    importance_ratio=[
        *of_tokens(lambda lp, m: importance_ratio(lp, LP, m), "logprobs"),
        *of_tokens(lambda lp, m: importance_ratio(LP, lp, m), "old_logprobs")[:7],
        (lambda: importance_ratio(LP, LP, MASK, level="word"), "level must be one of token, sequence, sequence_sum; got 'word'"),
        (lambda: importance_ratio(LP, LP, MASK, max_log_ratio=1e6), "max_log_ratio must be a finite number > 0 and <= 80; got 1000000.0"),
        (lambda: importance_ratio(LP, LP, MASK, max_log_ratio=0), "max_log_ratio must be a finite number > 0 and <= 80; got 0"),
    ],
    fixed_clip_range=[
        (lambda: fixed_clip_range(-0.1, 0.2), "epsilon_low must be a finite number >= 0 and <= 1; got -0.1"),
        (lambda: fixed_clip_range(1.1, 0.2), "epsilon_low must be a finite number >= 0 and <= 1; got 1.1"),
        (lambda: fixed_clip_range(0.2, -0.1), "epsilon_high must be a finite number >= 0 and <= 1e\\+30; got -0.1"),
        (lambda: fixed_clip_range(0.2, 10**400), "epsilon_high must be a finite number >= 0 and <= 1e\\+30; got 1000"),
        (lambda: fixed_clip_range(0.2, None), "epsilon_high must be a finite number >= 0 and <= 1e\\+30; got None"),
    ],
    aggregate=[
        *of_tokens(aggregate, "token_values"),
        (lambda: aggregate(LP, MASK, how="mean"), "how must be one of sequence_mean, token_mean, constant, sequence_sum; got 'mean'"),
        (lambda: aggregate(LP, MASK, how="constant"), "constant must be given to aggregate over a constant; got None"),
        (lambda: aggregate(LP, MASK, how="constant", constant=0), "constant must be a finite number >= 1e-06; got 0"),
        (lambda: aggregate(LP, MASK, how="constant", constant=1e-320), "constant must be a finite number >= 1e-06; got 1e-320"),
        (lambda: aggregate(LP, MASK, how="token_mean", constant=8), 'constant is for "constant" only; got 8 with "token_mean"'),
        (lambda: aggregate(LP, MASK, total=1), "total must be at least the 2 responses of this part; got 1"),
        (lambda: aggregate(LP, MASK, how="token_mean", total=4), "total must be at least the 5 tokens of this part; got 4"),
        (lambda: aggregate(LP, MASK, total=0), "total must be an integer >= 1; got 0"),
        (lambda: aggregate(LP, MASK, total=2.5), "total must be an integer >= 1; got 2.5"),
        (lambda: aggregate(LP, MASK, total=torch.tensor([2, 3])), r"total must be an integer >= 1; got a tensor of shape \(2,\)"),
    ],
    kl_per_token=[
        *of_tokens(lambda lp, m: kl_per_token(lp, LP, m), "logprobs"),
        *of_tokens(lambda lp, m: kl_per_token(LP, lp, m), "ref_logprobs")[:7],
        (lambda: kl_per_token(LP, LP, MASK, estimator="k4"), "estimator must be one of k1, k2, k3; got 'k4'"),
        (lambda: kl_per_token(LP, LP, MASK, max_log_ratio=1e6), "max_log_ratio must be a finite number > 0 and <= 80; got 1000000.0"),
        (lambda: kl_per_token(LP, LP, MASK, max_log_ratio=-1), "max_log_ratio must be a finite number > 0 and <= 80; got -1"),
    ],
    sft_loss=[
        *of_tokens(sft_loss, "logprobs", "mask"),
        (lambda: sft_loss(LP, MASK, aggregation="sequence_sum"), "aggregation must be one of token_mean, sequence_mean; got 'sequence_sum'"),
        (lambda: sft_loss(LP, MASK, total=3), "total must be at least the 5 tokens of this part; got 3"),
    ],
    policy_loss=[
        *of_tokens(lambda lp, m: loss(lp, LP, ADV, m), "logprobs"),
        *of_tokens(lambda lp, m: loss(LP, lp, ADV, m), "old_logprobs")[:7],
        *of_tokens(lambda lp, m: loss(ref_logprobs=lp), "ref_logprobs")[:7],
        (lambda: loss(LP, LP, R), r"advantages must be of shape \(2,\) or \(2, 3\); got a tensor of shape \(4,\)"),
        (lambda: loss(LP, LP, ADV.to_sparse()), r"advantages must be of shape \(2,\) or .* layout torch.sparse_coo"),
        (lambda: loss(LP, LP, ADV[:, None]), r"advantages must be of shape \(2,\) or \(2, 3\); got a tensor of shape \(2, 1\)"),
        (lambda: loss(LP, LP, [1, -1]), r"advantages must be of shape \(2,\) or \(2, 3\); got \[1, -1\]"),
        (lambda: loss(LP, LP, ADV * math.nan), "advantages must be finite at every real token; got nan in row 0, slot 0"),
        (lambda: loss(LP, LP, NAN_LP), "advantages must be finite at every real token; got nan in row 1, slot 0"),
        (lambda: loss(surrogate="ppo"), "surrogate must be one of clip, reinforce; got 'ppo'"),
        (lambda: loss(ratio_level="word"), "ratio_level must be one of token, sequence, sequence_sum; got 'word'"),
        (lambda: loss(aggregation="mean"), "aggregation must be one of sequence_mean, token_mean, constant, sequence_sum; got 'mean'"),
        (lambda: loss(kl_estimator="k5"), "kl_estimator must be one of k1, k2, k3; got 'k5'"),
        (lambda: loss(epsilon_low=2), "epsilon_low must be a finite number >= 0 and <= 1; got 2"),
        (lambda: loss(epsilon_high=-1), "epsilon_high must be a finite number >= 0 and <= 1e\\+30; got -1"),
        (lambda: loss(surrogate="reinforce", epsilon_high=-1), "epsilon_high must be a finite number >= 0 and <= 1e\\+30; got -1"),
        (lambda: loss(aggregation="constant"), "constant must be given to aggregate over a constant; got None"),
        (lambda: loss(constant=8), 'constant is for "constant" only; got 8 with "sequence_mean"'),
        (lambda: loss(total=1), "total must be at least the 2 responses of this part; got 1"),
        (lambda: loss(beta=0.1), "ref_logprobs must be given when beta > 0; got None with beta=0.1"),
        (lambda: loss(beta=-0.1), "beta must be a finite number >= 0 and <= 1e\\+30; got -0.1"),
        (lambda: loss(beta=-0.1, ref_logprobs=LP), "beta must be a finite number >= 0 and <= 1e\\+30; got -0.1"),
    ],
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


@pytest.mark.parametrize(("call", "message"), TABLE)
def test_bad_input(call: Call, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        call()
    assert not re.search(r"tensor\(\[\[", str(caught.value)), "a message does not print a batch"


def test_every_public_function_is_in_the_table() -> None:
    import rlcore.objectives

    functions = {
        name
        for name in rlcore.objectives.__all__
        if not name.isupper() and name not in ("EqualGroups",)
    }
    assert functions == {param.id.rsplit("-", 1)[0] for param in TABLE} - {"algorithms"}


def test_allow_empty_lets_an_empty_row_pass() -> None:
    assert aggregate(LP, HOLE, allow_empty=True).item() == pytest.approx(-3.5 / 3)
    assert importance_ratio(LP, LP, HOLE, allow_empty=True).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert kl_per_token(LP, LP * 2, HOLE, allow_empty=True)[1].tolist() == [0, 0, 0]
    assert sft_loss(LP, HOLE, allow_empty=True).item() == pytest.approx(3.5 / 3)


def test_a_one_byte_float_is_a_real_number() -> None:
    ours = group_advantages(R.to(torch.float8_e4m3fn), IDS)
    assert ours.dtype == torch.float32
    assert ours.tolist() == [1, -1, 1, -1]
    equal_groups(R.to(torch.float8_e5m2), IDS)


def test_huge_whole_numbers_count_as_the_float_they_are() -> None:
    """Python knows no limit to an int, torch does."""
    assert group_advantages(R, IDS, eps=10**30).abs().max() < 1e-29
    assert token_logprobs(LOGITS, TOKENS, temperature=10**30).shape == (2, 2)
    assert aggregate(LP, MASK, how="constant", constant=10**30).abs() < 1e-29
    assert loss(epsilon_high=10**30)[0].isfinite()


def test_the_share_of_equal_groups_is_computed_wide() -> None:
    """0.01^8 + 0.99^8, of p as bfloat16 holds it; in bfloat16 itself it comes to 0.9102."""
    p = torch.tensor([0.01], dtype=torch.bfloat16)
    ours = probability_all_equal(p, 8)
    assert isinstance(ours, torch.Tensor)
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(p.item() ** 8 + (1 - p.item()) ** 8, rel=1e-6)


def test_the_limits_keep_every_result_finite() -> None:
    apart = importance_ratio(LP * 0, LP * 1e4, MASK, max_log_ratio=80)
    assert apart.isfinite().all()
    assert kl_per_token(LP * 1e4, LP, MASK, max_log_ratio=80).isfinite().all()
    assert (
        token_logprobs(LOGITS + 1e4 * TOKENS[..., None], TOKENS, temperature=1e-30).isfinite().all()
    )


def test_an_algorithm_is_frozen() -> None:
    row: Algorithm = GRPO
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.beta = 1.0  # type: ignore[misc]
