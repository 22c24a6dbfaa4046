"""CreditShare: one number per response, so every token of it shares that number."""

import re
from dataclasses import dataclass
from typing import Any

import torch
import traitlets

from rlcore.objectives import group_advantages
from widgets.base import TeachingWidget, check_choice, check_numbers, module_text, signed

LEAST, MOST = 2, 64
MOST_CHARACTERS = 200  # of a phrase
_SPACE = re.compile(r"[ \t\r\n\f\v]+")
_EDGES = ".,;:!?\"'()"


@dataclass(frozen=True)
class AnswerSet:
    """Sampled answers to one question, the reward of each, and phrases worth a look."""

    question: str
    answers: tuple[str, ...]
    rewards: tuple[int, ...]
    phrases: tuple[str, ...]


# Six right, two wrong: 4950 is the sum to 99 (the pairs leave out 100), 5000 takes the average for
# 50. Three right answers use the product formula; one right and both wrong share the closing words.
SUM_TO_100 = AnswerSet(
    question="what is the sum of 1 to 100?",
    answers=(
        "The sum of 1 to n is n × (n + 1) / 2, so this is 100 × 101 / 2 = 5050.",
        "Write the list twice, once backwards: 100 columns of 101. Half of that is "
        "100 × 101 / 2 = 5050.",
        "First and last make 101, and each pair does, so 100 × 101 / 2 gives 5050.",
        "Pair the ends: 1 + 100, 2 + 99, down to 50 + 51. That is 50 pairs of 101, or 5050.",
        "Add in tens: 55, 155, 255 and so on up to 955. Together they make 5050. "
        "So that is the sum.",
        "The numbers average 50.5 and there are 100 of them: 5050.",
        "Pair the ends: 1 + 99, 2 + 98, down to 49 + 51, with 50 left over: 4900 + 50 = 4950. "
        "So that is the sum.",
        "The numbers average 50 and there are 100 of them: 5000. So that is the sum.",
    ),
    rewards=(1, 1, 1, 1, 1, 1, 0, 0),
    phrases=(
        "So that is the sum.",
        "100 × 101 / 2",
        "Pair the ends:",
        "The numbers average",
        "5050",
    ),
)


