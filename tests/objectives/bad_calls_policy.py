"""The mistakes that log-probs, ratios, aggregation, KL and the losses must notice."""

# ruff: noqa: E501  (a table is read by its lines)

import math
from typing import Any

import torch
from bad_calls import ADV, LOGITS, LP, MASK, NAN_LP, TOKENS, R, of_tokens, table

from rlcore.objectives import (
    aggregate,
    entropy,
    fixed_clip_range,
    importance_ratio,
    kl_per_token,
    policy_loss,
    sft_loss,
    token_logprobs,
)


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
)  # fmt: skip
