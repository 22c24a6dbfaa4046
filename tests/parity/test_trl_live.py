"""rlcore against TRL's own code, live, on random batches: value and gradient.

trl_drive.py calls the installed TRL; here the same batch goes through rlcore, with NaN and inf in
every padded slot, and the two must agree to 1e-12 in float64 (1e-6 where TRL itself computes in
float32).  `python -m book test` runs this file as a step of its own.  Without TRL it is skipped.
"""

import importlib.util
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import trl_drive as trl
from torch import Tensor

from rlcore.algorithms import (
    BNPO_TRL,
    CISPO,
    DAPO,
    DR_GRPO,
    GDPO,
    GRPO,
    GSPO,
    LUSPO,
    RLOO,
    SAPO,
    VESPO,
    Algorithm,
    compute_advantages,
    compute_loss,
)
from rlcore.objectives import (
    decoupled_advantages,
    entropy,
    group_advantages,
    kto_loss,
    leave_one_out_advantages,
    overlong_filter,
    overlong_penalty,
    policy_loss,
    preference_loss,
    reward_model_loss,
    sft_loss,
    token_logprobs,
)
from rlcore.preferences import (
    DPO,
    DPO_NORM,
    HINGE,
    IPO_AVERAGED,
    KTO,
    ORPO,
    REWARD_MODEL,
    ROBUST_DPO,
    SIMPO,
    PreferenceMethod,
    compute_preference_loss,
    compute_reward_model_loss,
    compute_unpaired_loss,
)

SEEDS = range(20)  # batches per case
EXACT = 1e-12  # both in float64
SINGLE = 1e-6  # TRL computes in float32 somewhere: ORPO's odds, shares of a batch that it logs

Results = dict[str, Tensor]
Agree = Callable[..., None]


if importlib.util.find_spec("trl") is None:  # one that is there but broken is a failure
    pytest.skip(
        "no parity with TRL: it is not installed; `pip install '.[trl]'` in the environment of the "
        "tests brings it",
        allow_module_level=True,
    )


