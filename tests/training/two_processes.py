"""What `test_processes.py` runs under torchrun: every check that needs two processes, in one go.

    torchrun --nproc-per-node 2 two_processes.py checks FOLDER
    torchrun --nproc-per-node 2 two_processes.py resume FOLDER

`checks` trains each case in both processes together and in the main one alone, writes what came out
into FOLDER/results.pt, and ends by killing its second process in the middle of a run; `resume` goes
on with that one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rlcore import checks, models, training
from rlcore.algorithms import GRPO, GRPO_MEAN_ONLY, PPO, ROWS, Algorithm, step_totals
from rlcore.locks import hold
from rlcore.objectives import sft_loss
from rlcore.objectives.aggregation import AGGREGATIONS
from rlcore.preferences import DPO, KTO, REWARD_MODEL
from rlcore.preferences import ROWS as OVER_PAIRS
from rlcore.tasks import SORT, PreferencePairs, Task, sample_pairs
from rlcore.training import pairs as pairs_module
from rlcore.training import policy as policy_module
from rlcore.training import sft as sft_module
from rlcore.training import update as update_module
from rlcore.training.processes import ALONE, Processes, processes

SETTINGS = {"learning_rate": 1e-2, "seed": 0, "progress": False, "device": "cpu"}
POLICY = {**SETTINGS, "steps": 2, "prompts_per_step": 5, "group_size": 4}


def coin(problem: str, response: str) -> float | None:
    """Half the responses are right; one in seven has no reward."""
    said = sum(map(ord, response))
    return None if said % 7 == 3 else float(said % 2 == 0)


def lopsided(problem: str, response: str) -> float:
    """The problems of one half have groups that are all equal."""
    return float(ord(problem[0]) % 2 == 0 or sum(map(ord, response)) % 2 == 0)


def several(problem: str, response: str) -> dict[str, float]:
    return {"coin": float(sum(map(ord, response)) % 2 == 0), "sevens": float("7" in response)}


TASK = replace(SORT, name="coin", verify=coin, rewards=several, reward_names=("coin", "sevens"))
PLAIN = replace(GRPO, beta=0.0, kl="none")


def one_row(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """An advantage for a single row: one of the processes has nothing to do."""
    first = int((~rewards.isnan()).nonzero()[0])
    return torch.where(torch.arange(len(rewards)) == first, 1.0, 0.0).double()


def policy_cases() -> Iterator[tuple[str, Algorithm, Task, dict[str, Any]]]:
    """Name, row, task and settings: every row, every aggregation, and the awkward shares."""
    for row in (*ROWS, GRPO_MEAN_ONLY):
        if row.reward == "reward_model":
            row = replace(row, reward="verifier")
        yield row.name, row, TASK, {}
    for how in AGGREGATIONS:
        yield f"aggregation {how}", replace(GRPO, aggregation=how), TASK, {}
    yield "in parts", GRPO, TASK, {"micro_batch_size": 3, "updates_per_batch": 2}
    critic = replace(PPO, reward="verifier")
    yield "critic in parts", critic, TASK, {"micro_batch_size": 3, "updates_per_batch": 2}
    yield "a share of equal groups", GRPO, replace(TASK, verify=lopsided), {}
    yield "a share of zeros", PLAIN, replace(TASK, verify=lopsided), {"skip_zero_advantages": False}
    yield "one row for two processes", PLAIN, TASK, {"advantage_function": one_row}
    shard = {"shard": True}
    yield "shared out", GRPO, TASK, shard
    yield (
        "shared out in parts",
        GRPO,
        TASK,
        {**shard, "micro_batch_size": 3, "updates_per_batch": 2},
    )
    yield "shared out, one row", PLAIN, TASK, {**shard, "advantage_function": one_row}
    yield "shared out, with a critic", critic, TASK, shard
    judge = models.build_scalar_model(model()[0], seed=1, std=1.0)
    scored = {"reward_model": judge, "score_normalization": "start"}
    yield "a reward model", replace(GRPO, reward="reward_model"), TASK, scored


def model(**settings: Any) -> tuple[Any, Any]:
    tokenizer = models.build_tokenizer(SORT.symbols)
    sizes = {"seed": 0, "dtype": "float64", "device": "cpu", **settings}
    return models.build_model("nano", tokenizer, **sizes), tokenizer


def seen(train: Callable[[], training.Run]) -> dict[str, Any]:
    """Metrics and evaluations of a run, the gradient of each optimizer step in it, and whether the
    policy's was shared out."""
    gradients: list[torch.Tensor] = []
    sharded = []

    def note(optimizer: Any, *_: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        sharded.append(all(hasattr(g, "full_tensor") for g in grads))
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        gradients.append(torch.cat([g.flatten().double() for g in whole]))

    hook = register_optimizer_step_pre_hook(note)
    try:
        run = train()
    finally:
        hook.remove()
    return {
        "gradients": gradients,
        "sharded": any(sharded),
        "metrics": run.metrics,
        "evaluations": run.evaluations,
    }


@contextmanager
def as_one() -> Iterator[None]:
    """The loops inside are those of one process, whatever torchrun says."""
    modules = (policy_module, sft_module, pairs_module)
    for module in modules:
        module.processes = lambda device=None: ALONE
    try:
        yield
    finally:
        for module in modules:
            module.processes = processes


def both(world: Processes, train: Callable[[], training.Run]) -> dict[str, Any]:
    """What two processes did, and what one does: the main process knows both."""
    found = {"two": seen(train)}
    if world.is_main:
        with as_one():
            found["one"] = seen(train)
    return found


def cases(world: Processes) -> dict[str, Any]:
    """Every loop, together and alone. The second process starts with weights that are not used."""
    found = {}

    def start(**settings: Any) -> tuple[Any, Any]:
        return model(**{"seed": int(os.environ["RANK"]), **settings})

    for name, row, task, settings in policy_cases():
        every = {**POLICY, **settings}
        found[name] = both(world, partial(_policy, start, task, row, every))
    short = {**SETTINGS, "steps": 2, "batch_size": 5}
    for name, settings in (("sft", {}), ("sft, shared out", {"shard": True})):
        found[name] = both(world, partial(_sft, start, {**short, **settings}))
    over = {**short, "held_out": pairs(3, seed=1), "evaluate_every": 1}
    for method in OVER_PAIRS:
        train = training.train_reward_model if method is REWARD_MODEL else training.train_preference
        found[method.name] = both(world, partial(_over_pairs, train, start, method, over))
    in_float32 = partial(start, dtype="float32")
    found["float32, shared out"] = both(
        world, partial(_policy, in_float32, TASK, GRPO, {**POLICY, "shard": True})
    )
    found["bf16, shared out"] = both(
        world,
        partial(_policy, in_float32, TASK, GRPO, {**POLICY, "shard": True, "precision": "bf16"}),
    )
    for method in (DPO, KTO):
        train = partial(_over_pairs, training.train_preference, start, method)
        settings = {**over, "shard": True, "micro_batch_size": 1}
        found[f"{method.name}, shared out in parts"] = both(world, partial(train, settings))
    return found


def _alone(settings: dict[str, Any]) -> dict[str, Any]:
    """Nobody is there to share with, where the loops are those of one process."""
    if policy_module.processes is processes:
        return settings
    return {name: value for name, value in settings.items() if name != "shard"}


def _policy(start: Any, task: Task, row: Algorithm, settings: dict[str, Any]) -> training.Run:
    return training.train_policy(*start(), task, row, **_alone(settings))


def _sft(start: Any, settings: dict[str, Any]) -> training.Run:
    return training.train_sft(*start(), SORT, **_alone(settings))


def _over_pairs(train: Any, start: Any, method: Any, settings: dict[str, Any]) -> training.Run:
    policy, tokenizer = start()
    if method is REWARD_MODEL:
        policy = models.build_scalar_model(policy, seed=0)
    return train(policy, tokenizer, pairs(9, seed=0), method=method, **_alone(settings))


@cache
def pairs(n: int, seed: int) -> PreferencePairs:
    """Pairs of a random model; the rater likes sevens."""
    task = replace(SORT, verify=lambda _, text: float(text.count("7")), preference_scale=1.0)
    return sample_pairs(*model(seed=1), task, n, seed=seed)


def naive(world: Processes) -> dict[str, Any]:
    """The mean of the processes' own token means: each divides by what it has itself."""
    true = update_module.Batch.totals

    def totals(batch: Any, algorithm: Algorithm) -> dict[str, Any]:
        own = torch.zeros_like(batch.used)
        own[batch.used.nonzero()[:, 0][world.share(int(batch.used.sum()))]] = True
        local = step_totals(algorithm, batch.samples.response_mask, known=own)
        return {name: world.size * count for name, count in local.items()}

    update_module.Batch.totals = totals
    try:
        row = replace(GRPO, aggregation="token_mean")
        return seen(partial(_policy, model, TASK, row, POLICY))
    finally:
        update_module.Batch.totals = true


def a19(world: Processes) -> tuple[float, list[float]]:
    """Token losses 2, 4 in one process and six of 1 in the other: the loss and its gradient."""
    losses = [[2.0, 4.0], [1.0] * 6][world.rank]
    logprobs = -torch.tensor([losses], dtype=torch.float64)
    logprobs.requires_grad_()
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    tokens = int(world.sum(lambda: {"tokens": mask.sum().item()})["tokens"])
    loss, _ = sft_loss(logprobs, mask, total=tokens)
    loss.backward()
    assert logprobs.grad is not None
    gradients = world.gather(lambda: logprobs.grad.flatten().tolist())
    return world.sum(lambda: {"loss": loss.item()})["loss"], [g for part in gradients for g in part]


class Stubborn(Exception):
    """It cannot be pickled: what is unpickled has no second argument."""

    def __init__(self, what: str, more: str) -> None:
        super().__init__(what)


def errors(world: Processes, folder: Path) -> dict[str, str]:
    """What each process says where one of them fails: (kind, words, notes)."""

    def second(error: Exception) -> Callable[[], None]:
        def work() -> None:
            if world.rank == 1:
                raise error

        return work

    def main(error: Exception) -> Callable[[], None]:
        def work() -> None:
            raise error

        return work

    def settings(**changes: Any) -> Callable[[], Any]:
        return partial(_policy, model, TASK, PLAIN, {**POLICY, **changes})

    def held() -> None:
        """A folder that another run takes after the check of the arguments."""
        true, checks.is_held = checks.is_held, lambda place: False
        folder.joinpath("held").mkdir(exist_ok=True)
        lock = hold(folder / "held") if world.is_main else None
        try:
            run(folder / "held")
        finally:
            checks.is_held = true
            if lock is not None:
                lock.release()

    attempts = {
        "held": held,
        "second": lambda: world.gather(second(ValueError("no such thing"))),
        "main": lambda: world.from_main(main(OSError("disk full"))),
        "stubborn": lambda: world.gather(second(Stubborn("so", "and so"))),
        "few": settings(prompts_per_step=1),
        "few pairs": partial(
            _over_pairs, training.train_preference, model, OVER_PAIRS[-1],
            {**SETTINGS, "steps": 1, "batch_size": 1},
        ),
        "unlike": settings(seed=world.rank),
    }  # fmt: skip
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = "nothing was raised"
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            found[name] = "; ".join([type(error).__name__, str(error), *notes])
    return found


def run(folder: Path, verify: Callable[[str, str], Any] = coin, **settings: Any) -> training.Run:
    """Four steps of a row with a history, that is in the folder."""
    row = training.row("dcpo")
    task = replace(TASK, verify=verify)
    every = {**POLICY, "steps": 4, "checkpoint_every": 1, **settings}
    return training.train_policy(*model(), task, row, **every, out=folder)


def at_call(world: Processes, number: int, act: Callable[[], None]) -> Callable[[str, str], Any]:
    """The verifier, which does something in the second process before its call of that number."""
    calls = []

    def verify(problem: str, response: str) -> float | None:
        calls.append(1)
        if world.rank == 1 and len(calls) == number:
            act()
        return coin(problem, response)

    return verify


def stops(world: Processes, folder: Path) -> dict[str, Any]:
    """A whole run; one that an interrupt of the second process stops; one that is not finite."""
    whole = run(folder / "whole")

    def signalled() -> Callable[[str, str], Any]:
        return at_call(world, 15, lambda: os.kill(os.getpid(), signal.SIGINT))

    stopped = run(folder / "stopped", signalled())
    resumed = run(folder / "stopped", resume=True)
    shared = run(folder / "shared", shard=True)
    run(folder / "shared-stopped", signalled(), shard=True)
    run(folder / "shared-stopped", shard=True, resume=True)
    run(folder / "shared-mixed", signalled())
    run(folder / "shared-mixed", shard=True, resume=True)
    run(folder / "then-alone", signalled())
    if world.is_main:
        with as_one():
            run(folder / "then-alone", resume=True)
    true = update_module.response_logits
    calls = []

    def response_logits(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        return true(*arguments) * (float("nan") if world.rank == 1 and len(calls) == 2 else 1.0)

    update_module.response_logits = response_logits
    said = []
    for name, shard in (("not-finite", False), ("shared-not-finite", True)):
        calls.clear()
        try:
            run(folder / name, shard=shard)
        except training.NonFiniteError as error:
            said.append(str(error))
    update_module.response_logits = true
    return {
        "whole": whole.metrics,
        "stopped": (stopped.interrupted, stopped.metrics),
        "resumed": (resumed.finished, resumed.metrics),
        "shared": shared.metrics,
        "not finite": said,
        "out": whole.out,
    }


def main(mode: str, folder: Path) -> None:
    torch.set_num_threads(1)
    world = processes("cpu")
    if mode == "resume":
        run(folder / "killed", resume=True)
        return
    results = {
        "size": world.size,
        "words": [world.words(32, "prompts"), world.words(5, "prompts")],
        "cases": cases(world),
        "naive": naive(world),
        "a19": a19(world),
    }
    said = errors(world, folder)
    results["errors"] = world.gather(lambda: said)
    told = stops(world, folder)
    results["stops"] = world.gather(lambda: told)
    if world.is_main:
        torch.save(results, folder / "results.pt")
    run(folder / "killed", at_call(world, 25, lambda: os.kill(os.getpid(), signal.SIGKILL)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
