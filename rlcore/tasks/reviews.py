"""Reviews in a small language, with a true reward that a program computes.

The prompt `plot music humor cast :` names four parts of a film; a response is a review in
sentences such as `the plot was very good .`, `the plot was not bad .` or `i loved the plot .`. The
true reward stands for what people really want, and is known here: so one can see a reward model,
trained on pairs, agree with it, and a policy, trained on the reward model, leave it.
"""

from __future__ import annotations

import random

from rlcore.tasks.task import Task

NOUNS = (
    *("plot", "music", "humor", "cast", "ending", "acting"),
    *("dialog", "camera", "story", "hero", "villain", "pace"),
)
PRAISE = ("good", "great", "fun", "superb", "lovely", "clever")
BLAME = ("bad", "dull", "poor", "awful", "boring", "weak")
LIKED = ("loved", "liked", "enjoyed")
DISLIKED = ("hated", "disliked")
DEGREES = ("very", "really", "so", "quite")
WORDS = (*NOUNS, *PRAISE, *BLAME, *LIKED, *DISLIKED, *DEGREES, "the", "was", "not", "i", ".", ":")
ASKED = 4  # parts that a prompt asks for, and sentences that are enough
LONGEST = 5  # sentences of a demonstration

# The true reward, in points. Tests and the book read them here.
PRAISED = 1.0  # a part that was asked for, the first time it is praised; blamed: the same, below 0
OFF_TOPIC = 0.5  # a part that was not asked for, praised or blamed: this share of it
REPEATED = -0.5  # a sentence on a part that had one already
UNGRAMMATICAL = -1.0  # a sentence of another form, one that was cut, and no sentence at all
TOO_MANY = -0.75  # each sentence beyond the fourth

# What the demonstrations are like: the writer is in two minds, wanders off and stumbles.
POSITIVE, WANDERS, STUMBLES = 0.6, 0.2, 0.05
NEGATES = 0.1  # share of sentences with "not"; few, so that counting good words nearly suffices


def parts_of(problem: str) -> list[str]:
    """The parts that a prompt asks for; ValueError for a prompt of another form."""
    parts = problem.split(" ")[:-1] if isinstance(problem, str) else []
    if len(set(parts)) != ASKED or not set(parts) <= set(NOUNS) or problem[-2:] != " :":
        raise ValueError(f"problem: found {problem!r}; wanted {ASKED} different parts and ':'")
    return parts


def problem(rng: random.Random) -> str:
    """Four different parts and `:`."""
    return " ".join(rng.sample(NOUNS, ASKED)) + " :"


def sentence(noun: str, positive: bool, rng: random.Random) -> str:
    """A sentence on a part, in one of the three forms of the language."""
    if rng.random() < NEGATES:
        return f"the {noun} was not {rng.choice(BLAME if positive else PRAISE)} ."
    if rng.random() < 0.5:
        return f"i {rng.choice(LIKED if positive else DISLIKED)} the {noun} ."
    degree = rng.choice(("", *(f"{word} " for word in DEGREES)))
    return f"the {noun} was {degree}{rng.choice(PRAISE if positive else BLAME)} ."


def read(words: list[str]) -> tuple[str, bool] | None:
    """(part, whether it is praised) of a sentence without its full stop; None for another form."""
    match words:
        case ["i", verb, "the", noun] if noun in NOUNS and verb in (*LIKED, *DISLIKED):
            return noun, verb in LIKED
        case ["the", noun, "was", "not", word] if noun in NOUNS and word in (*PRAISE, *BLAME):
            return noun, word in BLAME
        case ["the", noun, "was", *degree, word] if noun in NOUNS and word in (*PRAISE, *BLAME):
            known = not degree or (len(degree) == 1 and degree[0] in DEGREES)
            return (noun, word in PRAISE) if known else None
    return None


def sentences_of(response: str) -> list[list[str]]:
    """The words of each sentence, without full stops; one that was cut is an empty list."""
    sentences: list[list[str]] = [[]]
    for word in response.split():
        if word == ".":
            sentences.append([])
        else:
            sentences[-1].append(word)
    *whole, rest = sentences
    return [*whole, []] if rest or not whole else whole


def verify(problem: str, response: str) -> float:
    """The true reward of a review: points, as the constants of this module say; at most 4."""
    asked, seen = parts_of(problem), set()
    if not isinstance(response, str):
        return UNGRAMMATICAL
    sentences = sentences_of(response)
    points = TOO_MANY * max(0, len(sentences) - ASKED)
    for words in sentences:
        found = read(words)
        if found is None:
            points += UNGRAMMATICAL
            continue
        noun, praised = found
        if noun in seen:
            points += REPEATED
        else:
            share = 1.0 if noun in asked else OFF_TOPIC
            points += share * (PRAISED if praised else -PRAISED)
        seen.add(noun)
    return points


def solution(problem: str) -> str:
    """Every part that was asked for, praised once: 4 points, the most there are."""
    return " ".join(f"i loved the {noun} ." for noun in parts_of(problem))


def demonstration(problem: str, rng: random.Random) -> str:
    """One to five sentences: two in five blame, one in five wanders off, one in twenty stumbles.

    A sentence that stumbles has a word too many, or lacks one.
    """
    parts, written, sentences = parts_of(problem), [], []
    for _ in range(rng.randint(1, LONGEST)):
        left = [part for part in parts if part not in written] or parts
        noun = rng.choice(NOUNS if rng.random() < WANDERS else left)
        written.append(noun)
        words = sentence(noun, rng.random() < POSITIVE, rng).split()
        if rng.random() < STUMBLES:
            place = rng.randrange(len(words) - 1)
            words[place : place + 1] = rng.choice(([], [words[place]] * 2))
        sentences.append(" ".join(words))
    return " ".join(sentences)


REVIEWS = Task(
    name="reviews",
    description="Review four parts of a film, in sentences of a small language; the demonstrations "
    "praise and blame, wander off and stumble.",
    note="Good for: preferences with a known truth. A reward model can be compared with the reward "
    "it stands for, and a policy that is pushed too far has a rising proxy and a falling truth.",
    symbols="",
    words=WORDS,
    max_new_tokens=40,  # five sentences of seven words and the end, and a few to spare
    problem=problem,
    solution=solution,
    demonstration=demonstration,
    verify=verify,
    key=lambda problem: " ".join(sorted(parts_of(problem))),  # in whatever order they are asked
    preference_scale=0.5,
)