@pytest.fixture(scope="module", autouse=True)
def in_float64() -> Iterator[None]:
    """TRL makes some tensors in torch's default dtype (Bessel's factor, SAPO's temperatures)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


# --- random batches -----------------------------------------------------------------------------


@dataclass
class Batch:
    """G responses to each of P prompts; log-probs are those of tokens, 0 in padding."""

    size: int  # G
    responses: Tensor  # (B, T) bool, up to the end of each response
    tools: Tensor  # (B, T) bool, False at tokens that a tool wrote
    old: Tensor
    new: Tensor
    ref: Tensor
    entropies: Tensor
    advantages: Tensor  # (B,) or (B, T)

    @property
    def mask(self) -> Tensor:
        return self.responses & self.tools

    @property
    def groups(self) -> Tensor:
        return torch.arange(len(self.mask)) // self.size


def random_batch(seed: int, *, holes: bool = True, per_token: bool = True) -> Batch:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    prompts, size, slots = draw.randint(1, 4), draw.randint(2, 6), draw.randint(1, 9)
    rows = prompts * size
    lengths = torch.randint(1, slots + 1, (rows,))
    responses = torch.arange(slots) < lengths[:, None]
    tools = torch.ones_like(responses)
    if holes and draw.random() < 0.5:
        tools = torch.rand(rows, slots) < 0.7
        tools[:, 0] = True  # an empty response is another test
    spread = draw.choice([0.0, 0.01, 0.2, 0.7])

    def near(values: Tensor) -> Tensor:
        return -(values + spread * torch.randn(rows, slots)).abs() * responses

    old = -torch.rand(rows, slots) * 3 * responses
    advantages = torch.randn(rows, slots) if per_token and draw.random() < 0.3 else None
    if advantages is None:
        advantages = torch.randn(rows)
    advantages[torch.rand_like(advantages) < 0.15] = 0.0
    return Batch(
        size=size,
        responses=responses,
        tools=tools,
        old=old,
        new=near(old),
        ref=near(old),
        entropies=torch.rand(rows, slots) * 2 * responses,
        advantages=advantages,
    )


def hidden(values: Tensor, mask: Tensor) -> Tensor:
    """What rlcore gets: NaN, inf and -inf wherever the mask is False."""
    garbage = torch.tensor([math.nan, math.inf, -math.inf])[torch.arange(values.numel()) % 3]
    return torch.where(mask, values, garbage.view(values.shape))


def leaf(values: Tensor) -> Tensor:
    return values.detach().clone().requires_grad_()


def with_gradients(loss: Tensor, **leaves: Tensor) -> Results:
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {"loss": loss.detach()} | {
        f"gradient of {name}": torch.zeros_like(of) if gradient is None else gradient
        for (name, of), gradient in zip(leaves.items(), gradients, strict=True)
    }


def both(metrics: trl.Metrics, stats: dict[str, Tensor], names: tuple[str, ...]) -> list[Results]:
    """Ours and theirs of the statistics that have one name in both."""
    return [
        {name: stats[name].detach() for name in names},
        {name: torch.tensor(metrics[name]) for name in names},
    ]


# --- the GRPO family ----------------------------------------------------------------------------

CLIP = {"surrogate": "clip"}
LOSSES: dict[str, dict[str, Any]] = {  # TRL's loss_type -> ours
    "grpo": CLIP | {"aggregation": "sequence_mean"},
    "bnpo": CLIP | {"aggregation": "token_mean"},
    "dr_grpo": CLIP | {"aggregation": "constant"},
    "dapo": CLIP | {"aggregation": "token_mean"},
    "luspo": CLIP | {"aggregation": "sequence_sum"},
    "cispo": {"surrogate": "capped", "aggregation": "token_mean"},
    "sapo": {"surrogate": "soft", "aggregation": "sequence_mean"},
    "vespo": {"surrogate": "gamma", "aggregation": "token_mean"},
}
KL = {"no KL": (0.0, False), "KL": (0.07, False), "KL times ratio": (0.07, True)}


def grpo_arguments(loss_type: str, level: str, kl: str, seed: int) -> tuple[dict, dict]:
    """The same choices, in TRL's words and in ours; epsilons, cap, entropy differ by seed."""
    draw = random.Random(seed)
    beta, weighted = KL[kl]
    low, high = draw.choice([(0.2, 0.28), (3e-4, 4e-4), (0.05, 0.3)])
    theirs: dict[str, Any] = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "epsilon": low,
        "epsilon_high": high,
        "beta": beta,
        "use_bias_correction_kl": weighted,
        "entropy_coef": draw.choice([0.0, 0.02]),
        "max_completion_length": 12,
        "sapo_temperature_pos": 0.9,
        "sapo_temperature_neg": 1.3,
    }
    ours = LOSSES[loss_type] | {
        "ratio_level": level,
        "epsilon_low": low,
        "epsilon_high": high,
        "beta": beta,
        "kl_importance_weighted": weighted,
        "entropy_coef": theirs["entropy_coef"],
        "constant": 12 if loss_type == "dr_grpo" else None,
    }
    if loss_type == "sapo":
        ours |= {"tau_positive": 0.9, "tau_negative": 1.3}
    elif loss_type == "vespo":
        ours |= {"ratio_level": "sequence_sum"}
    elif loss_type == "cispo":  # TRL's epsilon_high is the cap itself, ours its distance from 1
        theirs |= {"epsilon_high": 1 + high}
        ours |= {"epsilon_low": 1.0}
    elif draw.random() < 0.5:
        theirs["delta"] = ours["ratio_max"] = 1 + high + draw.choice([0.01, 0.4])
    return theirs, ours


# TRL weighs the KL by the ratio of the token even in VESPO, whose own ratio is that of the answer
CASES = [
    (loss_type, level, kl)
    for loss_type in LOSSES
    for level in ("token", "sequence")
    for kl in KL
    if (loss_type, kl) != ("vespo", "KL times ratio")
]


@pytest.mark.parametrize(("loss_type", "level", "kl"), CASES)
def test_grpo_losses(loss_type: str, level: str, kl: str, agree: Agree) -> None:
    for seed in SEEDS:
        batch = random_batch(seed)
        theirs, ours = grpo_arguments(loss_type, level, kl, seed)
        new, entropies = leaf(batch.new), leaf(batch.entropies)
        first_step = seed % 4 == 0  # TRL then has no old log-probs at all
        old = batch.new if first_step else batch.old
        loss, metrics = trl.grpo_loss(
            trl.settings("grpo", **theirs),
            new,
            batch.responses.double(),
            batch.advantages,
            old=None if first_step else old,
            ref=batch.ref,
            entropies=entropies,
            tool_mask=batch.tools.double(),
        )
        wanted = with_gradients(loss, logprobs=new, entropies=entropies)

        mask = batch.mask
        new, entropies = leaf(hidden(batch.new, mask)), leaf(hidden(batch.entropies, mask))
        loss, stats = policy_loss(
            new,
            hidden(old, mask),
            batch.advantages,
            mask,
            ref_logprobs=hidden(batch.ref, mask),
            entropies=entropies,
            **ours,
        )
        family = f"GRPOTrainer, {loss_type}"
        found = with_gradients(loss, logprobs=new, entropies=entropies)
        agree(family, found, wanted, EXACT, f"seed {seed}")

        names = ["entropy"]
        if kl == "KL":  # with the ratio, TRL logs the product
            names.append("kl")
        if LOSSES[loss_type]["surrogate"] == "clip" and batch.advantages.dim() == 1:
            names += [f"clip_ratio/{end}_mean" for end in ("low", "high", "region")]
        if loss_type == "cispo" and batch.advantages.dim() == 1:
            names.append("cispo_clip_ratio")
        if loss_type == "vespo" and batch.advantages.dim() == 1:
            names.append("vespo/phi_seq_mean")
        agree(f"{family}, statistics", *both(metrics, stats, tuple(names)), EXACT, f"seed {seed}")


