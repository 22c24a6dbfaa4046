"""Every row's objective on one small batch: what a device must agree on with the CPU."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlcore.algorithms import GRPO_MEAN_ONLY, PPO, ROWS, compute_advantages, compute_loss
from rlcore.objectives import entropy, equal_groups, token_logprobs

ALL_TERMS = replace(PPO, name="all-terms", overlong="filter", entropy_coef=0.1, nll_coef=0.1)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def step(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """From logits to gradients for every row, on 24 responses of 6 prompts."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, 9, 50, generator=generator).to(device, dtype).requires_grad_()
    ids = torch.randint(0, 50, (24, 9), generator=generator).to(device)
    lengths = torch.randint(1, 9, (24,), generator=generator)
    mask = (torch.arange(8) < lengths[:, None]).to(device)
    rewards = torch.randint(0, 2, (24,), generator=generator).float().to(device)
    rewards[5] = torch.nan
    groups = torch.arange(24).remainder(6).to(device)
    reference = torch.randn(24, 8, generator=generator).to(device)
    values = torch.randn(24, 8, generator=generator).to(device)
    greedy = torch.randint(0, 2, (24,), generator=generator).float().to(device)
    several = torch.stack([rewards, torch.randn(24, generator=generator).to(device)], dim=1)
    truncated = (torch.arange(24) % 7 == 3).to(device)
    old = token_logprobs(logits, ids, temperature=0.9).detach() + 0.1 * reference.abs()
    results = {"share": equal_groups(rewards, groups).share}
    for row in (*ROWS, GRPO_MEAN_ONLY, ALL_TERMS):
        scores = token_logprobs(logits, ids, temperature=0.9)
        advantages, returns, history = compute_advantages(
            row,
            several if row.reward == "several" else rewards,
            groups,
            old_logprobs=old,
            ref_logprobs=reference,
            response_mask=mask,
            max_length=8,
            greedy_rewards=greedy,
            values=values,
        )
        if history is not None:  # a second visit to every prompt
            results |= history._asdict()
            advantages = compute_advantages(row, 1 - rewards, groups, history=history).advantages
        critic = values + 0.1 * scores
        loss, stats = compute_loss(
            row,
            scores,
            old,
            advantages,
            mask & ~rewards.isnan()[:, None],
            ref_logprobs=reference,
            constant=8,
            entropies=entropy(logits)[:, :-1],
            values=critic,
            old_values=values,
            returns=returns,
            correct=rewards == 1,
            truncated=truncated,
            allow_empty=True,
        )
        loss = loss - 0.01 * torch.where(mask, entropy(logits)[:, :-1], 0.0).sum()
        (gradient,) = torch.autograd.grad(loss, logits)
        results[f"{row.name} advantages"] = advantages
        results[f"{row.name} loss"] = loss.detach()
        results[f"{row.name} gradient"] = gradient
        results |= {f"{row.name} {key}": value for key, value in stats.items()}
    return results
