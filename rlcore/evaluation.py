"""Held-out accuracy, greedy and sampled, with standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from rlcore.checks import check_seed, check_whole
from rlcore.sampling import sample
from rlcore.tasks import Task, rate_all


class EvaluationStopped(Exception):
    """What `stop` of `evaluate` raises: there is no result."""


def evaluate(
    model: Any,
    tokenizer: Any,
    task: Task,
    *,
    split: str = "held-out",
    n: int = 512,
    samples_per_prompt: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    prompts_per_batch: int = 256,
    allow_unrated: bool = False,
    stop: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Mean verifier reward on `n` different problems of a split.

    greedy: with the most likely token each time. sampled: `samples_per_prompt` responses at
    `temperature`. greedy_se, sampled_se: standard errors over problems (sample std / sqrt(n);
    responses to one problem are averaged first, they are not independent). mean_length: tokens per
    sampled response with its terminal token; greedy_length likewise. truncated: share of sampled
    responses cut at `task.max_new_tokens`. distinct_right, with several samples per prompt: how
    many different responses to a problem are right (reward 1), mean over all problems. missing:
    responses (both kinds) on which the verifier abstained or failed (see `rate`); they are left
    out. The problems and the random numbers depend on `seed` only.
    stop: asked before each batch; where it says True the evaluation is given up, and
    EvaluationStopped is raised.

    Raises ValueError as `Task.prompts` and `sample` do, for a model whose log-probs are not
    finite, and where no response was rated; with
    allow_unrated that mean and its standard error are None instead.
    """
    check_whole(1, n=n, samples_per_prompt=samples_per_prompt, prompts_per_batch=prompts_per_batch)
    check_seed(seed)
    prompts = task.prompts(split, n, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    result: dict[str, Any] = {}
    missing, failed = 0, None
    for name, copies in (("greedy", 1), ("sampled", samples_per_prompt)):
        means, lengths, cut, right = [], [], [], 0
        for first in range(0, n, prompts_per_batch):
            if stop is not None and stop():
                raise EvaluationStopped
            batch = prompts[first : first + prompts_per_batch]
            out = sample(
                model,
                tokenizer,
                batch,
                group_size=copies,
                max_new_tokens=task.max_new_tokens,
                temperature=temperature,
                greedy=name == "greedy",
                generator=generator,
            )
            out.check_finite()
            lengths += out.lengths.tolist()
            cut += out.truncated.tolist()
            each = rate_all(task, out.prompts, out.texts)
            for i in range(len(batch)):
                texts = out.texts[i * copies : (i + 1) * copies]
                rated = each[i * copies : (i + 1) * copies]
                rewards = [reward for reward, _ in rated if not math.isnan(reward)]
                failed = failed or next((error for _, error in rated if error), None)
                missing += copies - len(rewards)
                right += len(
                    {t for t, (reward, _) in zip(texts, rated, strict=True) if reward == 1}
                )
                if rewards:
                    means.append(sum(rewards) / len(rewards))
        if not means and not allow_unrated:
            why = f" (first error: {failed})" if failed else ""
            raise ValueError(f"task: the verifier of {task.name!r} rated no response{why}")
        result[name] = result[f"{name}_se"] = None
        if means:
            mean = sum(means) / len(means)
            spread = sum((m - mean) ** 2 for m in means) / max(len(means) - 1, 1)
            result[name] = mean
            result[f"{name}_se"] = math.sqrt(spread / len(means))
        length = sum(lengths) / len(lengths)
        result["mean_length" if name == "sampled" else "greedy_length"] = length
        if name == "sampled":
            result["truncated"] = sum(cut) / len(cut)
            if copies > 1:
                result["distinct_right"] = right / n
    result["missing"] = float(missing)
    result["n"] = float(n)
    return result
