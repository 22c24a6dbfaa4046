"""One step's responses: a round of sampling, or rounds until enough prompts teach something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlcore.algorithms import Algorithm
from rlcore.objectives import informative_rows, refill
from rlcore.sampling import Samples, draw_uniforms, sample
from rlcore.tasks import Task
from rlcore.training.judge import Judge, Judged, join, mean
from rlcore.training.loop import NonFiniteError, Place
from rlcore.training.processes import ALONE, Processes


@dataclass
class Draw:
    """All that was sampled in a step, and which rows the update may use."""

    samples: Samples
    judged: Judged  # what they earned, and what was raised
    kept: Tensor  # (B,) bool: False for rows that dynamic sampling drops
    metrics: dict[str, Any]  # those that only some rows have, see `train_policy`
    greedy: Tensor | None = None  # (B,), what the greedy answer to the row's prompt earned


def draw(
    model: Any,
    tokenizer: Any,
    task: Task,
    algorithm: Algorithm,
    judge: Judge,
    place: Place,
    *,
    prompts_per_step: int,
    group_size: int,
    temperature: float,
    max_rounds: int,
    cuda_graph: bool = False,
    world: Processes = ALONE,
) -> Draw:
    """Draw prompts, sample a group for each, ask what each response earned.

    With dynamic sampling, again and again until `prompts_per_step` prompts have rewards that are
    not all equal, or `max_rounds` are done; surplus and all-equal groups are not kept.
    Where the baseline is the greedy answer, it is sampled and judged too.
    Raises NonFiniteError where the policy's log-probs are not finite.
    """
    parts, judgements = [], []
    while True:
        with place.timings.part("sampling"):
            samples = sample_together(
                model,
                tokenizer,
                [task.draw(place.data) for _ in range(prompts_per_step)],
                group_size=group_size,
                max_new_tokens=task.max_new_tokens,
                temperature=temperature,
                generator=place.generator,
                cuda_graph=cuda_graph,
                world=world,
            )
        if not bool(samples.logprobs.isfinite().all()):
            raise NonFiniteError("the policy's log-probs are not finite", vars(samples))
        parts.append(samples)
        with place.timings.part("judging"):
            judgements.append(judge(samples, place.step + 1))
        if not algorithm.dynamic_sampling:
            kept = torch.ones_like(samples.truncated)
            drawn = Draw(samples, judgements[0], kept, {})
            break
        together, judged = merge(parts, tokenizer.pad_token_id), join(judgements)
        kept = informative_rows(judged.reward, together.group_ids, wanted=prompts_per_step)
        count = int(kept.sum()) // group_size
        if refill(count, prompts_per_step, len(parts), max_rounds=max_rounds).stop:
            metrics = {"sampling_rounds": len(parts), "prompts_kept": count}
            drawn = Draw(together, judged, kept, metrics)
            break
    if algorithm.advantage == "greedy":
        known = (task, judge, drawn.samples, place)
        answers = greedy_judged(model, tokenizer, *known, cuda_graph, world)
        drawn.greedy = answers.reward
        drawn.metrics["greedy_reward"] = mean(answers.reward)
        drawn.judged.errors += answers.errors
    return drawn


def sample_together(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    cuda_graph: bool = False,
    world: Processes,
) -> Samples:
    """`sample`, each process for its share of the prompts; all get the samples of all.

    A response has the random numbers that it has in one process: those of the responses before and
    after a process's own are drawn and left. So the samples do not depend on the number of
    processes, but where a last bit of a logit does and moves a token across its random number.
    """

    def some(own: slice) -> Samples:
        draw_uniforms(own.start * group_size, max_new_tokens, generator)
        samples = sample(
            model,
            tokenizer,
            prompts[own],
            group_size=group_size,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            generator=generator,
            cuda_graph=cuda_graph,
        )
        draw_uniforms((len(prompts) - own.stop) * group_size, max_new_tokens, generator)
        return samples

    return merge(world.rows(len(prompts), some), tokenizer.pad_token_id)


def greedy_judged(
    model: Any,
    tokenizer: Any,
    task: Task,
    judge: Judge,
    samples: Samples,
    place: Place,
    cuda_graph: bool = False,
    world: Processes = ALONE,
) -> Judged:
    """What the most likely answer to each row's prompt earns; it is sampled once for its group."""
    numbers = samples.group_ids.tolist()
    prompts = dict(zip(numbers, samples.prompts, strict=True))
    asked = list(prompts.values())

    def some(own: slice) -> Samples:
        return sample(
            model,
            tokenizer,
            asked[own],
            max_new_tokens=task.max_new_tokens,
            greedy=True,
            cuda_graph=cuda_graph,
        )

    with place.timings.part("sampling"):
        answers = merge(world.rows(len(asked), some), tokenizer.pad_token_id)
    with place.timings.part("judging"):
        judged = judge(answers, place.step + 1)
    which = {number: i for i, number in enumerate(prompts)}
    rows = judged[[which[number] for number in numbers]]
    rows.errors = judged.errors
    return rows


def merge(parts: Sequence[Samples], pad_token_id: int) -> Samples:
    """Several calls' samples as one: padded to the widest, groups numbered on."""
    if len(parts) == 1:
        return parts[0]
    widths = [part.response_mask.shape[1] for part in parts]
    starts = [part.input_ids.shape[1] - w for part, w in zip(parts, widths, strict=True)]
    sizes = list(zip(parts, starts, widths, strict=True))

    def whole(name: str, fill: int) -> Tensor:
        return torch.cat(
            [
                pad(getattr(p, name), (max(starts) - start, max(widths) - width), value=fill)
                for p, start, width in sizes
            ]
        )

    def response(name: str) -> Tensor:
        return torch.cat([pad(getattr(p, name), (0, max(widths) - w)) for p, _, w in sizes])

    def rows(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    groups, first = [], 0
    for part in parts:
        groups.append(part.group_ids + first)
        first += int(part.group_ids.max()) + 1
    return Samples(
        prompts=[prompt for part in parts for prompt in part.prompts],
        texts=[text for part in parts for text in part.texts],
        input_ids=whole("input_ids", pad_token_id),
        attention_mask=whole("attention_mask", 0),
        response_mask=response("response_mask"),
        logprobs=response("logprobs"),
        entropy=response("entropy"),
        group_ids=torch.cat(groups),
        lengths=rows("lengths"),
        truncated=rows("truncated"),
    )
