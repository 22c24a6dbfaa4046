"""Preference pairs: two responses to a prompt, and which of them a rater liked better.

The rater is simulated: Bradley and Terry's model on a task's true reward, with noise. So the true
rewards are known, and are kept beside the pairs to measure with; no method may train on them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.checks import brief, check_seed, check_whole
from rlcore.files import write_whole
from rlcore.tasks.task import SPLITS, Task, rate

if TYPE_CHECKING:
    from rlcore.sampling import Samples

DRAWS_PER_PAIR = 20  # prompts tried for each pair before sampling is given up


@dataclass(frozen=True)
class PreferencePairs:
    """N pairs; of each prompt the chosen and the rejected response, without terminal token.

    chosen_cut, rejected_cut: True where the response was cut by the limit: it has no terminal
    token, and is not trained to have one. Empty: none was cut.
    margins: by how much the chosen one is better, as the rater said (Llama 2's margin), for the
    reward model's loss. Empty: none.
    chosen_rewards, rejected_rewards: the true rewards, for evaluation alone. Empty: unknown.

    Raises ValueError for columns of unlike length, and for a pair that is no pair: an empty prompt,
    twice the same response, a cut response without a token, a number that is not finite.
    """

    prompts: tuple[str, ...]
    chosen: tuple[str, ...]
    rejected: tuple[str, ...]
    chosen_cut: tuple[bool, ...] = ()
    rejected_cut: tuple[bool, ...] = ()
    margins: tuple[float, ...] = ()
    chosen_rewards: tuple[float, ...] = ()
    rejected_rewards: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.prompts):
            raise ValueError("prompts: found none; wanted at least one pair")
        for field in fields(self):
            column = getattr(self, field.name)
            kind = _kind(field.name)
            if isinstance(column, str) or not isinstance(column, Iterable):
                raise ValueError(f"{field.name}: found {column!r}; wanted a tuple")
            object.__setattr__(self, field.name, tuple(column))
            column, optional = getattr(self, field.name), field.name not in TEXTS
            if len(column) != len(self.prompts) and not (optional and not column):
                raise ValueError(
                    f"{field.name}: found {len(column)} rows; wanted {len(self.prompts)}, one for "
                    "each prompt"
                )
            for i, value in enumerate(column):
                if not _is(value, kind):
                    raise ValueError(f"{field.name}: found {value!r} in pair {i}; wanted {kind}")
        if bool(self.chosen_rewards) != bool(self.rejected_rewards):
            raise ValueError("chosen_rewards: true rewards are for both responses or for none")
        for i, (prompt, chosen, rejected) in enumerate(
            zip(self.prompts, self.chosen, self.rejected, strict=True)
        ):
            cut = [bool(side) and side[i] for side in (self.chosen_cut, self.rejected_cut)]
            if not prompt:
                raise ValueError(f"prompts: pair {i} has an empty prompt")
            if chosen == rejected and cut[0] == cut[1]:
                raise ValueError(f"rejected: pair {i} has twice the same response, {chosen!r}")
            for side, text, is_cut in zip(TEXTS[1:], (chosen, rejected), cut, strict=True):
                if is_cut and not text:
                    raise ValueError(f"{side}: pair {i} has a response without a token")

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, first: int, last: int | None = None) -> PreferencePairs:
        """The pairs from `first` to `last`, as a slice; ValueError where there is none."""
        return PreferencePairs(*(getattr(self, field.name)[first:last] for field in fields(self)))

    @property
    def agreement(self) -> float:
        """Share of pairs whose chosen response has the larger true reward; half for a tie.

        What an error-free judge would score on these labels. ValueError where it is unknown.
        """
        if not self.chosen_rewards:
            raise ValueError("agreement: these pairs have no true rewards")
        both = zip(self.chosen_rewards, self.rejected_rewards, strict=True)
        return sum((a > b) + 0.5 * (a == b) for a, b in both) / len(self)

    @property
    def fingerprint(self) -> str:
        """A checksum of all columns: the same pairs, the same text."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write JSON lines, a pair each, whole or not at all: an older file stays until then."""
        file = Path(path)
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: column for name, column in columns.items() if column}
        lines = (
            json.dumps(dict(zip(given, row, strict=True)), ensure_ascii=False) + "\n"
            for row in zip(*given.values(), strict=True)
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, lambda opened: opened.writelines(line.encode() for line in lines))
        return file


TEXTS = ("prompts", "chosen", "rejected")
NAMES = tuple(field.name for field in fields(PreferencePairs))


