"""rlcore against independent float64 values (tests/data/parity_vectors.json), value and gradient.

vectors.py computes each of them; here they are held to their tolerances, in float64 and from
inputs in float32 and bfloat16, and the rows of the algorithms are held to the vectors of theirs.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vectors import (
    NOT_APPLICABLE,
    STATED,
    VECTORS,
    comparison,
    flat,
    in_dtype,
    largest_difference,
    loss_and_gradient,
    pairs,
    prompts,
    rounded_to,
)

from rlcore import algorithms, preferences
from rlcore.algorithms import compute_advantages, compute_loss
from rlcore.objectives import decoupled_advantages, smoothed_advantages
from rlcore.preferences import compute_preference_loss

ROOT = Path(__file__).parents[2]
DOUBLE = in_dtype(torch.float64)
ILL_CONDITIONED = {  # what float32 allows less closely, and why
    (
        "dcpo_clip_bounds",
        "low",
    ): 3e-4,  # sqrt(1 - 4 epsilon / q) at q = 4 epsilon: the root of a rounding
}
PARTS_OF_THE_BOOK = {"kl", "likelihood", "rlhf"}  # what belongs to no row


def test_every_vector_is_computed() -> None:
    assert len(STATED) == 74
    assert not VECTORS.keys() & NOT_APPLICABLE.keys()
    assert VECTORS.keys() | NOT_APPLICABLE.keys() == STATED.keys()


@pytest.mark.parametrize("name", VECTORS)
def test_float64(name: str) -> None:
    vector, stated = VECTORS[name], STATED[name]
    results = vector.check(stated["inputs"], DOUBLE)
    expected = flat(stated["expected"])
    assert results.keys() == expected.keys()  # all that the vector expects is computed
    assert vector.headline in expected
    for key, ours in results.items():
        assert ours.dtype in (torch.float64, torch.bool), f"{key} was computed in {ours.dtype}"
        torch.testing.assert_close(
            ours.detach().double(),
            expected[key],
            rtol=0,
            atol=stated["tolerance"],
            msg=lambda message, key=key: f"{key}: {message}",
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", VECTORS)
def test_lower_precision(name: str, dtype: torch.dtype) -> None:
    """Inputs in float32 or bfloat16 are computed in float32: as close to float64 arithmetic on the
    same (rounded) inputs as float32 allows.  The gradient is stored in the dtype of the leaf."""
    inputs = STATED[name]["inputs"]
    results = VECTORS[name].check(inputs, in_dtype(dtype))
    wanted = VECTORS[name].check(inputs, rounded_to(dtype))
    for key, ours in results.items():
        is_gradient = "grad" in key or key.endswith("_as_loss")
        if ours.dtype in (torch.float32, torch.bfloat16):
            assert is_gradient or ours.dtype == torch.float32, f"{key} is in {ours.dtype}"
        step = 2**-8 if is_gradient and dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(
            ours.double(),
            wanted[key].double(),
            rtol=step,
            atol=max(step / 4, 2e-6, ILL_CONDITIONED.get((name, key), 0.0)),
        )


@pytest.mark.parametrize("name", VECTORS)
def test_the_numbers_of_other_code(name: str) -> None:
    """Against what TRL, verl and the authors' code gave, at the tolerance of that comparison."""
    compared = comparison(name)
    assert compared.difference <= compared.tolerance
    assert compared.functions, "no function of rlcore was called"
    assert len(compared.cross_checks) == len(STATED[name].get("cross_check", []))
    for other in compared.cross_checks:
        assert other.values.keys() <= compared.ours.keys()
        assert other.difference <= other.tolerance, f"{other.by}: {other.how}"


def test_a_difference_cannot_hide() -> None:
    one = {"a": torch.tensor([1.0, 2.0])}
    assert largest_difference(one, {"a": torch.tensor([1.0, 2.5])}) == 0.5
    assert largest_difference(one, {"a": torch.tensor(1.0)}) == torch.inf  # no broadcast
    assert largest_difference(one, {"b": torch.tensor([1.0, 2.0])}) == torch.inf
    assert largest_difference(one, {"a": torch.tensor([1.0, torch.nan])}) == torch.inf


def test_each_vector_names_a_row_or_a_part_of_the_book() -> None:
    rows = {row.name for row in (*algorithms.ROWS, *preferences.ROWS)}
    assert {vector.method for vector in VECTORS.values()} <= rows | PARTS_OF_THE_BOOK
    assert all(vector.title for vector in VECTORS.values())
    titles = [(vector.method, vector.title) for vector in VECTORS.values()]
    assert len(set(titles)) == len(titles)


