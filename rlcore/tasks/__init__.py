"""Tasks: problems, demonstrations of mixed quality, verifiers. No torch is needed here."""

from __future__ import annotations

from rlcore.tasks.chat import adds_first, chat_task, text_task
from rlcore.tasks.code import CodeProblem, code_task
from rlcore.tasks.formula import FORMULA
from rlcore.tasks.letters import LETTERS
from rlcore.tasks.limit import VerifierTimeout
from rlcore.tasks.preferences import PreferencePairs, load_pairs, sample_pairs
from rlcore.tasks.reviews import REVIEWS
from rlcore.tasks.robot import ROBOT
from rlcore.tasks.sandbox import SandboxError
from rlcore.tasks.sort import SORT, SORT_FEW, SORT_UNSEEN
from rlcore.tasks.sort_box import SORT_BOX, SORT_BOX_UNEVEN
from rlcore.tasks.sort_filler import SORT_FILLER
from rlcore.tasks.task import SPLITS, Task, rate, rate_all, rate_each

TASKS = {
    task.name: task
    for task in (
        SORT,
        SORT_UNSEEN,
        SORT_FEW,
        ROBOT,
        SORT_BOX,
        SORT_BOX_UNEVEN,
        SORT_FILLER,
        LETTERS,
        REVIEWS,
        FORMULA,
    )
}

__all__ = [
    "FORMULA",
    "LETTERS",
    "REVIEWS",
    "ROBOT",
    "SORT",
    "SORT_BOX",
    "SORT_BOX_UNEVEN",
    "SORT_FEW",
    "SORT_FILLER",
    "SORT_UNSEEN",
    "SPLITS",
    "TASKS",
    "CodeProblem",
    "PreferencePairs",
    "SandboxError",
    "Task",
    "VerifierTimeout",
    "adds_first",
    "chat_task",
    "code_task",
    "get_task",
    "load_pairs",
    "rate",
    "rate_all",
    "rate_each",
    "sample_pairs",
    "text_task",
]


def get_task(name: str) -> Task:
    """The task of that name; ValueError listing the names for an unknown one."""
    if not isinstance(name, str) or name not in TASKS:
        raise ValueError(f"task: found {name!r}; wanted one of {', '.join(TASKS)}")
    return TASKS[name]
