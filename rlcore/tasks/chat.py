"""Any task for a pretrained model: its problems in the words, and the frame, that the model knows.

A compact model reads a problem as it is. A chat model reads the same problem as what a user says,
between the tokens of its chat template; a plain pretrained one after its first token, if it has
one. These tokens stand in the prompt by their names, which every tokenizer of transformers reads as
the tokens themselves.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rlcore.checks import brief, check_whole, shown
from rlcore.tasks.task import Task

PLACE = "{}"  # where the problem stands in an instruction
MARK = "PROBLEM0STANDS0HERE"  # stands for it while the template is looked at


def chat_task(
    task: Task,
    tokenizer: Any,
    *,
    instruction: str = PLACE,
    system: str | None = None,
    max_new_tokens: int | None = None,
    extract: Callable[[str], str] = str.strip,
) -> Task:
    """The task as a conversation: the problem is the user's turn, the response is the model's.

    instruction: what the user says, such as "Sort the digits: {}", where {} is the problem. system:
    the system's turn (None: what the template puts there itself). max_new_tokens: of the response
    (None: the task's, which counts the tokens of a compact model). extract: the answer in a
    response; the verifier sees it alone. Demonstrations stay as they are.

    Raises ValueError for a tokenizer without a chat template or with one that does not take this
    conversation, for an instruction without {} or with several, and, where a problem is drawn, for
    one that holds the name of a token of the template: it would be read as that token.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("tokenizer: it has no chat template; wanted a chat model, or text_task")
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": _filled(instruction, MARK)})
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template raises what it likes
        raise ValueError(f"tokenizer: its chat template fails ({brief(error)})") from error
    if text.count(MARK) != 1:
        raise ValueError("tokenizer: its chat template does not show what the user says, once")
    before, _, after = text.partition(MARK)
    return _framed(task, tokenizer, f"{task.name}/chat", before, after, max_new_tokens, extract)


def text_task(
    task: Task,
    tokenizer: Any,
    *,
    instruction: str = PLACE,
    max_new_tokens: int | None = None,
    extract: Callable[[str], str] = str,
) -> Task:
    """The task as plain text, which the response continues; the arguments are as in `chat_task`.

    A prompt begins with the first token where the tokenizer puts one before a text, as Llama's
    does: the model has seen no text without it, and the sampler and the loops add none themselves.
    """
    first = tokenizer.bos_token if adds_first(tokenizer) else ""
    before, _, after = _filled(instruction, MARK).partition(MARK)
    return _framed(
        task, tokenizer, f"{task.name}/text", first + before, after, max_new_tokens, extract
    )


def adds_first(tokenizer: Any) -> bool:
    """Whether the tokenizer puts its first token (bos_token) before a text."""
    first = getattr(tokenizer, "bos_token_id", None)
    return first is not None and tokenizer("")["input_ids"][:1] == [first]


def _filled(instruction: str, problem: str) -> str:
    if not isinstance(instruction, str) or instruction.count(PLACE) != 1:
        raise ValueError(f"instruction: found {shown(instruction)}; wanted a text with one {{}}")
    return instruction.replace(PLACE, problem)


def _framed(
    task: Task,
    tokenizer: Any,
    name: str,
    before: str,
    after: str,
    max_new_tokens: int | None,
    extract: Callable[[str], str],
) -> Task:
    """The task with every problem between two texts."""
    longest = task.max_new_tokens if max_new_tokens is None else max_new_tokens
    check_whole(1, max_new_tokens=longest)
    names = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    special = re.compile("|".join(map(re.escape, names))) if names else None

    def prompt(problem: str) -> str:
        if special is not None and (found := special.search(problem)):
            raise ValueError(
                f"problem: {problem!r} holds {found[0]!r}, the name of a token of the tokenizer"
            )
        return f"{before}{problem}{after}"

    def bare(text: str) -> str:
        if not (text.startswith(before) and text.endswith(after)):
            raise ValueError(f"prompt: found {shown(text)}; it is none of {name}")
        return text[len(before) : len(text) - len(after)]

    def verify(text: str, response: str) -> float | None:
        return task.verify(bare(text), extract(response))

    if (many := getattr(task.verify, "many", None)) is not None:
        vars(verify)["many"] = lambda texts, responses: many(
            [bare(text) for text in texts], [extract(response) for response in responses]
        )

    def demonstration(text: str, rng: random.Random) -> str:
        return task.demonstration(bare(text), rng)

    rewards = None
    if (several := task.rewards) is not None:

        def rewards(text: str, response: str) -> Mapping[str, float | None]:
            return several(bare(text), extract(response))

    return replace(
        task,
        name=name,
        max_new_tokens=longest,
        problem=lambda rng: prompt(task.problem(rng)),
        solution=lambda text: task.solution(bare(text)),
        demonstration=demonstration,
        verify=verify,
        key=lambda text: task.key(bare(text)),
        rewards=rewards,
    )