def load_pairs(path: str | os.PathLike[str]) -> PreferencePairs:
    """Read what `PreferencePairs.save` wrote, or any JSON lines with its columns.

    A column that is not needed may be missing, from every line alike.
    Raises ValueError naming file and line for what is no pair, OSError where it cannot be read.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"{row!r} has no columns")
            unknown = sorted(set(row) - set(NAMES))
            missing = sorted({*(rows[0] if rows else TEXTS)} - set(row))
            more = sorted(set(row) - {*(rows[0] if rows else row)})
            if unknown:
                wanted = f"{', '.join(TEXTS)}; others may be {', '.join(NAMES[len(TEXTS) :])}"
                raise ValueError(f"column {unknown[0]!r} is unknown; wanted {wanted}")
            if missing:
                wanted = ", ".join(rows[0] if rows else TEXTS)
                raise ValueError(f"column {missing[0]!r} is missing; wanted {wanted}")
            if more:
                raise ValueError(f"column {more[0]!r} is not in line 1; wanted it in all or none")
            PreferencePairs(**{name: (value,) for name, value in row.items()})
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: line {number} is not a pair ({brief(error)})") from error
        rows.append(row)
    if not rows:
        raise ValueError(f"path: {str(path)!r} holds no pairs")
    return PreferencePairs(**{name: tuple(row[name] for row in rows) for name in rows[0]})


def sample_pairs(
    model: Any,
    tokenizer: Any,
    task: Task,
    n: int,
    *,
    split: str = "train",
    seed: int,
    temperature: float = 1.0,
    noise: float | None = None,
    prompts_per_batch: int = 256,
) -> PreferencePairs:
    r"""`n` pairs of responses that `model` samples, labelled by Bradley-Terry on the true reward.

    For each prompt (of a split, drawn afresh: one may come twice) two responses are sampled. The
    first is chosen with probability $\sigma((R(y_1) - R(y_2)) / \tau)$, $R$ being `task.verify`.
    noise: $\tau$, in units of the reward (None: the task's `preference_scale`, or 0 where it has
    none); with 0 the better one is chosen, and ties are no pairs. A prompt with twice the same
    response, or a response that the verifier did not rate, gives no pair.
    The pairs depend on model and arguments alone, and the global random state is left as it was.

    Raises ValueError for a bad argument, and where 20 n prompts gave fewer than n pairs.
    """
    import torch

    from rlcore.sampling import sample

    check_whole(1, n=n, prompts_per_batch=prompts_per_batch)
    check_seed(seed)
    scale = (task.preference_scale or 0.0) if noise is None else noise
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale < math.inf:
        raise ValueError(f"noise: found {noise!r}; wanted None or a finite number of at least 0")
    if split not in SPLITS:
        raise ValueError(f"split: found {split!r}; wanted one of {', '.join(SPLITS)}")
    rng = random.Random(f"pairs {task.name}/{split}/{seed}")
    generator = torch.Generator().manual_seed(seed)
    rows: list[dict[str, Any]] = []
    tried = 0
    while len(rows) < n and tried < DRAWS_PER_PAIR * n:
        prompts = [task.draw(rng, split) for _ in range(min(prompts_per_batch, max(n, 32)))]
        tried += len(prompts)
        samples = sample(
            model,
            tokenizer,
            prompts,
            group_size=2,
            max_new_tokens=task.max_new_tokens,
            temperature=temperature,
            generator=generator,
        )
        samples.check_finite()
        for i in range(len(prompts)):
            pair = _label(task, samples, 2 * i, scale, rng.random())
            rows += [] if pair is None else [pair]
    if len(rows) < n:
        raise ValueError(
            f"n: {n} pairs wanted; {tried} prompts gave {len(rows)} with two different, rated "
            f"responses{'' if scale else ' of unlike reward'}"
        )
    return PreferencePairs(**{name: tuple(row[name] for row in rows[:n]) for name in rows[0]})


def _label(
    task: Task, samples: Samples, first: int, scale: float, uniform: float
) -> dict[str, Any] | None:
    """The pair of rows `first` and the next one, or None where they are no pair."""
    sides = []
    for i in (first, first + 1):
        reward, _ = rate(task, samples.prompts[i], samples.texts[i])
        sides.append((samples.texts[i], bool(samples.truncated[i]), reward))
    gap = sides[0][2] - sides[1][2]
    if sides[0][:2] == sides[1][:2] or math.isnan(gap) or (scale == 0 and gap == 0):
        return None
    won = gap > 0 if scale == 0 else uniform < _sigmoid(gap / scale)
    chosen, rejected = sides if won else sides[::-1]
    return {
        "prompts": samples.prompts[first],
        "chosen": chosen[0],
        "rejected": rejected[0],
        "chosen_cut": chosen[1],
        "rejected_cut": rejected[1],
        "chosen_rewards": chosen[2],
        "rejected_rewards": rejected[2],
    }


def _sigmoid(x: float) -> float:
    """Without overflow on either side."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else 1 - 1 / (1 + math.exp(x))


def _kind(name: str) -> str:
    if name in TEXTS:
        return "text"
    return "a boolean" if name.endswith("_cut") else "a finite number"


def _is(value: Any, kind: str) -> bool:
    if kind == "text":
        return isinstance(value, str)
    if kind == "a boolean":
        return isinstance(value, bool)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)
