"""The loop of every online algorithm: sample, verify, compare, push.

One row of `rlcore.algorithms` decides everything that differs between REINFORCE, RLOO, GRPO and
their successors; this loop is the same for all of them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms import Algorithm
from rlcore.checks import (
    check_final,
    check_folder,
    check_positive,
    check_seed,
    check_temperature,
    check_whole,
)
from rlcore.devices import choose_device, using_threads
from rlcore.evaluation import evaluate
from rlcore.tasks import Task
from rlcore.training.draw import draw
from rlcore.training.loop import Place, run_loop
from rlcore.training.record import Recorder, Run
from rlcore.training.rollout import compare, describe, examples, score
from rlcore.training.trainable import check_trainable
from rlcore.training.update import Batch, update_policy


def train_policy(
    model: Any,
    tokenizer: Any,
    task: Task,
    algorithm: Algorithm,
    *,
    steps: int,
    prompts_per_step: int = 32,
    group_size: int = 8,
    learning_rate: float,
    final_learning_rate: float = 0.1,
    temperature: float = 1.0,
    updates_per_batch: int = 1,
    micro_batch_size: int | None = None,
    max_grad_norm: float = 1.0,
    skip_zero_advantages: bool = True,
    advantage_function: Callable[[Tensor, Tensor], Tensor] | None = None,
    measure_kl: bool = False,
    max_sampling_rounds: int = 10,
    seed: int,
    evaluate_every: int = 0,
    evaluate_n: int = 512,
    checkpoint_every: int = 25,
    samples_every: int = 20,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: bool = True,
    threads: int | None = None,
    device: str | torch.device | None = None,
) -> Run:
    """Train `model` in place with one algorithm on one task's verifier.

    A step: draw prompts, sample a group for each, ask the verifier, compute advantages, and make
    `updates_per_batch` updates on the whole batch (AdamW, betas 0.9, 0.99, no weight decay; the
    learning rate falls linearly to `final_learning_rate` times `learning_rate`).
    The old log-probs are those of the first forward pass of the step, kept for all its updates: in
    the first one the ratio is exactly 1 and nothing is clipped. Dropout is off throughout.
    skip_zero_advantages: rows of advantage 0 (all-equal groups) are left out of forward and
    backward pass and still count in the divisor: the same gradient for less work. It does nothing
    where a KL term in the loss pushes those rows too.
    advantage_function: takes the place of the row's advantages, for experiments: from rewards (B,),
    NaN where missing, and group_ids (B,) to advantages (B,).
    micro_batch_size: rows per forward pass (None: all); the parts add up to the same gradient.
    measure_kl: keep a copy of the start and record the KL to it even where the row has no KL term.
    max_sampling_rounds: where the row samples dynamically, the most rounds for one step; after them
    it trains on the prompts that it has.
    The longest response (Dr. GRPO's constant, the overlong penalty's limit) is the task's
    max_new_tokens; a response is correct (likelihood term) where its reward is 1; a prompt that
    comes again (smoothed advantages) is known by its text, and its history is in the checkpoint.
    A reward that is missing (the verifier abstains or raises) leaves its row out of statistics and
    update; it is counted, and what was raised is in `Run.errors`.
    A held-out mean of nothing but missing rewards is None.
    Other arguments, and what is raised: see `train_sft`.

    Metrics per step: reward (mean of those not missing), reward_std (mean over groups of the
    population std), frac_reward_zero_std (share of all-equal groups), advantage_min and
    advantage_max, entropy (nats per token, of the distribution sampled from), kl (k3 estimate per
    token of KL(policy || start), with the tokens sampled; only with a reference), length, truncated
    (share), missing_rewards, verifier_errors, rows_used, loss and the statistics of `policy_loss`
    (over the rows used, where there are any; mean over the updates of the step), grad_norm,
    learning_rate; with several updates per batch also `updates`, a list; with dynamic sampling
    sampling_rounds and prompts_kept (the others then are of all that was sampled); greedy_reward
    where the baseline is the greedy answer.

    Raises ValueError, before anything is written, for a row that needs what the loop does not have:
    see `lacks`.
    """
    check_trainable(algorithm)
    rows = 1 if micro_batch_size is None else micro_batch_size
    check_whole(1, steps=steps, prompts_per_step=prompts_per_step, evaluate_n=evaluate_n)
    check_whole(1, updates_per_batch=updates_per_batch, micro_batch_size=rows)
    check_whole(1, max_sampling_rounds=max_sampling_rounds)
    check_whole(2, group_size=group_size)
    check_seed(seed)
    check_whole(0, evaluate_every=evaluate_every, checkpoint_every=checkpoint_every)
    check_whole(0, samples_every=samples_every)
    check_positive(learning_rate=learning_rate, max_grad_norm=max_grad_norm)
    check_temperature(temperature)
    check_final(final_learning_rate)
    check_folder(out, resume)
    model.to(choose_device(device))
    in_loss = algorithm.kl == "loss" and algorithm.beta > 0
    pushes_all = in_loss or algorithm.entropy_coef > 0 or algorithm.nll_coef > 0
    needs_reference = measure_kl or (algorithm.kl != "none" and algorithm.beta > 0)
    reference = copy.deepcopy(model).eval().requires_grad_(False) if needs_reference else None
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, learning_rate, betas=(0.9, 0.99), weight_decay=0)
    settings = {
        "method": algorithm.name,
        "task": task.name,
        "algorithm": {name: v for name, v in asdict(algorithm).items() if name != "notes"},
        "steps": steps,
        "prompts_per_step": prompts_per_step,
        "group_size": group_size,
        "learning_rate": learning_rate,
        "final_learning_rate": final_learning_rate,
        "temperature": temperature,
        "updates_per_batch": updates_per_batch,
        "micro_batch_size": micro_batch_size,
        "max_grad_norm": max_grad_norm,
        "skip_zero_advantages": skip_zero_advantages,
        "advantage_function": getattr(advantage_function, "__qualname__", None),
        "measure_kl": measure_kl,
        "max_sampling_rounds": max_sampling_rounds,
        "seed": seed,
        "parameters": sum(p.numel() for p in parameters),
    }
    recorder = Recorder(Run(settings), out, model.device)

    def rate(step: int) -> float:
        return learning_rate * (1 - (1 - final_learning_rate) * step / steps)

    def one_step(place: Place) -> tuple[dict[str, Any], dict[str, float | None]]:
        drawn = draw(
            model,
            tokenizer,
            task,
            algorithm,
            place,
            prompts_per_step=prompts_per_step,
            group_size=group_size,
            temperature=temperature,
            max_rounds=max_sampling_rounds,
        )
        samples, reward = drawn.samples, drawn.reward
        recorder.add("errors", *drawn.errors)
        reference_logprobs = None
        if reference is not None:
            with torch.no_grad():
                reference_logprobs = score(reference, samples, temperature, micro_batch_size)
        advantages, _, history = compare(
            algorithm,
            task,
            samples,
            reward,
            ref_logprobs=reference_logprobs,
            greedy=drawn.greedy,
            history=place.history,
            function=advantage_function,
        )
        counted = ~reward.isnan() & drawn.kept
        if algorithm.overlong == "filter":
            counted = counted & ~samples.truncated
        used = counted
        if skip_zero_advantages and not pushes_all:
            used = used & (advantages != 0)
        batch = Batch(samples, reward, advantages, reference_logprobs, counted, used)
        updates = [
            update_policy(
                model,
                optimizer,
                algorithm,
                batch,
                temperature=temperature,
                constant=task.max_new_tokens,
                micro_batch_size=micro_batch_size,
                max_grad_norm=max_grad_norm,
            )
            for _ in range(updates_per_batch)
        ]
        row = describe(samples, reward, advantages, reference_logprobs)
        row |= {"verifier_errors": len(drawn.errors), "rows_used": int(used.sum())}
        row |= drawn.metrics
        row |= {name: fmean(u[name] for u in updates) for name in updates[0] if name not in row}
        if updates_per_batch > 1:
            row["updates"] = updates
        if samples_every and place.step % samples_every == 0:
            recorder.add("samples", *examples(samples, reward, advantages, place.step + 1))
        place.history = history
        return row, {"reward": row["reward"], "KL": row.get("kl"), "entropy": row["entropy"]}

    with using_threads(threads):
        return run_loop(
            model,
            tokenizer,
            optimizer,
            one_step,
            title=f"{algorithm.title} {task.name}",
            recorder=recorder,
            learning_rate=rate,
            steps=steps,
            seed=seed,
            evaluation=lambda: evaluate(
                model,
                tokenizer,
                task,
                n=evaluate_n,
                temperature=temperature,
                allow_unrated=True,
            ),
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
            resume=resume,
            progress=progress,
            extra=None if reference is None else {"reference": reference},
        )