@pytest.mark.parametrize("loss_type", [name for name in LOSSES if name != "bnpo"])
def test_parts_of_a_step_add_up(loss_type: str, agree: Agree) -> None:
    """Gradient accumulation: TRL's micro-batches against our whole step, and our parts of it.

    Not bnpo, the token mean of each micro-batch; nor the entropy bonus, which TRL takes as the mean
    of the micro-batches' means.
    """
    for seed in SEEDS:
        batch = random_batch(seed)
        theirs, ours = grpo_arguments(loss_type, "token", "KL", seed)
        theirs["entropy_coef"] = ours["entropy_coef"] = 0.0
        rows, steps = len(batch.mask), batch.size
        parts = torch.arange(rows).chunk(steps)  # P rows each
        tokens = int(batch.mask.sum())

        new = leaf(batch.new)
        loss = sum(
            trl.grpo_loss(
                trl.settings("grpo", **theirs),
                new[part],
                batch.responses[part].double(),
                batch.advantages[part],
                old=batch.old[part],
                ref=batch.ref[part],
                tool_mask=batch.tools[part].double(),
                step_tokens=tokens,
                accumulation=steps,
            )[0]
            for part in parts
        )
        wanted = with_gradients(loss, logprobs=new)

        mask, totals = batch.mask, {"token_mean": tokens}.get(ours["aggregation"], rows)
        for split in ([torch.arange(rows)], parts):
            new = leaf(hidden(batch.new, mask))
            loss = sum(
                policy_loss(
                    new[part],
                    batch.old[part],
                    batch.advantages[part],
                    mask[part],
                    ref_logprobs=batch.ref[part],
                    total=totals,
                    **ours,
                )[0]
                for part in split
            )
            found = with_gradients(loss, logprobs=new)
            agree(f"GRPOTrainer, {loss_type}, accumulated", found, wanted, EXACT, f"seed {seed}")


@pytest.mark.parametrize("loss_type", LOSSES)
def test_truncated_completions(loss_type: str, agree: Agree) -> None:
    """mask_truncated_completions: the mask, and the loss of a batch with emptied rows."""
    for seed in SEEDS:
        batch = random_batch(seed, holes=False)
        truncated = torch.rand(len(batch.mask)) < 0.4
        truncated[0] = False
        theirs_mask = trl.mask_of_truncated(batch.responses, truncated)
        mask = overlong_filter(batch.responses, truncated)
        same = {"mask": mask.double()}, {"mask": theirs_mask.double()}
        agree("mask_truncated_completions", *same, 0.0, f"seed {seed}")

        theirs, ours = grpo_arguments(loss_type, "token", "KL", seed)
        new = leaf(batch.new)
        loss, _ = trl.grpo_loss(
            trl.settings("grpo", **theirs),
            new,
            theirs_mask.double(),
            batch.advantages,
            old=batch.old,
            ref=batch.ref,
            entropies=batch.entropies,
        )
        wanted = with_gradients(loss, logprobs=new)
        new = leaf(hidden(batch.new, mask))
        loss, _ = policy_loss(
            new,
            hidden(batch.old, mask),
            batch.advantages,
            mask,
            ref_logprobs=hidden(batch.ref, mask),
            entropies=hidden(batch.entropies, mask),
            total=None if ours["aggregation"] == "token_mean" else len(mask),  # TRL counts all rows
            token_total=int(mask.sum()),
            allow_empty=True,
            **ours,
        )
        found = with_gradients(loss, logprobs=new)
        agree("GRPOTrainer, truncated rows", found, wanted, EXACT, f"{loss_type}, seed {seed}")


