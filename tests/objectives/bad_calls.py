"""Shared by the tables of wrong calls (bad_calls_*.py): tensors, and mistakes that many make.

One line per mistake: the call, and the message that it must give (as a regular expression).
"""

# ruff: noqa: E501  (a table is read by its lines)

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

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
