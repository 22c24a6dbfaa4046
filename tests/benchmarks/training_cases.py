"""What the training bench drives: rlcore and TRL's `GRPOTrainer` on the same task, model and sizes.

Both sides have the same start, the same number of prompts, responses and tokens a step, the same
optimizer (AdamW, betas 0.9 and 0.99, no weight decay, gradients clipped to norm 1), a learning rate
that falls on the same line, and float32 throughout. TRL has the settings of its documentation, and
in addition what costs nothing and makes it quicker here: no gradient checkpointing, AdamW in one
kernel, all rows in one forward pass, no logging, no progress bar.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms import Algorithm
from rlcore.evaluation import evaluate
from rlcore.models import build_model, build_tokenizer, load, save
from rlcore.sampling import sample
from rlcore.tasks import Task, get_task
from rlcore.training import recipe, row, sft_start, train_policy

TASK = "sort"  # task b1
GROUP = 8
PARTS = ("sampling", "reward", "forward", "backward", "optimizer")


def algorithm() -> Algorithm:
    return row("grpo")


def coin(problem: str, response: str) -> float:
    """A reward that nearly every group disagrees about: no group is skipped."""
    return float(sum(map(ord, response)) % 2 == 0)


def coin_task() -> Task:
    return dataclasses.replace(get_task(TASK), verify=coin)


def make_start(folder: Path, sft_steps: int | None) -> None:
    """The SFT model that a whole run starts from, in a folder."""
    changes = {} if sft_steps is None else {"sft_steps": sft_steps}
    model, tokenizer, _, _ = sft_start(recipe(TASK, **changes), seed=0, progress=False)
    save(model, tokenizer, folder)


def random_model(size: str, length: int = 64) -> tuple[Any, Any]:
    tokenizer = build_tokenizer(get_task(TASK).vocabulary)
    return build_model(size, tokenizer, seed=0, max_length=length, device="cpu"), tokenizer


class Endless:
    """A tokenizer whose terminal token never comes: every response has all its tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.eos_token_id = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.tokenizer(*arguments, **options)


# ---- the two sides of a run


def train_ours(
    model: Any, tokenizer: Any, task: Task, *, steps: int, prompts: int, seed: int
) -> None:
    settings = recipe(TASK)
    train_policy(
        model,
        tokenizer,
        task,
        algorithm(),
        steps=steps,
        prompts_per_step=prompts,
        group_size=GROUP,
        learning_rate=settings.learning_rate,
        final_learning_rate=settings.final_learning_rate,
        seed=seed,
        progress=False,
        device="cpu",
    )


def trl_settings(task: Task, steps: int, prompts: int, seed: int) -> dict[str, Any]:
    settings = recipe(TASK)
    return {
        "max_steps": steps,
        "per_device_train_batch_size": prompts * GROUP,
        "num_generations": GROUP,
        "max_completion_length": task.max_new_tokens,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "polynomial",
        "lr_scheduler_kwargs": {
            "lr_end": settings.learning_rate * settings.final_learning_rate,
            "power": 1.0,
        },
        "warmup_steps": 0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "temperature": 1.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
    }


def trl_trainer(model: Any, tokenizer: Any, task: Task, folder: str, **sizes: int) -> Any:
    """TRL's trainer; `sizes` are steps, prompts and seed. Each prompt is new, as in our run."""
    from transformers import PrinterCallback

    from rlcore import to_trl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = to_trl(
            algorithm(),
            task=task,
            problems=sizes["steps"] * sizes["prompts"],
            output_dir=folder,
            **trl_settings(task, **sizes),
        )
        trainer = training.build(model, tokenizer)
    trainer.remove_callback(PrinterCallback)
    return trainer


@contextlib.contextmanager
def quiet_trl() -> Iterator[None]:
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(before)


def prepare(
    side: str, model: Any, tokenizer: Any, task: Task, **sizes: int
) -> contextlib.AbstractContextManager[Any]:
    """A context that gives the call which is timed: the training of one side."""

    @contextlib.contextmanager
    def ours() -> Iterator[Any]:
        yield lambda: train_ours(model, tokenizer, task, **sizes)

    @contextlib.contextmanager
    def theirs() -> Iterator[Any]:
        with tempfile.TemporaryDirectory() as folder, quiet_trl():
            yield trl_trainer(model, tokenizer, task, folder, **sizes).train

    return ours() if side == "ours" else theirs()


def quality(model: Any, tokenizer: Any, n: int) -> dict[str, float]:
    found = evaluate(model.eval(), tokenizer, get_task(TASK), n=n)
    return {name: found[name] for name in ("greedy", "sampled", "sampled_se")}


def load_start(folder: Path) -> tuple[Any, Any]:
    return load(folder, device="cpu")


# ---- where the time of our step goes