def test_the_book_can_import_the_vectors() -> None:
    """As tests.parity.vectors, with the project's root on the path, and without TRL."""
    code = (
        "import sys; sys.modules['trl'] = None\n"
        "from tests.parity.vectors import VECTORS, comparison\n"
        "found = comparison('dapo_loss')\n"
        "print(len(VECTORS), found.functions, found.cross_checks[0].who)\n"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(" ", 1)[0] == "74"
    assert "('policy_loss',) TRL 1.16.0" in done.stdout


# --- the rows, as they stand --------------------------------------------------------------------

LOSS_OF_ROW = {
    "reinforce": "reinforce_group_baseline_seq_sum",
    "rloo": "rloo_loss_paper_reinforce",
    "grpo": "grpo_loss_kl_k3_paper",
    "dr-grpo": "dr_grpo_loss",
    "dapo": "dapo_loss",
    "dcpo": "dcpo_loss_eq8_otm",
    "gspo": "gspo_loss",
    "gspo-token": "gspo_loss",
    "bnpo-trl": "bnpo_loss",
    "sapo": "sapo_loss",
    "luspo": "luspo_loss",
    "vespo": "vespo_loss",
}


@pytest.mark.parametrize("name", LOSS_OF_ROW)
def test_a_row_computes_its_loss(name: str) -> None:
    stated = STATED[LOSS_OF_ROW[name]]
    compare_row(algorithms.by_name(name), stated)


def test_cispo_with_the_cap_of_its_vector() -> None:
    stated = STATED["cispo_loss_cap_1p28"]
    row = replace(algorithms.CISPO, epsilon_high=stated["inputs"]["cap"] - 1)
    compare_row(row, stated)


def compare_row(row: Any, stated: dict) -> None:
    inputs, expected = stated["inputs"], stated["expected"]
    new = DOUBLE(inputs["new_logp"]).requires_grad_()
    loss, _ = compute_loss(
        row,
        new,
        DOUBLE(inputs["old_logp"]),
        DOUBLE(inputs["advantages"]),
        torch.tensor(inputs["mask"]),
        ref_logprobs=DOUBLE(inputs["ref_logp"]),
        constant=inputs.get("L"),
    )
    for key, ours in loss_and_gradient(loss, new).items():
        torch.testing.assert_close(ours.detach(), DOUBLE(expected[key]), rtol=0, atol=1e-12)


def test_ppo_computes_policy_and_value_loss() -> None:
    stated = STATED["ppo_losses"]
    inputs, expected = stated["inputs"], stated["expected"]
    row = algorithms.PPO
    assert (row.value_coef, row.epsilon_value) == (inputs["vf_coef"], inputs["cliprange_value"])
    loss, _ = compute_loss(
        row,
        DOUBLE(inputs["new_logp"]),
        DOUBLE(inputs["old_logp"]),
        DOUBLE(inputs["advantages"]),
        torch.tensor(inputs["mask"]),
        values=DOUBLE(inputs["vpred"]),
        old_values=DOUBLE(inputs["old_values"]),
        returns=DOUBLE(inputs["returns"]),
    )
    torch.testing.assert_close(loss, DOUBLE(expected["total"]), rtol=0, atol=1e-12)


def same_advantages(ours: Tensor, stated: Any) -> None:
    torch.testing.assert_close(ours, DOUBLE(stated), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "vector"),
    [
        ("grpo", "grpo_adv_population_std"),
        ("bnpo-trl", "grpo_adv_trl_default"),
        ("dr-grpo", "grpo_adv_scale_none"),
        ("rloo", "rloo_adv"),
        ("bnpo", "bnpo_beta_normalised_adv"),
    ],
)
def test_a_row_computes_its_advantages(name: str, vector: str) -> None:
    inputs, expected = STATED[vector]["inputs"], STATED[vector]["expected"]
    row, rewards = algorithms.by_name(name), DOUBLE(inputs["rewards"])
    if row.kl == "reward":
        row = replace(row, beta=0.0)
    ours = compute_advantages(row, rewards, prompts(rewards, inputs["G"])).advantages
    same_advantages(ours, expected["adv"] if isinstance(expected, dict) else expected)


def test_dcpo_keeps_its_history() -> None:
    """The row, visit after visit, through a saved history."""
    stated, history = STATED["dcpo_sas_paper_population_std"], None
    for rewards, expected in zip(stated["inputs"]["history"], stated["expected"], strict=True):
        prompt = torch.full((len(rewards),), 7)
        estimates = compute_advantages(algorithms.DCPO, DOUBLE(rewards), prompt, history=history)
        same_advantages(estimates.advantages, expected["A"])
        history = type(estimates.history)(**estimates.history._asdict())


