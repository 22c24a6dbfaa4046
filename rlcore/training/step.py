"""One step of the policy loop, from the draw of the prompts to the moved weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms import Algorithm
from rlcore.tasks import Task
from rlcore.training.adapters import at_start
from rlcore.training.critic import Critic, monte_carlo, without_critic
from rlcore.training.draw import draw
from rlcore.training.judge import Judge, count_errors, no_reward
from rlcore.training.loop import Place
from rlcore.training.processes import Processes
from rlcore.training.progress import warn
from rlcore.training.record import Recorder
from rlcore.training.rollout import compare, describe, examples, score
from rlcore.training.update import Batch, update_policy


@dataclass
class PolicyStep:
    """What `train_policy` does at each step; its arguments under their names there."""

    model: Any
    tokenizer: Any
    task: Task
    algorithm: Algorithm
    optimizer: torch.optim.Optimizer
    judge: Judge
    reference: Any
    critic: Critic | None
    recorder: Recorder
    prompts_per_step: int
    group_size: int
    temperature: float
    updates_per_batch: int
    micro_batch_size: int | None
    max_grad_norm: float
    skip_zero_advantages: bool
    advantage_function: Callable[[Tensor, Tensor], Tensor] | None
    max_sampling_rounds: int
    samples_every: int
    cuda_graph: bool
    bootstrap_truncated: bool
    value_pretraining_steps: int
    share: Callable[[int], float]  # of the learning rate, by step
    world: Processes
    twin: Any  # of the policy, where its update is shared out
    warned: bool = False  # of a step without any reward

    def __call__(self, place: Place) -> tuple[dict[str, Any], dict[str, float | None]]:
        pretraining = place.step < self.value_pretraining_steps
        drawn = draw(
            self.model,
            self.tokenizer,
            self.task,
            self.algorithm,
            self.judge,
            place,
            prompts_per_step=self.prompts_per_step,
            group_size=self.group_size,
            temperature=self.temperature,
            max_rounds=self.max_sampling_rounds,
            cuda_graph=self.cuda_graph,
            world=self.world,
        )
        samples, judged = drawn.samples, drawn.judged
        self.recorder.add("errors", *judged.errors)
        warning = None if self.warned else no_reward(judged, place.step + 1)
        if warning is not None:  # once: a verifier that never works would say it at each step
            self.warned = True
            if self.world.is_main:
                warn(warning)
        reference = None
        if self.reference is not None:
            with (
                torch.no_grad(),
                at_start(self.reference) as start,
                place.timings.part("reference"),
            ):
                reference = score(
                    start, samples, self.temperature, self.micro_batch_size, self.world
                )
        values = after = None
        if self.critic is not None:
            self.critic.set_rate(self.share(place.step))
            with place.timings.part("critic"):
                values, after = self.critic.look(samples)
        advantages, returns, history = compare(
            monte_carlo(self.algorithm) if pretraining else self.algorithm,
            self.task,
            samples,
            judged,
            ref_logprobs=reference,
            greedy=drawn.greedy,
            history=place.history,
            reward_weights=self.judge.weights,
            values=values,
            bootstrap_values=after * samples.truncated
            if self.bootstrap_truncated and after is not None
            else None,
            function=self.advantage_function,
        )
        counted = ~judged.reward.isnan() & drawn.kept
        if self.algorithm.overlong == "filter":
            counted = counted & ~samples.truncated
        used = counted
        if self.skip_zero_advantages and not self._pushes_all:
            used = used & (advantages != 0).view(len(used), -1).any(1)
        batch = Batch(samples, judged, advantages, reference, counted, used, returns, values)
        update = self._fit_critic if pretraining else self._update
        with place.timings.part("update"):
            updates = [update(batch) for _ in range(self.updates_per_batch)]
        row = describe(samples, judged.reward, advantages, reference) | self.judge.describe(judged)
        row |= {**count_errors(judged), "rows_used": int(used.sum())}
        row |= drawn.metrics
        if pretraining:
            row |= {"rows_used": 0, "loss": None, "grad_norm": None}
        if self.critic is not None:  # of the values at sampling time, before they saw the returns
            name = "val/explained_variance"
            row[name] = updates[0][name]
        row |= {name: fmean(u[name] for u in updates) for name in updates[0] if name not in row}
        if self.updates_per_batch > 1:
            row["updates"] = updates
        if self.samples_every and place.step % self.samples_every == 0:
            names = self.task.reward_names
            self.recorder.add(
                "samples", *examples(samples, judged, names, advantages, values, place.step + 1)
            )
        place.history = history
        return row, {"reward": row["reward"], "KL": row.get("kl"), "entropy": row["entropy"]}

    @property
    def _pushes_all(self) -> bool:
        """Whether a term of the loss pushes rows of advantage 0 too."""
        row = self.algorithm
        in_loss = row.kl == "loss" and row.beta > 0
        return in_loss or row.entropy_coef > 0 or row.nll_coef > 0

    def _fit_critic(self, batch: Batch) -> dict[str, float]:
        """An update of the critic alone."""
        assert self.critic is not None
        stats = self.critic.gradient(batch)
        self.critic.step(batch)
        return stats

    def _update(self, batch: Batch) -> dict[str, float]:
        """An update of the policy, and of the critic; where one fails, neither moves."""
        of_critic = {} if self.critic is None else self.critic.gradient(batch)
        stats = update_policy(
            self.model,
            self.optimizer,
            without_critic(self.algorithm),
            batch,
            temperature=self.temperature,
            constant=self.task.max_new_tokens,
            micro_batch_size=self.micro_batch_size,
            max_grad_norm=self.max_grad_norm,
            world=self.world,
            twin=self.twin,
        )
        if self.critic is not None:
            self.critic.step(batch)
        return stats | of_critic