def rewards_of(seed: int, columns: int, *, missing: bool = True) -> tuple[Tensor, int]:
    """(B, n) rewards of different kinds, NaN where a reward function gave none, and G.

    They are multiples of 1/64: the mean of a group whose rewards are all equal is then exact, also
    in TRL, which would divide its rounding by 1e-4 (see test_all_equal_rewards_in_float32).
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    prompts, size = draw.randint(1, 5), draw.randint(2, 7)
    shape = (prompts * size, columns)
    kind = draw.choice(["binary", "real", "few values"])
    rewards = {
        "binary": torch.rand(shape).round(),
        "real": (torch.randn(shape) * draw.choice([1, 64, 3200])).round() / 64,
        "few values": torch.randint(0, 3, shape) / 8,
    }[kind]
    equal = torch.rand(prompts).repeat_interleave(size) < 0.3
    rewards[equal] = rewards[equal][:1]
    if missing and draw.random() < 0.6:
        rewards[torch.rand(shape) < 0.25] = math.nan
        rewards[torch.rand(len(rewards)) < 0.1] = math.nan
    return rewards, size


def weights_of(columns: int) -> Tensor:
    return torch.randint(2, 12, (columns,)) / 8


def summed(rewards: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum that both sides normalise; missing only if all of a row is."""
    total = (rewards * weights).nansum(dim=1)
    return torch.where(rewards.isnan().all(dim=1), math.nan, total)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages(scale: str, agree: Agree) -> None:
    for seed in range(4 * len(SEEDS)):
        rewards, size = rewards_of(seed, columns=1 + seed % 3)
        weights = weights_of(rewards.shape[1])
        config = trl.settings("grpo", scale_rewards=scale)
        theirs = trl.grpo_advantages(config, rewards, size, weights)
        ours = group_advantages(
            summed(rewards, weights),
            torch.arange(len(rewards)) // size,
            scale=scale,
            ddof=1,
            eps=1e-4,
        )
        same = {"advantages": ours}, {"advantages": theirs}
        agree(f"GRPOTrainer, advantages, {scale}", *same, EXACT, f"seed {seed}")


def test_decoupled_advantages(agree: Agree) -> None:
    """GDPO, and the row GDPO with the epsilon that TRL adds to the group's std too."""
    config = trl.settings("grpo", multi_objective_aggregation="normalize_then_sum")
    for seed in range(6 * len(SEEDS)):
        rewards, size = rewards_of(seed, columns=1 + seed % 4)
        weights = weights_of(rewards.shape[1])
        groups = torch.arange(len(rewards)) // size
        theirs = {"advantages": trl.grpo_advantages(config, rewards, size, weights)}
        ours = decoupled_advantages(
            rewards, groups, weights=weights, ddof=1, eps=1e-4, batch_eps=1e-4
        )
        agree("GRPOTrainer, GDPO", {"advantages": ours}, theirs, EXACT, f"seed {seed}")
        row = compute_advantages(replace(GDPO, eps=1e-4), rewards, groups, reward_weights=weights)
        agree("GRPOTrainer, GDPO", {"advantages": row.advantages}, theirs, EXACT, f"seed {seed}")


def test_all_equal_rewards_in_float32() -> None:
    """Where the two part: seven rewards of 0.1 have a float32 mean that is not 0.1.  TRL divides
    what is left by 1e-4; here a group whose rewards are all equal has advantage 0."""
    rewards = torch.full((7,), 0.1, dtype=torch.float32)
    weights = torch.ones(1, dtype=torch.float32)
    theirs = trl.grpo_advantages(trl.settings("grpo"), rewards[:, None], 7, weights)
    ours = group_advantages(rewards, torch.zeros(7, dtype=torch.int64), ddof=1, eps=1e-4)
    assert ours.eq(0).all()
    assert 0 < theirs.abs().max() < 1e-3


def test_rloo(agree: Agree) -> None:
    """Advantages with and without KL in the reward, then TRL's loss on the ratio of answers."""
    for seed in range(3 * len(SEEDS)):
        batch = random_batch(seed, holes=False)
        rewards = torch.randn(len(batch.mask))
        rewards[torch.rand(len(rewards)) < 0.1] = math.nan
        beta = (0.0, 0.05)[seed % 2]
        mask = batch.mask
        theirs = trl.rloo_advantages(
            trl.settings("rloo", beta=beta),
            rewards[:, None],
            batch.size,
            torch.ones(1),
            batch.old,
            batch.ref,
            mask.double(),
        )
        row = compute_advantages(
            replace(RLOO, beta=beta),
            rewards,
            batch.groups,
            old_logprobs=hidden(batch.old, mask),
            ref_logprobs=hidden(batch.ref, mask),
            response_mask=mask,
        )
        same = {"advantages": row.advantages}, {"advantages": theirs}
        agree("RLOOTrainer, advantages", *same, EXACT, f"seed {seed}")
        if beta == 0:
            plain = {"advantages": leave_one_out_advantages(rewards, batch.groups)}
            agree("RLOOTrainer, advantages", plain, same[1], EXACT, f"seed {seed}")

        config = trl.settings("rloo", epsilon=0.2, epsilon_high=0.3)
        new = leaf(batch.new)
        loss, metrics = trl.rloo_loss(config, new, mask.double(), theirs, batch.old)
        wanted = with_gradients(loss, logprobs=new)
        new = leaf(hidden(batch.new, mask))
        loss, stats = policy_loss(
            new,
            hidden(batch.old, mask),
            theirs,
            mask,
            ratio_level="sequence_sum",
            epsilon_low=0.2,
            epsilon_high=0.3,
        )
        agree("RLOOTrainer, loss", with_gradients(loss, logprobs=new), wanted, EXACT, f"{seed=}")
        names = tuple(f"clip_ratio/{end}_mean" for end in ("low", "high", "region"))
        agree("RLOOTrainer, statistics", *both(metrics, stats, names), SINGLE, f"seed {seed}")


