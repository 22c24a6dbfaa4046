"""The reward model: exact populations of comparisons, and what holds for every input."""

import itertools
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.objectives import last_token_values, ranking_loss, reward_model_loss

settings.register_profile("rlcore", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("rlcore")

FILE = Path(__file__).parents[1] / "data" / "cases.json"
CASES = {case["id"]: case for case in json.loads(FILE.read_text())}
GARBAGE = (math.nan, math.inf, -math.inf, 1e30)
TRUE_REWARDS = torch.tensor([1.5, 0.2, -0.7, 0.3], dtype=torch.float64)

number = st.floats(-8, 8, allow_nan=False).map(lambda value: round(value, 3))


def close(ours: Tensor, wanted: Any, atol: float = 1e-12, rtol: float = 1e-12) -> None:
    wanted = torch.as_tensor(wanted, dtype=ours.dtype)
    torch.testing.assert_close(ours.detach(), wanted.detach(), atol=atol, rtol=rtol)


def gradient(value: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(value, leaf, retain_graph=True)[0]


def price(difference: float) -> float:
    """-log sigma, written down."""
    return math.log1p(math.exp(-difference))


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """chosen, rejected and margin, (B,)."""
    size = draw(st.integers(1, 6))
    return tuple(numbers(*draw(st.lists(number, min_size=size, max_size=size))) for _ in range(3))  # type: ignore[return-value]


@st.composite
def rankings(draw: st.DrawFn) -> Tensor:
    """(B, K), at least two places filled in each row."""
    places = draw(st.integers(2, 5))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        row = draw(st.lists(number, min_size=places, max_size=places))
        empty = draw(st.sets(st.integers(0, places - 1), max_size=places - 2))
        rows.append([math.nan if place in empty else row[place] for place in range(places)])
    return numbers(*itertools.chain(*rows)).view(len(rows), places)


# --- the population: all comparisons, with their probabilities -----------------------------------


def wins(rewards: Tensor, one: int, other: int) -> float:
    """Bradley-Terry: P(one is preferred to the other)."""
    return 1 / (1 + math.exp(float(rewards[other] - rewards[one])))


def population_loss(rewards: Tensor, **options: Any) -> Tensor:
    """E[loss] over all comparisons of two different answers, labelled by the true rewards."""
    total = rewards.new_zeros(())
    for one, other in itertools.permutations(range(len(rewards)), 2):
        loss, _ = reward_model_loss(rewards[one : one + 1], rewards[other : other + 1], **options)
        total = total + wins(TRUE_REWARDS, one, other) * loss
    return total


@pytest.mark.parametrize("constant", [0.0, 3.0])
def test_the_gradient_is_zero_at_the_true_rewards_whatever_their_constant(constant: float) -> None:
    rewards = (TRUE_REWARDS + constant).requires_grad_()
    close(gradient(population_loss(rewards), rewards), torch.zeros(4))
    wrong = (TRUE_REWARDS * 1.1).requires_grad_()
    assert gradient(population_loss(wrong), wrong).abs().max() > 1e-2


def minimum(loss_of: Any) -> Tensor:
    """Newton's method from zeros; the Hessian's flat direction (a constant) is left alone."""
    rewards = torch.zeros(4, dtype=torch.float64)
    for _ in range(30):
        leaf = rewards.clone().requires_grad_()
        slope = gradient(loss_of(leaf), leaf)
        curvature = torch.autograd.functional.hessian(loss_of, rewards)
        rewards = rewards - torch.linalg.lstsq(curvature, slope, driver="gelsd").solution
    return rewards


def test_the_minimiser_has_the_true_differences() -> None:
    found = minimum(population_loss)
    close(found - found.mean(), TRUE_REWARDS - TRUE_REWARDS.mean(), atol=1e-9)


def test_centring_picks_the_constant_and_bends_the_differences_a_little() -> None:
    """Without it any constant will do; with it rewards lie about 0, and differences shrink."""
    found = minimum(lambda rewards: population_loss(rewards, center_coef=0.01))
    close(found.sum(), 0.0, atol=1e-9)
    spread = (found.max() - found.min()) / (TRUE_REWARDS.max() - TRUE_REWARDS.min())
    assert 0.9 < spread < 1


def plackett_luce(order: tuple[int, ...]) -> float:
    """P(ranking) when the best is drawn from softmax(rewards), then the next from the rest."""
    weights = [math.exp(float(TRUE_REWARDS[answer])) for answer in order]
    return math.prod(weight / sum(weights[place:]) for place, weight in enumerate(weights))


def test_rankings_teach_the_same_rewards_as_pairs() -> None:
    """All 4! rankings: every pair inside one is a Bradley-Terry comparison."""
    rewards = (TRUE_REWARDS - 1).requires_grad_()
    orders = list(itertools.permutations(range(4)))
    assert sum(map(plackett_luce, orders)) == pytest.approx(1)

    def expected(leaf: Tensor) -> Tensor:
        return torch.stack(
            [plackett_luce(order) * ranking_loss(leaf[[*order]][None])[0] for order in orders]
        ).sum()

    close(gradient(expected(rewards), rewards), torch.zeros(4))
    close(expected(rewards) * 6, population_loss(rewards))  # the mean of 6 pairs
    wrong = TRUE_REWARDS.square().requires_grad_()
    assert gradient(expected(wrong), wrong).abs().max() > 1e-2


# --- values, by hand -----------------------------------------------------------------------------


@given(batch=pairs(), coefficient=st.sampled_from([0.0, 0.01, 2.0]), wide=st.booleans())
def test_the_loss_of_pairs_by_hand(batch: Any, coefficient: float, wide: bool) -> None:
    chosen, rejected, margin = batch
    rows = list(zip(*(values.tolist() for values in batch), strict=True))
    each = [price(w - r - wide * m) + coefficient * (w + r) ** 2 for w, r, m in rows]
    loss, stats = reward_model_loss(
        chosen, rejected, margin=margin if wide else None, center_coef=coefficient
    )
    close(loss, sum(each) / len(each))
    both = [*chosen.tolist(), *rejected.tolist()]
    wanted = {
        "accuracy": sum(w > r for w, r, _ in rows) / len(rows),
        "margin": sum(w - r for w, r, _ in rows) / len(rows),
        "min_reward": min(both),
        "mean_reward": sum(both) / len(both),
        "max_reward": max(both),
    }
    assert stats.keys() == wanted.keys()
    for name, value in wanted.items():
        close(stats[name], value)
        assert not stats[name].requires_grad


def test_the_gradient_weighs_a_pair_by_how_wrong_it_is() -> None:
    """dL/dr_w = -(1 - P(w wins))/B, and the rejected one gets the opposite."""
    chosen = numbers(2.0, -3.0).requires_grad_()
    rejected, margin = numbers(0.5, 1.0).requires_grad_(), numbers(0.5, 0.0).requires_grad_()
    loss, _ = reward_model_loss(chosen, rejected, margin=margin)
    wanted = [-1 / (1 + math.exp(1.0)) / 2, -1 / (1 + math.exp(-4.0)) / 2]
    close(gradient(loss, chosen), wanted)
    close(gradient(loss, rejected), [-value for value in wanted])
    assert torch.autograd.grad(loss, margin, allow_unused=True) == (None,)


def test_a_tie_is_no_success() -> None:
    _, stats = reward_model_loss(numbers(1.0, 1.0), numbers(1.0, 0.0))
    assert stats["accuracy"] == 0.5


@given(rewards=rankings())
def test_the_loss_of_rankings_by_hand(rewards: Tensor) -> None:
    rows, losses, won, margins = rewards.tolist(), [], [], []
    for row in rows:
        filled = [value for value in row if not math.isnan(value)]
        gaps = [better - worse for better, worse in itertools.combinations(filled, 2)]
        losses.append(sum(map(price, gaps)) / len(gaps))
        won.append(sum(gap > 0 for gap in gaps) / len(gaps))
        margins.append(sum(gaps) / len(gaps))
    loss, stats = ranking_loss(rewards)
    close(loss, sum(losses) / len(rows))
    every = [value for row in rows for value in row if not math.isnan(value)]
    wanted = {
        "accuracy": sum(won) / len(rows),
        "margin": sum(margins) / len(rows),
        "min_reward": min(every),
        "mean_reward": sum(every) / len(every),
        "max_reward": max(every),
    }
    assert stats.keys() == wanted.keys()
    for name, value in wanted.items():
        close(stats[name], value)
        assert not stats[name].requires_grad


@given(batch=pairs())
def test_a_ranking_of_two_is_a_pair(batch: Any) -> None:
    chosen, rejected, _ = batch
    ours, our_stats = ranking_loss(torch.stack([chosen, rejected], dim=1))
    loss, stats = reward_model_loss(chosen, rejected)
    close(ours, loss)
    assert our_stats.keys() == stats.keys()
    for name, value in stats.items():
        close(our_stats[name], value)


def test_a_ranking_weighs_1_however_long_it_is() -> None:
    """The mean of two rankings, one of one pair and one of three: not the mean of four pairs."""
    rewards = numbers(0.0, 2.0, math.nan, 0.0, 0.0, 0.0).view(2, 3)
    close(ranking_loss(rewards)[0], (price(-2.0) + math.log(2)) / 2)


def test_a_place_that_is_not_filled_has_no_gradient() -> None:
    rewards = numbers(1.0, math.nan, 0.5, 2.0, 0.0, -1.0).view(2, 3).requires_grad_()
    slope = gradient(ranking_loss(rewards)[0], rewards)
    assert slope[0, 1] == 0
    assert slope.isfinite().all()
    assert (slope != 0).sum() == 5


# --- what holds for every input -----------------------------------------------------------------


@given(batch=pairs(), shift=number, order=st.randoms(use_true_random=False))
def test_shift_order_and_swap_of_pairs(batch: Any, shift: float, order: Any) -> None:
    chosen, rejected, margin = batch
    loss, _ = reward_model_loss(chosen, rejected, margin=margin)
    moved, _ = reward_model_loss(chosen + shift, rejected + shift, margin=margin)
    close(moved, loss, atol=1e-9)
    rows = list(range(len(chosen)))
    order.shuffle(rows)
    again, _ = reward_model_loss(chosen[rows], rejected[rows], margin=margin[rows])
    close(again, loss)
    # -log sigma(-h) = -log sigma(h) + h: swapped pairs differ by their mean difference
    plain, stats = reward_model_loss(chosen, rejected)
    close(reward_model_loss(rejected, chosen)[0] - plain, stats["margin"], atol=1e-9)


@given(batch=pairs(), data=st.data())
def test_parts_of_pairs_add_up(batch: Any, data: st.DataObject) -> None:
    chosen, rejected, margin = batch
    chosen.requires_grad_()
    size = len(chosen)
    edges = [0, *sorted(data.draw(st.sets(st.integers(1, max(1, size - 1)), max_size=2))), size]
    options: dict[str, Any] = {"center_coef": 0.1}
    whole, _ = reward_model_loss(chosen, rejected, margin=margin, **options)
    parts = [
        reward_model_loss(chosen[a:b], rejected[a:b], margin=margin[a:b], total=size, **options)[0]
        for a, b in pairwise(edges)
        if b > a
    ]
    summed = torch.stack(parts).sum()
    close(summed, whole)
    close(gradient(summed, chosen), gradient(whole, chosen))


@given(rewards=rankings(), shift=number, order=st.randoms(use_true_random=False))
def test_shift_order_and_parts_of_rankings(rewards: Tensor, shift: float, order: Any) -> None:
    whole, _ = ranking_loss(rewards)
    rows = list(range(len(rewards)))
    order.shuffle(rows)
    close(ranking_loss(rewards[rows])[0], whole)
    close(ranking_loss(rewards + shift)[0], whole, atol=1e-9)
    parts = [ranking_loss(row[None], total=len(rewards))[0] for row in rewards]
    close(torch.stack(parts).sum(), whole)


def test_gradients_by_finite_differences() -> None:
    chosen, rejected = numbers(0.3, -1.0), numbers(0.7, 0.2)
    margin = numbers(0.5, 0.1)
    inputs = (chosen.requires_grad_(), rejected.requires_grad_())

    def of_pairs(one: Tensor, other: Tensor) -> Tensor:
        return reward_model_loss(one, other, margin=margin, center_coef=0.3)[0]

    assert torch.autograd.gradcheck(of_pairs, inputs)
    ranked = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(lambda r: ranking_loss(r)[0], (ranked.requires_grad_(),))


@pytest.mark.parametrize("gap", [1e4, -1e4, 1e12, -1e12])
def test_extreme_rewards_stay_finite(gap: float) -> None:
    chosen = torch.tensor([gap], requires_grad=True)
    for loss in (
        reward_model_loss(chosen, torch.zeros(1), center_coef=1e9)[0],
        ranking_loss(torch.stack([chosen, torch.zeros(1)], dim=1))[0],
    ):
        assert loss.isfinite()
        assert gradient(loss, chosen).isfinite().all()
    plain, _ = reward_model_loss(chosen, torch.zeros(1))
    assert plain.item() == max(0.0, -chosen.item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype(dtype: torch.dtype) -> None:
    """Half precision is widened first: 256 - 0.25 would be 256 in bfloat16."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    chosen = torch.tensor([0.5, 256.0], dtype=dtype)
    rejected = torch.tensor([0.25, 0.25], dtype=dtype)
    loss, stats = reward_model_loss(chosen, rejected, margin=rejected, center_coef=0.01)
    again, _ = reward_model_loss(
        chosen.to(wide), rejected.to(wide), margin=rejected.to(wide), center_coef=0.01
    )
    ranked, ranked_stats = ranking_loss(torch.stack([chosen, rejected], dim=1))
    assert torch.equal(loss, again)
    assert stats["margin"] == (0.25 + 255.75) / 2
    for value in (loss, ranked, *stats.values(), *ranked_stats.values()):
        assert value.dtype == wide
        assert value.shape == ()
    assert last_token_values(chosen[None], torch.ones(1, 2)).dtype == wide


# --- the last real token ------------------------------------------------------------------------


def test_a34_the_reward_is_read_at_the_last_real_token() -> None:
    """Found by the mask: not by the padding id (which may be that of the end), not by counting."""
    given_, expected = CASES["A34"]["input"], CASES["A34"]["expected"]
    scores = numbers(*given_["token_scores"])[None]
    wanted = expected["selected_index"]
    for name in ("case_1", "case_2_left_pad", "case_3_no_pad"):
        place = wanted["_".join(name.split("_")[:2])]
        ours = last_token_values(scores, torch.tensor(given_[name]["mask"])[None])
        assert ours.tolist() == [given_["token_scores"][place]]
    with pytest.raises(ValueError, match="attention_mask row 0 is empty"):
        last_token_values(scores, torch.tensor(given_["case_4_all_pad"]["mask"])[None])


def masks_of(width: int) -> st.SearchStrategy[list[list[bool]]]:
    row = st.lists(st.booleans(), min_size=width, max_size=width).filter(any)
    return st.lists(row, min_size=1, max_size=4)


@given(
    masks=st.integers(1, 5).flatmap(masks_of),
    garbage=st.sampled_from(GARBAGE),
)
def test_the_last_value_whatever_the_mask(masks: list[list[bool]], garbage: float) -> None:
    mask = torch.tensor(masks)
    values = torch.arange(mask.numel(), dtype=torch.float64).view(mask.shape)
    leaf = values.masked_fill(~mask, garbage).requires_grad_()
    ours = last_token_values(leaf, mask)
    last = [max(place for place, real in enumerate(row) if real) for row in masks]
    assert ours.tolist() == [values[row, place].item() for row, place in enumerate(last)]
    slope = gradient(ours.sum(), leaf)
    wanted = torch.zeros_like(slope)
    wanted[torch.arange(len(last)), torch.tensor(last)] = 1
    assert torch.equal(slope, wanted)
