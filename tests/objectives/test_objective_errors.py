"""Bad input gets a ValueError that names the argument, what was found and what is wanted.

The wrong calls and their messages are in the tables of bad_calls_*.py.
"""

import dataclasses
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from bad_calls import HOLE, IDS, LOGITS, LP, MASK, TOKENS, Call, R
from bad_calls_policy import loss

from rlcore.algorithms import GRPO, Algorithm
from rlcore.objectives import (
    aggregate,
    equal_groups,
    group_advantages,
    importance_ratio,
    kl_per_token,
    probability_all_equal,
    sft_loss,
    token_logprobs,
)

PARTS = sorted(path.stem for path in Path(__file__).parent.glob("bad_calls_*.py"))
TABLE = [line for part in PARTS for line in import_module(part).TABLE]


@pytest.mark.parametrize(("call", "message"), TABLE)
def test_bad_input(call: Call, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        call()
    assert not re.search(r"tensor\(\[\[", str(caught.value)), "a message does not print a batch"


def test_every_public_function_is_in_the_table() -> None:
    import rlcore.objectives

    functions = {name for name in rlcore.objectives.__all__ if not name[0].isupper()}
    assert functions <= {param.id.rsplit("-", 1)[0] for param in TABLE}


def test_allow_empty_lets_an_empty_row_pass() -> None:
    assert aggregate(LP, HOLE, allow_empty=True).item() == pytest.approx(-3.5 / 3)
    assert importance_ratio(LP, LP, HOLE, allow_empty=True).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert kl_per_token(LP, LP * 2, HOLE, allow_empty=True)[1].tolist() == [0, 0, 0]
    assert sft_loss(LP, HOLE, allow_empty=True)[0].item() == pytest.approx(3.5 / 3)


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