class CreditShare(TeachingWidget):
    """Answers as text with their rewards (0 or 1); a phrase; and what training pushes on it.

    Every token of an answer is pushed by the answer's advantage, or by A / |y| under the mean per
    response; the phrase's credit is the sum of the advantages of the answers that hold it. Tokens
    are words between spaces; letter case and punctuation at a word's edge do not count in a match.
    `phrases`: those offered for a click. Default: `SUM_TO_100`. A phrase holds at most 200
    characters. Raises `ValueError` on bad input.
    """

    parameters = ("answers", "rewards", "phrase", "ddof")
    _esm = module_text("credit_share")

    question = traitlets.Unicode("").tag(sync=True)
    answers = traitlets.Any().tag(sync=True)
    rewards = traitlets.Any().tag(sync=True)
    phrase = traitlets.Any().tag(sync=True)
    phrases = traitlets.Any().tag(sync=True)
    ddof = traitlets.Any(0).tag(sync=True)

    def __init__(
        self,
        answers: Any = SUM_TO_100.answers,
        rewards: Any = SUM_TO_100.rewards,
        phrase: str | None = None,
        phrases: Any = None,
        ddof: int = 0,
        question: str | None = None,
        **traits: Any,
    ):
        ours = answers is SUM_TO_100.answers
        if phrases is None:
            phrases = SUM_TO_100.phrases if ours else ()
        if not isinstance(phrases, (list, tuple)):
            raise ValueError(f"phrases must be a list of texts, found {phrases!r}")
        for i, offered in enumerate(phrases):
            phrase_tokens(f"phrases[{i}]", offered)
        if phrase is None:
            phrase = phrases[0] if phrases else answer_tokens(answers)[0][0]
        if question is None:
            question = SUM_TO_100.question if ours else ""
        if not isinstance(question, str):
            raise ValueError(f"question must be a text, found {question!r}")
        self.compute(answers, rewards, phrase, ddof)
        super().__init__(
            answers=list(answers),
            rewards=check_numbers("rewards", rewards, LEAST, MOST),
            phrase=phrase,
            phrases=list(phrases),
            ddof=ddof,
            question=question,
            **traits,
        )

    @staticmethod
    def compute(answers: Any, rewards: Any, phrase: str, ddof: int = 0) -> dict[str, Any]:
        """`advantages` (the push on each token), `push_mean` (A / |y|), `lengths` in tokens,
        `spans` (per answer, [start, end) of each occurrence of the phrase), `credit`,
        `credit_mean` (the same sum with A / |y|), `count_right`, `count_wrong`."""
        check_choice("ddof", ddof, (0, 1))
        texts = answer_tokens(answers)
        numbers = check_numbers("rewards", rewards, LEAST, MOST)
        if len(numbers) != len(answers):
            raise ValueError(
                f"rewards must hold one an answer ({len(answers)}), found {len(numbers)}"
            )
        for i, reward in enumerate(numbers):
            check_choice(f"rewards[{i}]", reward, (0, 1))
        wanted = [plain(token) for token in phrase_tokens("phrase", phrase)]
        spans = [find(wanted, [plain(token) for token in text]) for text in texts]

        group = torch.tensor(numbers, dtype=torch.float64)
        one_prompt = torch.zeros(len(group), dtype=torch.long)
        advantages = group_advantages(group, one_prompt, scale="group", ddof=ddof, eps=0.0)
        lengths = torch.tensor([len(text) for text in texts])
        holds = torch.tensor([bool(span) for span in spans])
        per_token = advantages / lengths
        return {
            "advantages": advantages.tolist(),
            "push_mean": per_token.tolist(),
            "lengths": lengths.tolist(),
            "spans": spans,
            "credit": advantages[holds].sum().item(),
            "credit_mean": per_token[holds].sum().item(),
            "count_right": int((holds & (group == 1)).sum()),
            "count_wrong": int((holds & (group == 0)).sum()),
        }

    @traitlets.validate("answers", "rewards", "phrase", "ddof")
    def _check(self, proposal: Any) -> Any:
        name, value = proposal["trait"].name, proposal["value"]
        self.compute(**{**self.settings(), name: value})
        return list(value) if name in ("answers", "rewards") else value

    def extra_state(self) -> dict[str, Any]:
        return {"question": self.question, "phrases": self.phrases}

    def rows(self) -> list[tuple[str, str]]:
        values = self.compute(**self.settings())
        table = [
            (f"{signed(advantage)} a token", answer)
            for advantage, answer in zip(values["advantages"], self.answers, strict=True)
        ]
        who = f"{values['count_right']} right, {values['count_wrong']} wrong"
        return [*table, (f"“{self.phrase}” ({who})", signed(values["credit"]))]


def tokens_of(argument: str, text: object) -> list[str]:
    """The words of a text, split at ASCII white space (a rule that Python and JavaScript share)."""
    if not isinstance(text, str):
        raise ValueError(f"{argument} must be a text, found {text!r}")
    tokens = [token for token in _SPACE.split(text) if token]
    if not tokens:
        raise ValueError(f"{argument} must hold at least one word, found {text!r}")
    return tokens


def phrase_tokens(argument: str, phrase: object) -> list[str]:
    tokens = tokens_of(argument, phrase)
    if len(str(phrase)) > MOST_CHARACTERS:
        raise ValueError(
            f"{argument} must hold at most {MOST_CHARACTERS} characters, found {len(str(phrase))}"
        )
    return tokens


def answer_tokens(answers: object) -> list[list[str]]:
    if not isinstance(answers, (list, tuple)) or not LEAST <= len(answers) <= MOST:
        found = len(answers) if isinstance(answers, (list, tuple)) else type(answers).__name__
        raise ValueError(f"answers must be a list of {LEAST} to {MOST} texts, found {found}")
    return [tokens_of(f"answers[{i}]", answer) for i, answer in enumerate(answers)]


def plain(token: str) -> str:
    """The token as it is compared; one made of punctuation only stays whole."""
    return (token.strip(_EDGES) or token).lower()


def find(wanted: list[str], tokens: list[str]) -> list[list[int]]:
    """[start, end) of each occurrence, left to right, none overlapping another."""
    spans, start = [], 0
    while start + len(wanted) <= len(tokens):
        end = start + len(wanted)
        if tokens[start:end] == wanted:
            spans.append([start, end])
            start = end
        else:
            start += 1
    return spans
