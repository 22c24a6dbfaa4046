"""What a trainer of TRL is fed: a task's prompts and rewards, or preference pairs.

Used by ``rlcore.to_trl`` when it is given a task or pairs.  TRL and datasets are imported when one
of these functions is called, never before.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rlcore.tasks import PreferencePairs, Task, rate_all, rate_each

Reward = Callable[..., list[float | None]]
COPIES = ("DPOTrainer", "KTOTrainer")  # which take a reference
REFERENCE = (
    "wanted one as rlcore.models.load reads it (save writes such a folder): TRL takes its "
    "reference from there"
)


@dataclass(frozen=True)
class TrlTraining:
    """All that a trainer of TRL needs but the model.

    ``trainer``: its class. ``args``: its config. ``train_dataset``: of the package ``datasets``.
    ``reward_funcs``: for online trainers, in the order of ``args.reward_weights``; else empty.
    """

    trainer: Any
    args: Any
    train_dataset: Any
    reward_funcs: list[Reward]

    def build(self, model: Any, tokenizer: Any, **more: Any) -> Any:
        """The trainer; ``more`` are other arguments of its class, such as callbacks.

        The reference is the model as it is now.  TRL takes a copy for a row over pairs; for a row
        that samples it reads the reference from the folder that the model was loaded from.
        ValueError where there is no such folder, or the model has been trained since.
        """
        arguments: dict[str, Any] = {"reward_funcs": list(self.reward_funcs)}
        if not self.reward_funcs:
            arguments = {}
            if self.trainer.__name__ in COPIES and not {"ref_model", "peft_config"} & set(more):
                arguments = {"ref_model": copy.deepcopy(model)}
        reads = bool(self.reward_funcs) and self.args.beta != 0
        if reads and not getattr(model.config, "_name_or_path", ""):
            raise ValueError(f"model: found one without a folder; {REFERENCE}")
        trainer = self.trainer(
            model,
            args=self.args,
            train_dataset=self.train_dataset,
            processing_class=tokenizer,
            **arguments,
            **more,
        )
        reference = trainer.ref_model if reads else None
        if reference is not None and _differ(model, reference):
            raise ValueError(f"model: found other weights than in its folder; {REFERENCE}")
        return trainer


def _differ(model: Any, reference: Any) -> bool:
    """Whether a weight that both hold whole is another one; a sharded one is not compared."""
    theirs = dict(reference.named_parameters())
    return any(
        name in theirs
        and theirs[name].shape == weight.shape
        and not bool((theirs[name].to(weight) == weight).all())
        for name, weight in model.named_parameters()
    )


def prompt_dataset(task: Task, problems: int, seed: int) -> Any:
    """Different problems of the task's training split, in the column ``prompt``."""
    prompts = task.prompts("train", problems, seed=seed)
    return import_module("datasets").Dataset.from_dict({"prompt": prompts})


def pair_dataset(pairs: PreferencePairs, between: str, unpaired: bool, margins: bool) -> Any:
    """The pairs in TRL's columns: prompt, chosen, rejected; or prompt, completion, label.

    between: put before each response: TRL tokenizes prompt and response as one text.
    ValueError for a response that was cut: TRL gives each one its terminal token.
    """
    for side, cut in (("chosen", pairs.chosen_cut), ("rejected", pairs.rejected_cut)):
        if any(cut):
            raise ValueError(
                f"pairs: the {side} response of pair {list(cut).index(True)} was cut, and TRL "
                "gives every response its terminal token; leave such pairs out"
            )
    chosen, rejected = (
        [between + text for text in side] for side in (pairs.chosen, pairs.rejected)
    )
    columns: dict[str, Any] = {
        "prompt": list(pairs.prompts),
        "chosen": chosen,
        "rejected": rejected,
    }
    if margins and pairs.margins:
        columns["margin"] = list(pairs.margins)
    if unpaired:
        columns = {
            "prompt": list(pairs.prompts) * 2,
            "completion": chosen + rejected,
            "label": [True] * len(pairs) + [False] * len(pairs),
        }
    return import_module("datasets").Dataset.from_dict(columns)


def verifier(task: Task) -> Reward:
    """The task's verifier as a reward function of TRL, named after the task."""

    def reward(
        prompts: Sequence[str], completions: Sequence[str], **given: Any
    ) -> list[float | None]:
        rated = rate_all(task, prompts, completions)
        _count(given, [named for _, named in rated])
        return [_or_none(value) for value, _ in rated]

    reward.__name__ = task.name
    return reward


def several_rewards(task: Task) -> list[Reward]:
    """The task's rewards as functions of TRL, one each; a response is rated once for all."""
    last: dict[str, Any] = {"batch": None, "rated": []}

    def rated(prompts: Sequence[str], completions: Sequence[str], given: Any) -> Any:
        batch = (tuple(prompts), tuple(completions))
        if last["batch"] != batch:
            each = [rate_each(task, *pair) for pair in zip(*batch, strict=True)]
            _count(given, [named for _, named in each])
            last.update(batch=batch, rated=[values for values, _ in each])
        return last["rated"]

    def one(i: int, name: str) -> Reward:
        def reward(prompts: Sequence[str], completions: Sequence[str], **given: Any) -> Any:
            return [_or_none(values[i]) for values in rated(prompts, completions, given)]

        reward.__name__ = name
        return reward

    return [one(i, name) for i, name in enumerate(task.reward_names)]


def with_overlong_penalty(reward: Reward, longest: int, cache: int) -> list[Reward]:
    """The reward and TRL's soft overlong punishment, which is None where the reward is.

    TRL calls them in this order and adds up what it gets: without that, a response without a reward
    would have the penalty as its reward.
    """
    punish = import_module("trl.rewards").get_soft_overlong_punishment(longest, cache)
    known: list[bool] = []

    def noted(**given: Any) -> list[float | None]:
        values = reward(**given)
        known[:] = [value is not None for value in values]
        return values

    def overlong(completion_ids: Sequence[Sequence[int]], **given: Any) -> list[float | None]:
        penalties = punish(completion_ids)
        return [p if here else None for p, here in zip(penalties, known, strict=True)]

    noted.__name__ = reward.__name__
    return [noted, overlong]


def weights_in_order(task: Task, weights: Mapping[str, float] | None) -> list[float] | None:
    """The weights in the order of the task's rewards; ValueError for other names."""
    if weights is None:
        return None
    if not isinstance(weights, Mapping) or set(weights) != set(task.reward_names):
        raise ValueError(
            f"reward_weights must name the rewards of {task.name!r}, "
            f"{', '.join(task.reward_names)}; got {weights!r}"
        )
    return [float(weights[name]) for name in task.reward_names]


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _count(given: Mapping[str, Any], named: Sequence[str | None]) -> None:
    """As our own record has it: how many responses the verifier failed on, or named."""
    log = given.get("log_metric")
    if log is not None:
        log("verifier_errors", float(sum(one is not None for one in named)))
