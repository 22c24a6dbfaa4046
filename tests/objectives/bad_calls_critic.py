"""The mistakes that the critic, the smoothed and the decoupled advantages must notice."""

# ruff: noqa: E501  (a table is read by its lines)

import math
from typing import Any

import torch
from bad_calls import ADV, IDS, INF_R, LP, MASK, R, of_groups, of_tokens, table

from rlcore.objectives import (
    RewardHistory,
    decoupled_advantages,
    generalized_advantages,
    length_adaptive_lam,
    smoothed_advantages,
    value_loss,
    whiten,
)

TWO = torch.stack([R, R.flip(0)], dim=1)
HISTORY = smoothed_advantages(R, IDS).history


def gae(**options: Any) -> Any:
    return generalized_advantages(LP, LP, MASK, **options)


def fit(**options: Any) -> Any:
    return value_loss(LP, LP, MASK, **options)


def smooth(**changed: Any) -> Any:
    return smoothed_advantages(R, IDS, HISTORY._replace(**changed))


def apart(**options: Any) -> Any:
    return decoupled_advantages(TWO, IDS, **options)


TABLE = table(
    generalized_advantages=[
        *of_tokens(lambda x, m: generalized_advantages(x, LP, m), "token_rewards"),
        *of_tokens(lambda x, m: generalized_advantages(LP, x, m), "values")[:7],
        (lambda: generalized_advantages(LP * 1e38, LP, MASK), r"token_rewards must be at most 1.42e\+37 in size, so that no sum overflows; got -1e\+38 in row 0, slot 0"),
        (lambda: generalized_advantages(LP, LP * 1e38, MASK), r"values must be at most 1.42e\+37 in size, so that no sum overflows; got -1e\+38 in row 0, slot 0"),
        (lambda: gae(gamma=1.01), "gamma must be a finite number >= 0 and <= 1; got 1.01"),
        (lambda: gae(gamma=-0.1), "gamma must be a finite number >= 0 and <= 1; got -0.1"),
        (lambda: gae(gamma=math.nan), "gamma must be a finite number >= 0 and <= 1; got nan"),
        (lambda: gae(gamma=ADV), r"gamma must be a finite number >= 0 and <= 1; got a tensor of shape \(2,\)"),
        (lambda: gae(lam=1.5), "lam must be a finite number >= 0 and <= 1; got 1.5"),
        (lambda: gae(lam=None), "lam must be a finite number >= 0 and <= 1; got None"),
        (lambda: gae(lam=[0.9, 0.9]), r"lam must be a finite number >= 0 and <= 1; got \[0.9, 0.9\]"),
        (lambda: gae(lam=torch.tensor(0.9)), r"lam must be real and of shape \(2,\), one per row of response_mask; got a tensor of shape \(\)"),
        (lambda: gae(lam=R), r"lam must be real and of shape \(2,\), one per row of response_mask; got a tensor of shape \(4,\)"),
        (lambda: gae(lam=LP), r"lam must be real and of shape \(2,\), one per row of response_mask; got a tensor of shape \(2, 3\)"),
        (lambda: gae(lam=torch.tensor([0.9, math.nan])), "lam must be finite; got nan in row 1"),
        (lambda: gae(lam=torch.tensor([0.9, -0.25])), r"lam must be in \[0, 1\]; got -0.25 in row 1"),
        (lambda: gae(lam=torch.tensor([1.5, 0.9])), r"lam must be in \[0, 1\]; got 1.5 in row 0"),
        (lambda: gae(lam=ADV.to("meta")), "lam must be on cpu, as the mask; got meta"),
        (lambda: gae(bootstrap_values=1.0), r"bootstrap_values must be real and of shape \(2,\), one per row of response_mask; got 1.0"),
        (lambda: gae(bootstrap_values=ADV[:, None]), r"bootstrap_values must be real and of shape \(2,\), one per row of response_mask; got a tensor of shape \(2, 1\)"),
        (lambda: gae(bootstrap_values=ADV.to(torch.complex64)), r"bootstrap_values must be real and of shape .* torch.complex64"),
        (lambda: gae(bootstrap_values=ADV.to_sparse()), r"bootstrap_values must be real and of shape .* layout torch.sparse_coo"),
        (lambda: gae(bootstrap_values=INF_R[:2]), "bootstrap_values must be finite; got inf in row 1"),
        (lambda: gae(bootstrap_values=ADV.double() * 1e38), r"bootstrap_values must be at most 1.42e\+37 in size, so that no sum overflows; got 1e\+38 in row 0"),
        (lambda: gae(bootstrap_values=ADV.to("meta")), "bootstrap_values must be on cpu, as the mask; got meta"),
    ],
    whiten=[
        *of_tokens(whiten, "values", "mask")[:14],
        (lambda: whiten(LP * 1e38, MASK), r"values must be at most 1.42e\+37 in size, so that no sum overflows; got -1e\+38 in row 0, slot 0"),
        (lambda: whiten(LP, MASK, ddof=2), r"ddof must be 0 \(population std\) or 1 \(sample std\); got 2"),
        (lambda: whiten(LP, MASK, ddof=True), r"ddof must be 0 .* or 1 .*; got True"),
        (lambda: whiten(LP, MASK, eps=-1e-8), "eps must be a finite number >= 0; got -1e-08"),
        (lambda: whiten(LP, MASK, eps=math.inf), "eps must be a finite number >= 0; got inf"),
    ],
    value_loss=[
        *of_tokens(lambda x, m: value_loss(x, LP, m), "values"),
        *of_tokens(lambda x, m: value_loss(LP, x, m), "returns")[:7],
        *of_tokens(lambda x, m: value_loss(LP, LP, m, old_values=x, epsilon=0.2), "old_values")[:7],
        (lambda: value_loss(LP * 1e20, LP, MASK), r"values must be at most 9.41e\+17 in size, so that no sum overflows; got -1e\+20 in row 0, slot 0"),
        (lambda: value_loss(LP, LP * 1e20, MASK), r"returns must be at most 9.41e\+17 in size, so that no sum overflows; got -1e\+20 in row 0, slot 0"),
        (lambda: value_loss(LP * 4e17, LP, MASK, aggregation="constant", constant=1e-6), r"values must be at most 9.41e\+14 in size, so that no sum overflows; got -4e\+17 in row 0, slot 0"),
        (lambda: value_loss(LP, LP * 4e17, MASK, aggregation="constant", constant=1e-6), r"returns must be at most 9.41e\+14 in size, so that no sum overflows; got -4e\+17 in row 0, slot 0"),
        (lambda: fit(old_values=LP * 1e20, epsilon=0.2), r"old_values must be at most 9.41e\+17 in size, so that no sum overflows; got -1e\+20 in row 0, slot 0"),
        (lambda: fit(epsilon=0.2), "old_values must be given to clip; got None with epsilon=0.2"),
        (lambda: fit(old_values=LP, epsilon=-0.2), r"epsilon must be a finite number >= 0 and <= 1e\+30; got -0.2"),
        (lambda: fit(old_values=LP, epsilon=math.nan), r"epsilon must be a finite number >= 0 and <= 1e\+30; got nan"),
        (lambda: fit(old_values=LP, epsilon="0.2"), r"epsilon must be a finite number >= 0 and <= 1e\+30; got '0.2'"),
        (lambda: fit(aggregation="mean"), "aggregation must be one of sequence_mean, token_mean, .*; got 'mean'"),
        (lambda: fit(aggregation="constant"), "constant must be given to aggregate over a constant; got None"),
        (lambda: fit(constant=3.0), 'constant is for "constant" only; got 3.0.* with "token_mean"'),
        (lambda: fit(total=4), "total must be at least the 5 tokens of this part; got 4"),
        (lambda: fit(total=0.5), "total must be an integer >= 1; got 0.5"),
    ],
    length_adaptive_lam=[
        (lambda: length_adaptive_lam([40, -2]), "lengths must be >= 0; got -2 in row 1"),
        (lambda: length_adaptive_lam(torch.tensor([-1, 3])), "lengths must be >= 0; got -1 in row 0"),
        (lambda: length_adaptive_lam(R), r"lengths must hold integers \(counts of tokens\); got .* dtype torch.float32"),
        (lambda: length_adaptive_lam(MASK), r"lengths must be of shape \(B,\), B >= 1; got a tensor of shape \(2, 3\)"),
        (lambda: length_adaptive_lam(IDS.bool()), "lengths must hold integers .* dtype torch.bool"),
        (lambda: length_adaptive_lam(IDS.to_sparse()), r"lengths must be of shape .* layout torch.sparse_coo"),
        (lambda: length_adaptive_lam([]), r"lengths must be of shape \(B,\), B >= 1; got a tensor of shape \(0,\)"),
        (lambda: length_adaptive_lam(40), r"lengths must be of shape \(B,\), B >= 1; got a tensor of shape \(\)"),
        (lambda: length_adaptive_lam(["a"]), r"lengths must be a tensor or a list of integers; got \['a'\]"),
        (lambda: length_adaptive_lam([40], alpha=0), "alpha must be a finite number > 0; got 0"),
        (lambda: length_adaptive_lam([40], alpha=-1.0), "alpha must be a finite number > 0; got -1.0"),
        (lambda: length_adaptive_lam([40], alpha=math.nan), "alpha must be a finite number > 0; got nan"),
    ],
    smoothed_advantages=[
        *of_groups(smoothed_advantages),
        (lambda: smoothed_advantages([1e151, 0.0], [0, 0]), r"rewards must be at most 1e\+150 in size, so that a variance can be kept; got 1e\+151 in row 0"),
        (lambda: smoothed_advantages(R, IDS, ddof=2), r"ddof must be 0 \(population std\) or 1 \(sample std\); got 2"),
        (lambda: smoothed_advantages(R, IDS, {}), r"history must be a RewardHistory or None; got \{\}"),
        (lambda: smoothed_advantages(R, IDS, tuple(HISTORY)), "history must be a RewardHistory or None; got "),
        (lambda: smooth(group_ids=[0, 1]), r"history.group_ids must be of shape \(P,\) and dtype torch.int64; got \[0, 1\]"),
        (lambda: smooth(group_ids=HISTORY.group_ids.float()), r"history.group_ids must be of shape \(P,\) and dtype torch.int64; got .* dtype torch.float32"),
        (lambda: smooth(group_ids=HISTORY.group_ids[None]), r"history.group_ids must be of shape \(P,\) and dtype torch.int64; got a tensor of shape \(1, 2\)"),
        (lambda: smooth(group_ids=HISTORY.group_ids.flip(0)), "history.group_ids must be ascending; got 0 at index 1"),
        (lambda: smooth(group_ids=HISTORY.group_ids * 0), "history.group_ids must be ascending; got 0 at index 1"),
        (lambda: smooth(visits=HISTORY.visits[:1]), r"history.visits must be of shape \(2,\), as its group_ids; got a tensor of shape \(1,\)"),
        (lambda: smooth(visits=HISTORY.visits * 0), "history.visits must be >= 1; got 0 at index 0"),
        (lambda: smooth(visits=HISTORY.mean), r"history.visits must be of shape \(P,\) and dtype torch.int64; got .* dtype torch.float64"),
        (lambda: smooth(mean=HISTORY.mean.float()), r"history.mean must be of shape \(P,\) and dtype torch.float64; got .* dtype torch.float32"),
        (lambda: smooth(mean=HISTORY.mean * math.nan), r"history.mean must be at most 1e\+150 in size; got nan at index 0"),
        (lambda: smooth(mean=HISTORY.mean.to_sparse()), r"history.mean must be of shape .* layout torch.sparse_coo"),
        (lambda: smooth(variance=HISTORY.variance - 1), r"history.variance must be in \[0, 1e\+300\]; got -0.75 at index 0"),
        (lambda: smooth(variance=HISTORY.variance * math.inf), r"history.variance must be in \[0, 1e\+300\]; got inf at index 0"),
        (lambda: smooth(mean=HISTORY.mean.to("meta")), r"history.mean must be of shape \(P,\) and dtype torch.float64; got .* no values"),
        (lambda: smooth(variance=None), r"history.variance must be of shape \(P,\) and dtype torch.float64; got None"),
        (lambda: smoothed_advantages(R, IDS, RewardHistory(*([None] * 4))), r"history.group_ids must be of shape \(P,\) and dtype torch.int64; got None"),
    ],
    decoupled_advantages=[
        *of_groups(lambda r, ids: decoupled_advantages(torch.stack([r, r], dim=1), ids))[14:],
        (lambda: decoupled_advantages(R, IDS), r"rewards must be real and of shape \(B, n\), B and n >= 1; got a tensor of shape \(4,\)"),
        (lambda: decoupled_advantages(TWO[:0], IDS[:0]), r"rewards must be real and of shape \(B, n\), B and n >= 1; got a tensor of shape \(0, 2\)"),
        (lambda: decoupled_advantages(TWO[:, :0], IDS), r"rewards must be real and of shape \(B, n\), B and n >= 1; got a tensor of shape \(4, 0\)"),
        (lambda: decoupled_advantages(TWO.to(torch.complex64), IDS), "rewards must be real .* dtype torch.complex64"),
        (lambda: decoupled_advantages(TWO.to_sparse(), IDS), "rewards must be real .* layout torch.sparse_coo"),
        (lambda: decoupled_advantages([1.0, 0.0], [0, 0]), r"rewards must be a tensor or B lists of n numbers \(None: missing\); got \[1.0, 0.0\]"),
        (lambda: decoupled_advantages([[1.0, 0.0], [1.0]], [0, 0]), "rewards must be a tensor or B lists of n numbers .*; got "),
        (lambda: decoupled_advantages([["a"], [1.0]], [0, 0]), "rewards must be a tensor or B lists of n numbers .*; got "),
        (lambda: decoupled_advantages([{1.0, 2.0}, {3.0, 4.0}], [0, 0]), r"rewards must be a tensor or B lists of n numbers .*; got \[\{1.0, 2.0\}, "),
        (lambda: decoupled_advantages([{1: 0}, {2: 0}], [0, 0]), r"rewards must be a tensor or B lists of n numbers .*; got \[\{1: 0\}, "),
        (lambda: decoupled_advantages({(1.0,), (2.0,)}, [0, 0]), "rewards must be a tensor or B lists of n numbers .*; got "),
        (lambda: decoupled_advantages({(1.0,): 0, (2.0,): 0}, [0, 0]), "rewards must be a tensor or B lists of n numbers .*; got "),
        (lambda: decoupled_advantages([b"ab", b"cd"], [0, 0]), r"rewards must be a tensor or B lists of n numbers .*; got \[b'ab', "),
        (lambda: decoupled_advantages([bytearray(b"ab"), bytearray(b"cd")], [0, 0]), "rewards must be a tensor or B lists of n numbers .*; got "),
        (lambda: decoupled_advantages(TWO.to("meta"), IDS), r"rewards must be real and of shape \(B, n\), B and n >= 1, and hold data; got a tensor of shape \(4, 2\)"),
        (lambda: decoupled_advantages(None, IDS), "rewards must be a tensor or B lists of n numbers .*; got None"),
        (lambda: decoupled_advantages(torch.stack([R, INF_R], dim=1), IDS), r"rewards must be finite or missing \(NaN\); got inf in row 1, column 1"),
        (lambda: decoupled_advantages(TWO.double() * 1e308, IDS), r"rewards must be at most 1.12e\+307 in size"),
        (lambda: apart(weights=[1.0]), r"weights must be real and of shape \(2,\), one per reward; got a tensor of shape \(1,\)"),
        (lambda: apart(weights=1.0), r"weights must be real and of shape \(2,\), one per reward; got a tensor of shape \(\)"),
        (lambda: apart(weights=TWO), r"weights must be real and of shape \(2,\), one per reward; got a tensor of shape \(4, 2\)"),
        (lambda: apart(weights=ADV.to_sparse()), r"weights must be real .* layout torch.sparse_coo"),
        (lambda: apart(weights=[1.0, 2j]), r"weights must be 2 numbers; got \[1.0, 2j\]"),
        (lambda: apart(weights=ADV.to(torch.complex64)), r"weights must be real .* torch.complex64"),
        (lambda: apart(weights=["a", "b"]), r"weights must be 2 numbers; got \['a', 'b'\]"),
        (lambda: apart(weights=[1.0, math.nan]), r"weights must be finite and at most 1e\+30 in size; got nan at index 1"),
        (lambda: apart(weights=[-math.inf, 1.0]), r"weights must be finite and at most 1e\+30 in size; got -inf at index 0"),
        (lambda: apart(weights={1.0, 2.0}), r"weights must be 2 numbers; got \{1.0, 2.0\}"),
        (lambda: apart(weights=b"ab"), "weights must be 2 numbers; got b'ab'"),
        (lambda: apart(weights=ADV.to("meta")), r"weights must be real and of shape \(2,\), one per reward; got a tensor of shape \(2,\)"),
        (lambda: apart(weights=torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn)), r"weights must be finite and at most 1e\+30 in size; got nan at index 1"),
        (lambda: apart(ddof=2), r"ddof must be 0 \(population std\) or 1 \(sample std\); got 2"),
        (lambda: apart(eps=-1.0), "eps must be a finite number >= 0; got -1.0"),
        (lambda: apart(batch_ddof=True), r"batch_ddof must be 0 .* or 1 .*; got True"),
        (lambda: apart(batch_eps=-1e-4), "batch_eps must be a finite number >= 0; got -0.0001"),
        (lambda: apart(lengths=[1, 2]), r"lengths must be of shape \(4,\), one per row; got a tensor of shape \(2,\)"),
        (lambda: apart(lengths=[1, 2, -3, 4]), "lengths must be >= 0; got -3 in row 2"),
        (lambda: apart(lengths=R), "lengths must hold integers .* dtype torch.float32"),
        (lambda: apart(lengths=IDS, scale_batch=False), r"lengths is for scale_batch=True only; got a tensor of shape \(4,\)"),
    ],
)  # fmt: skip
