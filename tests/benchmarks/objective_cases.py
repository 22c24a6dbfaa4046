"""What is compared: rlcore's objectives and TRL's equivalents, on the same tensors.

A side is a function without arguments that computes values and, where there is one, the gradient,
and returns them; all sides of a case return the same numbers (`objective_costs` checks it first).

ours   the functions of `rlcore.objectives`, with all their checks, and their statistics as numbers
trl    TRL's own code, nothing taken out: a trainer's method driven on a stub whose model gives the
       tensors (what it also does, such as putting prompt and completion together, is included), or
       a function of `trl.trainer.utils`, or, where TRL has the lines inside a long method, those
full   ours, and all that TRL's side logs beyond it, in plain torch where we have no name for it
bare   the formula alone in plain torch: no check, no statistics, any mask believed
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore import objectives as ours

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before TRL is imported: nothing is fetched
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

Values = tuple[Tensor, ...]
Side = Callable[[], Values]


@dataclass(frozen=True)
class Size:
    """rows x tokens, with a vocabulary where logits are involved."""

    rows: int
    tokens: int = 1
    vocabulary: int = 0
    dtype: str = "float32"

    def __str__(self) -> str:
        words = [f"{self.rows} x {self.tokens}" if self.tokens > 1 else f"{self.rows}"]
        if self.vocabulary:
            words.append(f"x {self.vocabulary} {self.dtype}")
        return " ".join(words)

    def elements(self) -> int:
        return self.rows * self.tokens * max(1, self.vocabulary)


class Sides(dict[str, Side]):
    """The sides of a comparison, and the slots (of results of the mask's shape) that count."""

    mask: Tensor | None = None


@dataclass(frozen=True)
class Case:
    """One comparison. `tolerance` is relative to the largest value of TRL's side."""

    name: str
    says: dict[str, str]  # side -> what it computes
    make: Callable[[Size], Sides]
    sizes: tuple[Size, ...]
    tolerance: float = 1e-4


# ---- the loss of a policy


@dataclass
class Rollout:
    """A batch of responses as TRL holds it: float32 log-probs, an int64 mask, padding at the end.

    Padded log-probs are 0, and entropies too, since TRL's formulas read them.
    """

    logprobs: Tensor
    old: Tensor
    ref: Tensor
    entropies: Tensor
    advantages: Tensor
    mask: Tensor
    ids: Tensor


def rollout(size: Size) -> Rollout:
    generator = torch.Generator().manual_seed(0)
    shape = (size.rows, size.tokens)
    lengths = torch.randint(size.tokens // 2, size.tokens + 1, (size.rows,), generator=generator)
    mask = (torch.arange(size.tokens) < lengths.clamp(min=1)[:, None]).long()
    new = torch.randn(shape, generator=generator).abs().neg() * mask
    old, ref = (new + 0.15 * torch.randn(shape, generator=generator) * mask for _ in range(2))
    entropies = torch.rand(shape, generator=generator) * mask
    advantages = torch.randn(size.rows, generator=generator)
    ids = torch.randint(0, 32_000, shape, generator=generator)
    return Rollout(new.requires_grad_(), old, ref, entropies, advantages, mask, ids)


def gradient(loss: Tensor, leaf: Tensor) -> Values:
    """The loss and its gradient, which the leaf does not keep: every call starts alike."""
    loss.backward()
    found, leaf.grad = leaf.grad, None
    assert found is not None
    return loss.detach(), found


def numbers(stats: dict[str, Tensor]) -> dict[str, float]:
    """As a log takes them, and as TRL does."""
    return {name: value.item() for name, value in stats.items()}


def one_process() -> SimpleNamespace:
    """What TRL asks of an accelerator, for a single process."""

    def same(value: Tensor, *_: Any, **__: Any) -> Tensor:
        return value

    return SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=same,
        gather_for_metrics=same,
        reduce=same,
        device=torch.device("cpu"),
    )


def trl_policy(batch: Rollout, *, weighted_kl: bool = True, **settings: Any) -> Side:
    """GRPOTrainer._compute_loss on a stub; weighted_kl: TRL's use_bias_correction_kl."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    arguments = {
        "loss_type": "grpo",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "importance_sampling_level": "token",
        **settings,
    }
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.logprobs, batch.entropies, None),
        **arguments,
        args=SimpleNamespace(
            use_bias_correction_kl=weighted_kl, delta=None, steps_per_generation=1
        ),
        model=SimpleNamespace(training=True),
        accelerator=one_process(),
        current_gradient_accumulation_steps=1,
        max_completion_length=batch.mask.shape[1],
        aux_loss_enabled=False,
        use_vllm=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _entropy_bonus_enabled=False,
    )
    prompt = torch.ones(len(batch.mask), 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": batch.ids,
        "completion_mask": batch.mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.ref,
        "num_items_in_batch": batch.mask.sum(),
    }

    def side() -> Values:
        trainer._metrics = {"train": defaultdict(list)}
        return gradient(GRPOTrainer._compute_loss(trainer, None, inputs), batch.logprobs)

    return side


def our_policy(batch: Rollout, *, full: bool = False, **settings: Any) -> Side:
    """policy_loss; full: with the mean entropy and the clipped shares' extremes, which TRL logs."""
    arguments = dict(settings)
    if settings.get("beta"):
        arguments["ref_logprobs"] = batch.ref
    if full:
        arguments["entropies"] = batch.entropies

    def side() -> Values:
        loss, stats = ours.policy_loss(
            batch.logprobs, batch.old, batch.advantages, batch.mask, **arguments
        )
        numbers(stats)
        if full:
            clipped_extremes(batch, **settings)
        return gradient(loss, batch.logprobs)

    return side


@torch.no_grad()
def clipped_extremes(
    batch: Rollout,
    *,
    surrogate: str = "clip",
    ratio_level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    **_: Any,
) -> tuple[float, float] | None:
    """TRL's clip_ratio/low_min and high_max: over the responses, not the tokens.

    In plain torch, as someone would who wants them beside policy_loss: the ratio, which TRL's lines
    have from its loss, is computed again. Padding has ratio 1, which no range leaves out.
    """
    if surrogate != "clip":
        return None
    ratio, lengths = batch.logprobs - batch.old, batch.mask.sum(dim=1)
    if ratio_level == "sequence":
        ratio, lengths = ratio.sum(dim=1, keepdim=True) / lengths[:, None], torch.ones(())
    ratio.exp_()
    advantage = batch.advantages
    below = ratio.lt(1 - epsilon_low).sum(dim=1) / lengths * (advantage < 0)
    above = ratio.gt(1 + epsilon_high).sum(dim=1) / lengths * (advantage > 0)
    return below.min().item(), above.max().item()


def bare_policy(
    batch: Rollout,
    *,
    surrogate: str = "clip",
    ratio_level: str = "token",
    aggregation: str = "sequence_mean",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    beta: float = 0.0,
    **_: Any,
) -> Side:
    """The formula in as few operations as torch needs."""
    mask, advantage = batch.mask.float(), batch.advantages[:, None]

    def side() -> Values:
        log_ratio = batch.logprobs - batch.old
        if ratio_level == "sequence":
            log_ratio = (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
        if surrogate == "capped":
            values = -clipped.detach() * advantage * batch.logprobs
        else:
            values = -torch.minimum(ratio * advantage, clipped * advantage)
        if beta:
            difference = batch.ref - batch.logprobs
            values = values + beta * (difference.exp() - difference - 1) * ratio
        if aggregation == "token_mean":
            loss = (values * mask).sum() / mask.sum()
        else:
            loss = ((values * mask).sum(1) / mask.sum(1)).mean()
        return gradient(loss, batch.logprobs)

    return side


def policy_case(name: str, theirs: dict[str, Any], settings: dict[str, Any]) -> Case:
    def make(size: Size) -> Sides:
        batch = rollout(size)
        return Sides(
            ours=our_policy(batch, **settings),
            trl=trl_policy(batch, **theirs),
            full=our_policy(batch, full=True, **settings),
            bare=bare_policy(batch, **settings),
        )

    return Case(
        name,
        {
            "ours": "policy_loss, forward and backward, its statistics as numbers",
            "trl": "GRPOTrainer._compute_loss, forward and backward: also prompt and completion "
            "put together, mean entropy, least and largest clipped share of a response",
            "full": "ours, and the mean entropy and the two extremes as well",
            "bare": "the formula, forward and backward",
        },
        make,
        (Size(8, 32), Size(32, 128), Size(128, 512), Size(512, 2048)),
    )


POLICY = (
    policy_case("GRPO loss", {}, {}),
    policy_case(
        "GRPO loss with KL",
        {"beta": 0.04},
        {"beta": 0.04, "kl_importance_weighted": True},
    ),
    policy_case(
        "DAPO loss",
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"epsilon_high": 0.28, "aggregation": "token_mean"},
    ),
    policy_case(
        "GSPO loss",
        {"importance_sampling_level": "sequence", "epsilon_low": 3e-3, "epsilon_high": 4e-3},
        {"ratio_level": "sequence", "epsilon_low": 3e-3, "epsilon_high": 4e-3},
    ),
    policy_case(  # TRL's cap is 1 + epsilon_high, without a lower one
        "CISPO loss",
        {"loss_type": "cispo", "epsilon_high": 1.28},
        {
            "surrogate": "capped",
            "epsilon_low": 1.0,
            "epsilon_high": 0.28,
            "aggregation": "token_mean",
        },
    ),
)


# ---- KL, advantages, preferences


def kl_sides(size: Size) -> Sides:
    batch = rollout(size)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    mask = batch.mask

    def one() -> Values:
        kl = ours.kl_per_token(batch.logprobs, batch.ref, mask)
        return gradient(ours.aggregate(kl, mask, how="token_mean"), batch.logprobs)

    def bare() -> Values:  # grpo_trainer.py, _compute_loss
        new, ref = batch.logprobs, batch.ref
        kl = torch.exp(ref - new) - (ref - new) - 1
        return gradient((kl * mask).sum() / mask.sum().clamp(min=1.0), new)

    two = trl_policy(batch, loss_type="dapo", beta=1.0, weighted_kl=False)
    return Sides(ours=one, trl=two, bare=bare)


KL = Case(
    "KL, k3",
    {
        "ours": "aggregate(kl_per_token(...)), forward and backward: two functions for use on "
        "their own, each of which reads the mask and checks its arguments; in a loss, policy_loss "
        "does both at once (GRPO loss with KL)",
        "trl": "the least that TRL can be asked for a KL and its gradient: the whole of "
        "GRPOTrainer._compute_loss, forward and backward, with advantages 0 and beta 1, so that "
        "its loss is the mean KL; it computes a policy's loss and statistics along the way",
        "bare": "the three lines for the KL inside of that method, forward and backward: no "
        "function of their own there, nothing is read or checked",
    },
    kl_sides,
    (Size(8, 32), Size(32, 128), Size(128, 512), Size(512, 2048)),
)


def advantage_sides(size: Size) -> Sides:
    from trl.trainer.utils import nanstd

    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(size.rows, generator=generator)
    group = 8
    ids = torch.arange(size.rows) // group

    def one() -> Values:
        return (ours.group_advantages(rewards, ids, ddof=1, eps=1e-4),)

    def two() -> Values:  # grpo_trainer.py, _generate_and_score_completions
        mean = torch.nanmean(rewards.view(-1, group), dim=1).repeat_interleave(group, dim=0)
        std = nanstd(rewards.view(-1, group), dim=1).repeat_interleave(group, dim=0)
        advantages = (rewards - mean) / (std + 1e-4)
        is_std_zero = torch.isclose(std, torch.zeros_like(std))
        is_std_zero.float().mean().item()
        return (torch.nan_to_num(advantages, nan=0.0),)

    def full() -> Values:
        (advantages,) = one()
        informative = advantages.view(-1, group).any(dim=1)
        _ = 1 - informative.count_nonzero().item() / len(informative)
        return (advantages,)

    def bare() -> Values:
        table = rewards.view(-1, group)
        std, mean = torch.std_mean(table, dim=1, keepdim=True)
        return (((table - mean) / (std + 1e-4)).view(-1),)

    return Sides(ours=one, trl=two, full=full, bare=bare)


ADVANTAGES = Case(
    "Group advantages",
    {
        "ours": "group_advantages: groups by id, in any order and of any size, rewards that may be "
        "missing or infinite (an error), in float64, the same bits however the rows are shuffled",
        "trl": "the lines of GRPOTrainer._generate_and_score_completions: groups by position, all "
        "of one size; also the share of groups without spread",
        "full": "ours, and that share as well, by position too, from the advantages: a group's are "
        "all 0 if its rewards are all equal, and only then (equal_groups finds the same by id, "
        "from the rewards alone)",
        "bare": "std_mean by position, missing rewards not provided for",
    },
    advantage_sides,
    (Size(64), Size(512), Size(8192)),
)


def preference_sides(size: Size) -> Sides:
    from trl.trainer.dpo_trainer import DPOTrainer

    batch = rollout(Size(2 * size.rows, size.tokens))
    new, ref, mask = batch.logprobs, batch.ref, batch.mask
    generator = torch.Generator().manual_seed(1)
    outputs = SimpleNamespace(
        log_probs=new,
        entropy=batch.entropies,
        mean_logits=torch.randn(mask.shape, generator=generator),
        is_top1=torch.rand(mask.shape, generator=generator) < 0.5,
    )

    class Model(torch.nn.Module):  # a module, since with peft installed TRL looks into it
        is_gradient_checkpointing = False

        def __call__(self, **_: Any) -> SimpleNamespace:
            return outputs

    def reference(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(log_probs=ref)

    trainer = SimpleNamespace(
        model=Model(),
        ref_model=reference,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        accelerator=one_process(),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        label_smoothing=0.0,
        use_weighting=False,
        beta=0.1,
        _total_train_tokens=0,
        _tp_size=1,
    )
    first = torch.ones(len(mask), 1, dtype=torch.int64)  # TRL's mask is that of the unshifted ids
    inputs = {
        "input_ids": torch.cat([first, batch.ids], dim=1),
        "attention_mask": torch.cat([first, mask], dim=1),
        "completion_mask": torch.cat([0 * first, mask], dim=1),
    }

    def one() -> Values:
        (chosen, rejected), (above, below) = new.chunk(2), ref.chunk(2)
        masks = mask.chunk(2)
        loss, stats = ours.preference_loss(
            chosen, rejected, *masks, ref_chosen_logprobs=above, ref_rejected_logprobs=below
        )
        numbers(stats)
        return gradient(loss, new)

    def two() -> Values:
        trainer._metrics = {"train": defaultdict(list)}
        return gradient(DPOTrainer._compute_loss(trainer, trainer.model, inputs, False), new)

    def bare() -> Values:
        chosen, rejected = (new.sum(dim=1) - ref.sum(dim=1)).chunk(2)
        return gradient(-F.logsigmoid(0.1 * (chosen - rejected)).mean(), new)

    sides = Sides(ours=one, trl=two, bare=bare)
    sides.mask = mask  # TRL's model gives constants in padding; here they are part of the leaf
    return sides


PREFERENCES = Case(
    "DPO loss",
    {
        "ours": "preference_loss from log-probs per token, forward and backward, statistics as "
        "numbers",
        "trl": "DPOTrainer._compute_loss from log-probs per token, forward and backward: also mean "
        "entropy, mean logits and token accuracy",
        "bare": "the formula, padding believed to be 0, forward and backward",
    },
    preference_sides,
    (Size(4, 32), Size(16, 128), Size(64, 512), Size(256, 2048)),
)


# ---- from logits


def table_of_logits(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (size.rows, size.tokens)
    logits = torch.randn(*shape, size.vocabulary, generator=generator)
    ids = torch.randint(0, size.vocabulary, shape, generator=generator)
    weights = torch.randn(shape, generator=generator)
    return logits.to(getattr(torch, size.dtype)).requires_grad_(), ids, weights


def pushed(values: Tensor, weights: Tensor, leaf: Tensor) -> Values:
    """A gradient that is 0 nowhere: no side can save itself a row."""
    values.backward(weights.to(values.dtype))
    found, leaf.grad = leaf.grad, None
    assert found is not None
    return values.detach(), found


def logprob_sides(size: Size) -> Sides:
    from trl.trainer.utils import selective_log_softmax

    logits, ids, weights = table_of_logits(size)

    def one() -> Values:
        return pushed(ours.token_logprobs(logits, ids), weights[:, 1:], logits)

    def two() -> Values:
        return pushed(selective_log_softmax(logits[:, :-1], ids[:, 1:]), weights[:, 1:], logits)

    return Sides(ours=one, trl=two)


def uncut_sides(size: Size) -> Sides:
    """TRL without the cut: its gradient is then not copied once more (a caller who can do so)."""
    from trl.trainer.utils import selective_log_softmax

    logits, ids, weights = table_of_logits(size)
    following = ids.roll(-1, dims=1)
    last = torch.ones_like(weights)
    last[:, -1] = 0
    pushes = weights * last

    def one() -> Values:
        values = ours.token_logprobs(logits, ids)
        return pushed(values, pushes[:, :-1], logits)

    def two() -> Values:
        values, change = pushed(selective_log_softmax(logits, following), pushes, logits)
        return values[:, :-1], change

    return Sides(ours=one, trl=two)


def entropy_sides(size: Size) -> Sides:
    from trl.trainer.utils import entropy_from_logits

    logits, _, weights = table_of_logits(size)

    def one() -> Values:
        return pushed(ours.entropy(logits), weights, logits)

    def two() -> Values:
        return pushed(entropy_from_logits(logits), weights, logits)

    return Sides(ours=one, trl=two)


def logits_cases(dtype: str, tolerance: float, why: str) -> tuple[Case, ...]:
    sizes: tuple[Size, ...] = (Size(8, 32, 512, dtype), Size(64, 256, 512, dtype))
    sizes += tuple(Size(*shape, 32_000, dtype) for shape in ((4, 64), (16, 128), (16, 512)))
    both = "forward and backward"
    return (
        Case(
            f"Token log-probs, {dtype}",
            {
                "ours": f"token_logprobs, {both}, in float32",
                "trl": f"selective_log_softmax of logits[:, :-1], as its trainers call it, {both}"
                + why,
            },
            logprob_sides,
            sizes,
            tolerance,
        ),
        Case(
            f"Token log-probs, uncut, {dtype}",
            {
                "ours": f"token_logprobs, {both}, in float32",
                "trl": f"selective_log_softmax of all logits, {both}" + why,
            },
            uncut_sides,
            sizes[2:4],
            tolerance,
        ),
        Case(
            f"Entropy, {dtype}",
            {
                "ours": f"entropy, {both}, in float32",
                "trl": f"entropy_from_logits, {both}" + why,
            },
            entropy_sides,
            sizes,
            tolerance,
        ),
    )


LOGITS = (
    *logits_cases("float32", 1e-4, ""),
    *logits_cases("bfloat16", 5e-2, ", in bfloat16"),
)

CASES = (*POLICY, KL, ADVANTAGES, PREFERENCES, *LOGITS)


def needed_bytes(size: Size) -> int:
    """A bound on what a case of this size takes: TRL holds about six tables of the logits."""
    return (32 if size.vocabulary else 400) * size.elements()


def differences(sides: Sides, tolerance: float) -> list[str]:
    """The sides whose numbers are not TRL's, to `tolerance` of the largest, with the distance."""
    found = []
    wanted = sides["trl"]()
    for name, side in sides.items():
        if name == "trl":
            continue
        for one, two in zip(side(), wanted, strict=True):
            if one.shape != two.shape:
                found.append(f"{name}: shape {tuple(one.shape)} instead of {tuple(two.shape)}")
                continue
            distance = (one.double() - two.double()).abs()
            if sides.mask is not None and sides.mask.shape == one.shape:
                distance = distance * sides.mask
            apart, scale = distance.max().item(), two.double().abs().max().item()
            if not apart <= tolerance * scale:  # NaN is apart
                found.append(f"{name}: {apart:.2g} off, of {scale:.2g}")
    return found