@contextlib.contextmanager
def profiled() -> Iterator[Counter[str]]:
    """Seconds by part of the step, while the block runs."""
    from rlcore.training import draw, judge, update

    spent: Counter[str] = Counter(dict.fromkeys(PARTS, 0.0))

    def timed(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent[name] += time.perf_counter() - start

        return call

    places = [
        (draw, "sample", "sampling"),
        (judge.Judge, "__call__", "reward"),
        (update, "response_logits", "forward"),
        (update, "token_logprobs", "forward"),
        (update, "compute_loss", "forward"),
        (Tensor, "backward", "backward"),
        (update, "apply_gradient", "optimizer"),
    ]
    before = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, part), function in zip(places, before, strict=True):
        setattr(owner, name, timed(part, function))
    try:
        yield spent
    finally:
        for (owner, name, _), function in zip(places, before, strict=True):
            setattr(owner, name, function)


# ---- sampling, and the update alone


def samplers(size: str, rows: int, new_tokens: int) -> dict[str, Any]:
    """rlcore's `sample` and transformers' `generate`: as many tokens for all rows."""
    import random

    task = get_task(TASK)
    model, tokenizer = random_model(size)
    prompts = [task.draw(random.Random(i)) for i in range(rows // GROUP)]
    encoded = tokenizer(prompts, padding=True, return_tensors="pt", add_special_tokens=False)
    numbers, endless = torch.Generator().manual_seed(0), Endless(tokenizer)
    model.generation_config.eos_token_id = None

    def ours() -> None:
        sample(
            model,
            endless,
            prompts,
            group_size=GROUP,
            max_new_tokens=new_tokens,
            generator=numbers,
        )

    def theirs() -> None:
        model.generate(
            **encoded,
            max_new_tokens=new_tokens,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            num_return_sequences=GROUP,
        )

    return {"ours": ours, "theirs": theirs}


def updates(size: str, rows: int, new_tokens: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Sides: our update on a batch in which every row counts; the model's own forward and backward
    pass over the whole rows; products of matrices, as many as have the operations of that pass, so
    that all are as long at work. And the floating-point operations of each."""
    import random

    from rlcore.training.judge import Judged
    from rlcore.training.update import Batch, update_policy

    task = get_task(TASK)
    model, tokenizer = random_model(size)
    prompts = [task.draw(random.Random(i)) for i in range(rows // GROUP)]
    samples = sample(
        model,
        Endless(tokenizer),
        prompts,
        group_size=GROUP,
        max_new_tokens=new_tokens,
        generator=torch.Generator().manual_seed(0),
    )
    advantages = torch.linspace(-1, 1, rows, dtype=torch.float64)
    used = torch.ones(rows, dtype=torch.bool)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, betas=(0.9, 0.99), weight_decay=0)
    square = torch.randn(1024, 1024)

    def ours() -> None:
        judged = Judged(torch.zeros(rows, dtype=torch.float64))
        batch = Batch(samples, judged, advantages, None, used, used)
        update_policy(
            model,
            optimizer,
            algorithm(),
            batch,
            temperature=1.0,
            constant=new_tokens,
            micro_batch_size=None,
            max_grad_norm=1.0,
        )

    def own() -> None:
        logits = model(input_ids=samples.input_ids, use_cache=False).logits[:, -new_tokens - 1 : -1]
        labels = samples.input_ids[:, -new_tokens:, None]
        logits.log_softmax(-1).gather(-1, labels).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    length = samples.input_ids.shape[1] - new_tokens
    whole = flops(model, rows, length + new_tokens)
    one = 2.0 * len(square) ** 3
    products = math.ceil(whole / one)

    def matmul() -> None:
        for _ in range(products):
            square @ square

    return {"ours": ours, "own": own, "matmul": matmul}, {
        "whole_rows": whole,
        "computed": computed_flops(model, len(prompts), length, rows, new_tokens),
        "matmul": products * one,
    }


def flops(model: Any, rows: int, length: int) -> float:
    """Of forward and backward pass over whole rows, as it is usually counted: 6 for each parameter
    and token, and 6 L n d for each token's attention to the n/2 before it on average."""
    config = model.config
    parameters = sum(p.numel() for p in model.parameters())
    attention = 6 * config.num_hidden_layers * length * config.hidden_size
    return float(rows * length * (6 * parameters + attention))


def computed_flops(model: Any, prompts: int, length: int, rows: int, new_tokens: int) -> float:
    """The same count for what our update computes: each prompt once, and of a response all tokens
    but the last. (It leaves out most of the last layer of the prompts too, which is counted.)"""
    config = model.config
    parameters = sum(p.numel() for p in model.parameters())
    tokens = prompts * length + rows * (new_tokens - 1)
    seen = prompts * length * length + rows * (new_tokens - 1) * (2 * length + new_tokens)
    attention = 6 * config.num_hidden_layers * config.hidden_size * seen
    return float(6 * parameters * tokens + attention)