@pytest.mark.parametrize("weights", ["gdpo_adv_equal_weights", "gdpo_adv_weights_1_0p5"])
def test_gdpo_with_the_epsilon_of_trl(weights: str) -> None:
    inputs, expected = STATED[weights]["inputs"], STATED[weights]["expected"]
    rewards = DOUBLE(inputs["rewards"])
    row = replace(algorithms.GDPO, eps=inputs["eps"], batch_eps=inputs["eps"])
    estimates = compute_advantages(
        row, rewards, prompts(rewards, inputs["G"]), reward_weights=DOUBLE(inputs["weights"])
    )
    same_advantages(estimates.advantages, expected["A_hat"])


def test_gdpo_weighs_responses_by_their_length() -> None:
    """The vector of the authors' verl branch starts at A_sum; from the rewards on it is this."""
    inputs = STATED["gdpo_adv_equal_weights"]["inputs"]
    stated, rewards = STATED["gdpo_verl_token_weighted_whitening"], DOUBLE(inputs["rewards"])
    ours = decoupled_advantages(
        rewards,
        prompts(rewards, inputs["G"]),
        eps=inputs["eps"],
        lengths=torch.tensor(stated["inputs"]["lengths"]),
    )
    same_advantages(ours, stated["expected"]["A_hat_per_row"])


def test_ppo_and_vapo_estimate_advantages() -> None:
    shaped, textbook = STATED["rlhf_kl_shaped_reward"]["inputs"], STATED["gae_textbook"]
    tensors: dict[str, Any] = {
        "old_logprobs": DOUBLE(shaped["old_logp"]),
        "ref_logprobs": DOUBLE(shaped["ref_logp"]),
        "response_mask": torch.tensor(shaped["mask"]),
        "values": DOUBLE(textbook["inputs"]["values"]),
    }
    groups, rewards = torch.arange(2), DOUBLE(shaped["score"])
    row = replace(algorithms.PPO, beta=shaped["beta"])
    assert (row.gamma, row.lam) == (textbook["inputs"]["gamma"], textbook["inputs"]["lam"])
    estimates = compute_advantages(row, rewards, groups, **tensors)
    same_advantages(estimates.advantages, textbook["expected"]["whitened_advantages"])
    same_advantages(estimates.returns, textbook["expected"]["returns"])

    decoupled = STATED["vapo_decoupled_gae"]
    row = replace(
        algorithms.VAPO,
        length_alpha=decoupled["inputs"]["alpha"],
        kl="reward",
        kl_estimator="k1",
        beta=shaped["beta"],  # the vector's rewards per token are those of PPO
    )
    estimates = compute_advantages(row, rewards, groups, **tensors)
    same_advantages(estimates.advantages, decoupled["expected"]["policy_advantages"])
    same_advantages(estimates.returns, decoupled["expected"]["critic_returns"])


PREFERENCE_OF_ROW = {
    "dpo": "dpo_sigmoid",
    "cdpo": "cdpo_label_smoothing",
    "robust-dpo": "robust_dpo",
    "hinge": "dpo_hinge",
    "ipo": "ipo_paper_sum",
    "ipo-averaged": "ipo_trl_token_average",
    "dpo-norm": "dpo_length_normalised",
    "simpo": "simpo",
    "orpo": "orpo",
}


@pytest.mark.parametrize("name", PREFERENCE_OF_ROW)
def test_a_preference_row_computes_its_loss(name: str) -> None:
    stated = STATED[PREFERENCE_OF_ROW[name]]
    row, expected = preferences.by_name(name), stated["expected"]
    if name == "dpo-norm":  # the row has Tulu 3's beta, the vector TRL's
        row = replace(row, beta=stated["inputs"]["beta"])
    tensors, refs = pairs(stated["inputs"], DOUBLE)
    loss, _ = compute_preference_loss(row, *tensors, **refs)
    wanted = flat(expected)[VECTORS[stated["name"]].headline]
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-12)


def test_a_saved_history_is_the_history() -> None:
    """The released code's std, through a file: the numbers of the next visit have the same bits."""
    first, second = (DOUBLE(rewards) for rewards in ([1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]))
    prompt = torch.zeros(4, dtype=torch.int64)
    history = smoothed_advantages(first, prompt, ddof=1).history
    saved = type(history)(*(each.clone() for each in history))
    ours = smoothed_advantages(second, prompt, history, ddof=1).advantages
    assert ours.equal(smoothed_advantages(second, prompt, saved, ddof=1).advantages)