def test_the_row_rloo_at_the_first_step(agree: Agree) -> None:
    """The paper has no ratio; with one update per batch TRL's clip does nothing to the gradient."""
    for seed in SEEDS:
        batch = random_batch(seed, holes=False, per_token=False)
        mask, config = batch.mask, trl.settings("rloo")
        new = leaf(batch.new)
        loss, _ = trl.rloo_loss(config, new, mask.double(), batch.advantages, batch.new)
        wanted = with_gradients(loss, logprobs=new)
        new = leaf(hidden(batch.new, mask))
        loss, _ = compute_loss(RLOO, new, hidden(batch.new, mask), batch.advantages, mask)
        found = with_gradients(loss, logprobs=new)
        del wanted["loss"], found["loss"]  # A against A log pi: only the gradients are one
        agree("RLOOTrainer, first step", found, wanted, EXACT, f"seed {seed}")


ROWS: dict[str, tuple[Algorithm, dict[str, Any]]] = {  # a row as it stands, and TRL's words for it
    "grpo": (GRPO, {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False}),
    "dr-grpo": (DR_GRPO, {"loss_type": "dr_grpo", "max_completion_length": 12}),
    "dapo": (DAPO, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": (
        GSPO,
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
    ),
    "cispo": (CISPO, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "bnpo-trl": (BNPO_TRL, {"loss_type": "bnpo"}),
    "sapo": (SAPO, {"loss_type": "sapo"}),
    "luspo": (
        LUSPO,
        {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "epsilon": 2e-3,
            "epsilon_high": 2.5e-3,
        },
    ),
    "vespo": (VESPO, {"loss_type": "vespo"}),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_as_they_stand(name: str, agree: Agree) -> None:
    row, theirs = ROWS[name]
    config = trl.settings("grpo", **theirs)
    for seed in SEEDS:
        batch = random_batch(seed)
        mask = batch.mask
        new = leaf(batch.new)
        loss, _ = trl.grpo_loss(
            config,
            new,
            batch.responses.double(),
            batch.advantages,
            old=batch.old,
            ref=batch.ref,
            tool_mask=batch.tools.double(),
        )
        wanted = with_gradients(loss, logprobs=new)
        new = leaf(hidden(batch.new, mask))
        loss, _ = compute_loss(
            row,
            new,
            hidden(batch.old, mask),
            batch.advantages,
            mask,
            ref_logprobs=hidden(batch.ref, mask),
            constant=12,
        )
        found = with_gradients(loss, logprobs=new)
        agree(f"row {name}", found, wanted, EXACT, f"seed {seed}")


def test_soft_overlong_punishment(agree: Agree) -> None:
    for seed in SEEDS:
        draw = random.Random(seed)
        longest = draw.randint(1, 40)
        cache = draw.randint(0, longest)
        lengths = list(range(1, 50))
        ours = overlong_penalty(torch.tensor(lengths), max_length=longest, cache_length=cache)
        theirs = torch.tensor(trl.overlong(lengths, longest, cache))
        same = {"penalty": ours.double()}, {"penalty": theirs}
        agree("soft overlong punishment", *same, EXACT, f"L_max {longest}, L_cache {cache}")


# --- preferences --------------------------------------------------------------------------------


@dataclass
class Pairs:
    """Log-probs per token of chosen and rejected answers, (B, T) and (B, S), 0 in padding."""

    masks: list[Tensor]
    policy: list[Tensor]
    ref: list[Tensor]


def random_pairs(seed: int) -> Pairs:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows, scale = draw.randint(1, 6), draw.choice([0.01, 0.5, 3.0])
    masks, policy, ref = [], [], []
    for _ in ("chosen", "rejected"):
        slots = draw.randint(1, 8)
        mask = torch.arange(slots) < torch.randint(1, slots + 1, (rows, 1))
        base = -torch.rand(rows, slots) * 3 * mask
        masks.append(mask)
        policy.append(-(base + scale * torch.randn(rows, slots)).abs() * mask)
        ref.append(base)
    return Pairs(masks, policy, ref)


PREFERENCES: dict[str, tuple[PreferenceMethod, dict[str, Any]]] = {
    "sigmoid": (DPO, {"loss_type": "sigmoid", "beta": 0.1}),
    "robust": (ROBUST_DPO, {"loss_type": "robust", "beta": 0.1, "label_smoothing": 0.1}),
    "hinge": (HINGE, {"loss_type": "hinge", "beta": 0.1}),
    "ipo": (IPO_AVERAGED, {"loss_type": "ipo", "beta": 0.1}),
    "sigmoid_norm": (DPO_NORM, {"loss_type": "sigmoid_norm", "beta": 5.0}),
}
OF_ANSWERS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
LOGPS = ("logps/chosen", "logps/rejected")


@pytest.mark.parametrize("loss_type", PREFERENCES)
def test_dpo_losses(loss_type: str, agree: Agree) -> None:
    """The rows as they stand, and preference_loss with another beta and smoothing."""
    for seed in SEEDS:
        pairs, (row, given) = random_pairs(seed), PREFERENCES[loss_type]
        for changed in ({}, {"beta": 0.7, "label_smoothing": 0.3 * (loss_type == "robust")}):
            policy = [leaf(each) for each in pairs.policy]
            loss, metrics = trl.dpo_loss(
                trl.settings("dpo", **(given | changed)),
                *policy,
                *[mask.double() for mask in pairs.masks],
                *pairs.ref,
                prompt=1 + seed % 3,
            )
            wanted = with_gradients(loss, chosen=policy[0], rejected=policy[1])

            names = LOGPS + (OF_ANSWERS if row.score == "log_ratio_sum" else ())
            for compute in (as_row, as_function):
                policy, ref = (
                    [hidden(each, mask) for each, mask in zip(side, pairs.masks, strict=True)]
                    for side in (pairs.policy, pairs.ref)
                )
                policy = [leaf(each) for each in policy]
                loss, stats = compute(replace(row, **changed), policy, pairs.masks, ref)
                found = with_gradients(loss, chosen=policy[0], rejected=policy[1])
                family = f"DPOTrainer, {loss_type}"
                agree(family, found, wanted, EXACT, f"seed {seed}, {changed}")
                same = both(metrics, stats, names)
                agree(f"{family}, statistics", *same, SINGLE, f"seed {seed}, {changed}")


def as_row(row: PreferenceMethod, policy: list, masks: list, ref: list) -> Any:
    return compute_preference_loss(
        row, *policy, *masks, ref_chosen_logprobs=ref[0], ref_rejected_logprobs=ref[1]
    )


def as_function(row: PreferenceMethod, policy: list, masks: list, ref: list) -> Any:
    return preference_loss(
        *policy,
        *masks,
        ref_chosen_logprobs=ref[0],
        ref_rejected_logprobs=ref[1],
        score=row.score,
        link=row.link,
        beta=row.beta,
        label_smoothing=row.label_smoothing,
        smoothing=row.smoothing,
    )


@dataclass
class Logits:
    """Chosen and rejected answers behind one prompt, as token ids, and a model's logits."""

    prompt: int
    ids: list[Tensor]  # (B, prompt + T) each
    masks: list[Tensor]  # True at the answer's tokens
    logits: Tensor  # (2B, L, V)

    def logprobs(self, logits: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Ours: per token of each side, with the masks that fit them."""
        rows = len(self.ids[0])
        sides = zip((logits[:rows], logits[rows:]), self.ids, strict=True)
        logprobs = [token_logprobs(side[:, : ids.shape[1]], ids) for side, ids in sides]
        return logprobs, [mask[:, 1:] for mask in self.masks]


def random_logits(seed: int, *, prompt: int) -> Logits:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows, vocabulary = draw.randint(1, 5), draw.randint(2, 11)
    ids, masks = [], []
    for _ in ("chosen", "rejected"):
        slots = draw.randint(1, 7)
        ids.append(torch.randint(0, vocabulary, (rows, prompt + slots)))
        lengths = torch.randint(1, slots + 1, (rows, 1))
        places = torch.arange(prompt + slots)
        masks.append((places >= prompt) & (places < prompt + lengths))
    longest = max(each.shape[1] for each in ids)
    logits = torch.randn(2 * rows, longest, vocabulary) * draw.choice([0.3, 2.0])
    return Logits(prompt, ids, masks, logits)


def test_simpo(agree: Agree) -> None:
    """CPOTrainer from the logits on: the shift by one, the mean over the answer, the loss."""
    for seed in SEEDS:
        data = random_logits(seed, prompt=1 + seed % 3)
        for row in (SIMPO, replace(SIMPO, beta=0.6, gamma=0.3)):
            config = trl.settings(
                "cpo", loss_type="simpo", cpo_alpha=0.0, beta=row.beta, simpo_gamma=row.gamma
            )
            logits = leaf(data.logits)
            loss, metrics = trl.simpo_loss(
                config, logits, *data.ids, *data.masks, prompt=data.prompt
            )
            wanted = with_gradients(loss, logits=logits)
            logits = leaf(data.logits)
            logprobs, masks = data.logprobs(logits)
            loss, stats = compute_preference_loss(row, *logprobs, *masks)
            agree(
                "CPOTrainer, simpo", with_gradients(loss, logits=logits), wanted, EXACT, f"{seed=}"
            )
            same = both(metrics, stats, OF_ANSWERS + LOGPS)
            agree("CPOTrainer, simpo, statistics", *same, SINGLE, f"seed {seed}")


def test_orpo(agree: Agree) -> None:
    """TRL's likelihood covers the prompt: the same number where the prompt is one token, which no
    token predicts; with a longer prompt, the prompt's share is added here by sft_loss."""
    for seed in SEEDS:
        data = random_logits(seed, prompt=1 + seed % 3)
        for weight in (ORPO.weight, 0.4):
            logits = leaf(data.logits)
            config = trl.settings("orpo", beta=weight)
            loss, metrics = trl.orpo_loss(
                config, logits, *data.ids, *data.masks, prompt=data.prompt
            )
            wanted = with_gradients(loss, logits=logits)

            logits = leaf(data.logits)
            logprobs, masks = data.logprobs(logits)
            row = replace(ORPO, weight=weight)
            if data.prompt == 1:
                loss, stats = compute_preference_loss(row, *logprobs, *masks)
                names: tuple[str, ...] = ("nll_loss",)
            else:
                whole = masks[0] | (torch.arange(masks[0].shape[1]) < data.prompt - 1)
                loss, stats = compute_preference_loss(replace(row, nll_coef=0.0), *logprobs, *masks)
                loss, names = loss + sft_loss(logprobs[0], whole)[0], ()
            agree("ORPOTrainer", with_gradients(loss, logits=logits), wanted, SINGLE, f"{seed=}")
            names += ("log_odds_chosen", "log_odds_ratio", *LOGPS)
            agree("ORPOTrainer, statistics", *both(metrics, stats, names), SINGLE, f"seed {seed}")


def test_kto(agree: Agree) -> None:
    for seed in range(2 * len(SEEDS)):
        answers, others = random_pairs(seed), random_pairs(seed + 1000)
        mask, other_mask = answers.masks[0], others.masks[0]
        torch.manual_seed(seed)
        desirable = torch.rand(len(mask)) < (0.0, 0.5, 1.0)[seed % 3]
        row = KTO if seed % 2 else replace(KTO, beta=0.6, weight_desirable=1.3)
        config = trl.settings(
            "kto",
            beta=row.beta,
            desirable_weight=row.weight_desirable,
            undesirable_weight=row.weight_undesirable,
        )
        logprobs = leaf(answers.policy[0])
        loss, metrics = trl.kto_loss(
            config,
            logprobs,
            mask.double(),
            answers.ref[0],
            desirable,
            others.policy[0],
            others.ref[0],
            other_mask.double(),
            prompt=1 + seed % 3,
        )
        wanted = with_gradients(loss, logprobs=logprobs)
        log_ratios = ((others.policy[0] - others.ref[0]) * other_mask).sum(dim=1)
        given = (hidden(answers.ref[0], mask), mask, desirable)
        for compute in (
            lambda leaf, row=row, given=given, ratios=log_ratios: compute_unpaired_loss(
                row, leaf, *given, mismatched_log_ratios=ratios
            ),
            lambda leaf, row=row, given=given, ratios=log_ratios: kto_loss(
                leaf,
                *given,
                mismatched_log_ratios=ratios,
                beta=row.beta,
                weight_desirable=row.weight_desirable,
                weight_undesirable=row.weight_undesirable,
            ),
        ):
            logprobs = leaf(hidden(answers.policy[0], mask))
            loss, stats = compute(logprobs)
            found = with_gradients(loss, logprobs=logprobs)
            agree("KTOTrainer", found, wanted, EXACT, f"seed {seed}")
            names = ["kl"]
            names += ["rewards/chosen", "logps/chosen"] if desirable.any() else []
            names += ["rewards/rejected", "logps/rejected"] if not desirable.all() else []
            same = both(metrics, stats, tuple(names))
            agree("KTOTrainer, statistics", *same, EXACT, f"seed {seed}")


# --- reward model, supervised, logits -------------------------------------------------------------


def test_reward_model(agree: Agree) -> None:
    for seed in range(2 * len(SEEDS)):
        torch.manual_seed(seed)
        rows = 1 + seed % 7
        rewards = torch.randn(2, rows) * (0.1, 1.0, 30.0)[seed % 3]
        margin = torch.rand(rows) * 2 if seed % 2 else None
        centre = (0.0, 0.01, 0.3)[seed % 3]
        chosen, rejected = leaf(rewards[0]), leaf(rewards[1])
        config = trl.settings("reward", center_rewards_coefficient=centre or None)
        loss, metrics = trl.reward_loss(config, chosen, rejected, margin)
        wanted = with_gradients(loss, chosen=chosen, rejected=rejected)
        row = replace(REWARD_MODEL, center_coef=centre)
        for loss, stats in (
            compute_reward_model_loss(row, chosen, rejected, margin=margin),
            reward_model_loss(chosen, rejected, margin=margin, center_coef=centre),
        ):
            found = with_gradients(loss, chosen=chosen, rejected=rejected)
            agree("RewardTrainer", found, wanted, EXACT, f"seed {seed}")
            names = ("accuracy", "margin", "min_reward", "mean_reward", "max_reward")
            same = both(metrics, stats, names)
            agree("RewardTrainer, statistics", *same, SINGLE, f"seed {seed}")


def test_supervised(agree: Agree) -> None:
    """Token mean from the logits on; with the step's token count, a part of a larger step."""
    for seed in SEEDS:
        data = random_logits(seed, prompt=1 + seed % 3)
        rows = len(data.ids[0])
        ids, mask = data.ids[0], data.masks[0]
        given = data.logits[:rows, : ids.shape[1]]
        labels = torch.where(mask, ids, -100)
        step_tokens = int(mask.sum()) + 7 if seed % 2 else None
        logits = leaf(given)
        loss, _ = trl.sft_loss(trl.settings("sft", loss_type="nll"), logits, labels, step_tokens)
        wanted = with_gradients(loss, logits=logits)
        logits = leaf(given)
        loss, _ = sft_loss(token_logprobs(logits, ids), mask[:, 1:], total=step_tokens)
        agree("SFTTrainer", with_gradients(loss, logits=logits), wanted, EXACT, f"seed {seed}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_logprobs_and_entropy(dtype: torch.dtype, agree: Agree) -> None:
    for seed in SEEDS:
        data = random_logits(seed, prompt=2)
        ids = data.ids[0]
        given = (data.logits[: len(ids), : ids.shape[1]] / 4).to(dtype)  # log-probs of a few nats
        weights = torch.randn(ids.shape[0], ids.shape[1] - 1, dtype=dtype)
        wanted, found = {}, {}
        for name, ours, theirs in (
            (
                "log-probs",
                lambda logits, ids=ids: token_logprobs(logits, ids),
                lambda logits, ids=ids: trl.logprobs_of(logits[:, :-1], ids[:, 1:]),
            ),
            (
                "entropy",
                lambda logits: entropy(logits)[:, :-1],
                lambda logits: trl.entropy_of(logits)[:, :-1],
            ),
        ):
            for results, function in ((found, ours), (wanted, theirs)):
                logits = leaf(given)
                values = function(logits)
                (gradient,) = torch.autograd.grad((weights * values).sum(), logits)
                results[name] = values.detach()
                results[f"gradient of {name}"] = gradient
        tolerance = EXACT if dtype == torch.float64 else SINGLE
        agree(f"log-probs and entropy, {str(dtype)[6:]}", found, wanted, tolerance, f"seed {seed}")


def test_a_forward_pass_of_a_real_model(agree: Agree) -> None:
    """GRPOTrainer's log-probs and entropies, behind left-padded prompts, at a temperature; the
    gradient is that of the model's parameters.  TRL's fused head computes in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=7,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    for seed in range(3):
        torch.manual_seed(seed)
        rows, prompt, slots, temperature = 4, 5, 6, (1.0, 0.7, 1.4)[seed]
        model = LlamaForCausalLM(config).float().eval()
        ids = torch.randint(0, config.vocab_size, (rows, prompt + slots))
        places = torch.arange(prompt + slots)
        starts = torch.randint(0, prompt, (rows, 1))
        ends = prompt + torch.randint(1, slots + 1, (rows, 1))
        attention = ((places >= starts) & (places < ends)).long()
        mask = attention[:, prompt:].bool()
        weights = torch.randn(2, rows, slots, dtype=torch.float32)

        def parts(values: list[Tensor], model=model, mask=mask, weights=weights) -> Results:
            values = [torch.where(mask, each, 0.0) for each in values]
            loss = (weights * torch.stack(values)).mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            flat = torch.cat([each.flatten() for each in gradients])
            return {"log-probs": values[0], "entropy": values[1], "gradient": flat}

        logits = model(ids, attention_mask=attention).logits
        ours = [
            token_logprobs(logits, ids, temperature=temperature)[:, -slots:],
            entropy(logits[:, :-1], temperature=temperature)[:, -slots:],
        ]
        found = parts(ours)
        theirs = trl.logprobs_and_entropies(model, ids, attention, slots, temperature)
        agree("GRPOTrainer, a real model", found, parts(list(theirs)), SINGLE, f"seed {seed}")
