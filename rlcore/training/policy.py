"""The loop of every online algorithm: sample, judge, compare, push.

One row of `rlcore.algorithms` decides everything that differs between REINFORCE, RLOO, GRPO and
their successors; this loop is the same for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
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
    shown,
)
from rlcore.devices import precision_settings, using_precision, using_threads
from rlcore.evaluation import evaluate
from rlcore.graph_decoding import check_cuda_graph
from rlcore.models import check_vocabulary
from rlcore.tasks import Task
from rlcore.training.adapters import start_of, weight_settings
from rlcore.training.critic import Critic, critic_settings, start_critic
from rlcore.training.judge import Judge, reward_settings
from rlcore.training.loop import run_loop
from rlcore.training.processes import processes
from rlcore.training.record import Recorder, Run
from rlcore.training.sharding import check_shard, coupled, sharded_twin
from rlcore.training.step import PolicyStep
from rlcore.training.tracking import check_trackers
from rlcore.training.trainable import check_trainable


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
    reward_model: Any = None,
    score_normalization: str = "none",
    reward_weights: Mapping[str, float] | None = None,
    critic: Any = None,
    critic_learning_rate: float | None = None,
    bootstrap_truncated: bool = False,
    value_pretraining_steps: int | None = None,
    shard: bool = False,
    cuda_graph: bool = False,
    seed: int,
    evaluate_every: int = 0,
    evaluate_n: int = 512,
    evaluate_samples: int = 1,
    checkpoint_every: int = 25,
    samples_every: int = 20,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    trackers: Sequence[str] = (),
    progress: bool = True,
    threads: int | None = None,
    precision: str = "float32",
    device: str | torch.device | None = None,
) -> Run:
    """Train `model` in place with one algorithm: with one row of `rlcore.algorithms`.

    A step: draw prompts, sample a group for each, ask what it earned, compute advantages, and make
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
    (Of a model with LoRA matrices the copy is of those alone.)
    max_sampling_rounds: where the row samples dynamically, the most rounds for one step; after them
    it trains on the prompts that it has.
    The longest response (Dr. GRPO's constant, the overlong penalty's limit) is the task's
    max_new_tokens; a response is correct (likelihood term) where the verifier gives 1; a prompt
    that comes again (smoothed advantages) is known by its text, and its history is in the
    checkpoint.
    A reward that is missing (the verifier abstains, raises or hangs, see `Task.verifier_timeout`)
    leaves its row out of statistics and update; it is counted, and what was raised is in
    `Run.errors`.
    A held-out mean of nothing but missing rewards is None.
    evaluate_n, evaluate_samples: held-out problems, and the responses sampled to each.

    Where the reward comes from. reward_model: for rows with reward="reward_model", a scalar model
    (`build_scalar_model`, `train_reward_model`), which stays as it is; its score at the last token
    is the reward, and the task's verifier is only measured. score_normalization: "none"; "start",
    the score in units of its std above its mean, both of the first step's samples. reward_weights:
    of several rewards, by name (None: 1 each): of their advantages where the row compares them
    apart, else of the sum that is the reward; a part that is missing adds nothing to it.

    The critic, for rows with advantage="gae": a model of its own, with an update for each of the
    policy's. critic: a scalar model, trained in place; None: a copy of the reward model where there
    is one, else of the policy with a head of zeros. critic_learning_rate: None, twice
    `learning_rate`, as VAPO has it; it falls alike. bootstrap_truncated: a response that was cut
    goes on with the critic's value after its last token; False, nothing follows it.
    value_pretraining_steps: of `steps`, the first so many train the critic alone, on the whole
    returns of the start policy; None: a tenth of `steps` where the row asks for it (VAPO), else
    none.

    Several processes (torchrun): see `processes.py`. prompts_per_step is the number of all of them,
    and samples, metrics and gradients are those of one process, up to rounding. shard: the policy's
    gradient and optimizer state are shared out over them (FSDP, `sharding.py`), for a model whose
    training does not fit one; the gradient is the same. The critic's are not.
    cuda_graph: sample by a recorded step, see `sample`; evaluations do not.

    Other arguments, and what is raised: see `train_sft`.

    Metrics per step: reward (mean of those not missing), reward_std (mean over groups of the
    population std), frac_reward_zero_std (share of all-equal groups), advantage_min and
    advantage_max, entropy (nats per token, of the distribution sampled from), kl (k3 estimate per
    token of KL(policy || start), with the tokens sampled; only with a reference), length, truncated
    (share), missing_rewards, and of these verifier_errors and verifier_timeouts, rows_used, loss
    and the statistics of `policy_loss` (over the rows used, where there are any; mean over the
    updates of the step), grad_norm, learning_rate; with several updates per batch also `updates`, a
    list; with dynamic sampling sampling_rounds and prompts_kept (the others then are of all that
    was sampled); greedy_reward
    where the baseline is the greedy answer. With several rewards rewards/NAME/mean, /std and
    /missing of each, reward is that of their weighted sum, and accuracy is what the verifier says;
    with a reward model that is true_reward. With a critic val/loss (without its weight),
    val/grad_norm and the statistics of `value_loss`; val/explained_variance is that of the values
    at sampling time. In a step of value pretraining loss and grad_norm are None.

    Raises ValueError, before anything is written, for a row without what it needs, and for an
    argument that the row has no use for: see `check_trainable`.
    """
    check_trainable(
        algorithm,
        task,
        model=model,
        reward_model=reward_model,
        reward_weights=reward_weights,
        critic=critic,
        advantage_function=advantage_function,
    )
    check_vocabulary(model, tokenizer)
    rows = 1 if micro_batch_size is None else micro_batch_size
    check_whole(1, steps=steps, prompts_per_step=prompts_per_step, evaluate_n=evaluate_n)
    check_whole(1, evaluate_samples=evaluate_samples)
    check_whole(1, updates_per_batch=updates_per_batch, micro_batch_size=rows)
    check_whole(1, max_sampling_rounds=max_sampling_rounds)
    check_whole(2, group_size=group_size)
    check_seed(seed)
    check_whole(0, evaluate_every=evaluate_every, checkpoint_every=checkpoint_every)
    check_whole(0, samples_every=samples_every)
    check_positive(learning_rate=learning_rate, max_grad_norm=max_grad_norm)
    if advantage_function is not None and not callable(advantage_function):
        raise ValueError(
            f"advantage_function: found {shown(advantage_function)}; wanted a function or None"
        )
    check_temperature(temperature)
    check_final(final_learning_rate)
    world = processes(device)
    world.check_enough(prompts_per_step=prompts_per_step)
    check_shard(shard, model, world)
    check_cuda_graph(cuda_graph, model.to(world.device))
    world.from_main(lambda: check_folder(out, resume))
    check_trackers(trackers, out)
    of_critic = critic_settings(
        algorithm,
        steps,
        learning_rate,
        critic_learning_rate,
        bootstrap_truncated,
        value_pretraining_steps,
    )
    of_reward = reward_settings(algorithm, reward_model, reward_weights, score_normalization)
    for given in filter(None, (model, reward_model, critic)):
        world.synchronize(given.to(world.device))
    needs_reference = measure_kl or (algorithm.kl != "none" and algorithm.beta > 0)
    reference = start_of(model) if needs_reference else None
    twin = sharded_twin(model, world) if shard else None
    trained = model if twin is None else twin
    parameters = [p for p in trained.parameters() if p.requires_grad]
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
        **weight_settings(model),
        **precision_settings(precision),
        **({"cuda_graph": True} if cuda_graph else {}),
        **of_reward,
        **of_critic,
    }
    if critic is not None:
        settings["critic"] = "given"
    recorder = Recorder(Run(settings), out, world, trackers)
    extra: dict[str, Any] = {} if reference is None else {"reference": reference}
    judge = Judge(
        algorithm,
        task,
        reward_model=reward_model,
        reward_weights=reward_weights,
        score_normalization=score_normalization,
        rows=micro_batch_size,
        world=world,
    )
    if judge.scale is not None:
        extra["score_scale"] = judge.scale
    values = None
    if of_critic:
        values = Critic(
            start_critic(critic, model, reward_model, seed).to(model.device),
            algorithm,
            learning_rate=of_critic["critic_learning_rate"],
            max_grad_norm=max_grad_norm,
            rows=micro_batch_size,
            world=world,
        )
        extra |= {"critic": values.model, "critic_optimizer": values.optimizer}

    def share(step: int) -> float:
        return 1 - (1 - final_learning_rate) * step / steps

    one_step = PolicyStep(
        model,
        tokenizer,
        task,
        algorithm,
        optimizer,
        judge,
        reference,
        values,
        recorder,
        prompts_per_step=prompts_per_step,
        group_size=group_size,
        temperature=temperature,
        updates_per_batch=updates_per_batch,
        micro_batch_size=micro_batch_size,
        max_grad_norm=max_grad_norm,
        skip_zero_advantages=skip_zero_advantages,
        advantage_function=advantage_function,
        max_sampling_rounds=max_sampling_rounds,
        samples_every=samples_every,
        cuda_graph=cuda_graph,
        bootstrap_truncated=bootstrap_truncated,
        value_pretraining_steps=of_critic.get("value_pretraining_steps", 0),
        share=share,
        world=world,
        twin=twin,
    )
    coupling = coupled(model, twin, optimizer, world)
    with using_threads(threads), using_precision(precision), coupling:
        return run_loop(
            model,
            tokenizer,
            optimizer,
            one_step,
            title=f"{algorithm.title} {task.name}",
            recorder=recorder,
            learning_rate=lambda step: learning_rate * share(step),
            steps=steps,
            seed=seed,
            evaluation=lambda stop: evaluate(
                model,
                tokenizer,
                task,
                n=evaluate_n,
                samples_per_prompt=evaluate_samples,
                temperature=temperature,
                allow_unrated=True,
                stop=stop,
            ),
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
            resume=resume,
            progress=progress,
            extra=extra,
            world=world,
            divided=(prompts_per_step, "prompts"),
        )
