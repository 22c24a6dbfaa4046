"""A method that learns from preferences is one row of answers to the book's three questions.

DPO, IPO, SimPO and ORPO below differ in nothing but their rows; the arithmetic is in
``rlcore.objectives.preference``.  A new row needs no new code::

    MY_DPO = dataclasses.replace(DPO, name="my-dpo", beta=0.5, link="hinge")

Two methods answer the same questions about other data: the reward model (a number from a head
instead of log-probs) and KTO (single responses instead of pairs).  They have rows of their own.
Defaults are the papers'.  A row's ``notes`` say where released code differs from them.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rlcore.naming import check_texts
from rlcore.objectives import SCORES, kto_loss, preference_loss, reward_model_loss
from rlcore.objectives._checks import check_choice, check_number, describe
from rlcore.objectives._pairs import MAX_FACTOR
from rlcore.objectives.preference import link_function, smoothing_function

THREE_QUESTIONS = (
    "Which score does a response get?",
    "By which margin must the better one win?",
    "Through which link does the difference become a loss?",
)
REFERENCE_SCORES = ("log_ratio_sum", "log_ratio_mean")


@dataclass(frozen=True)
class PreferenceMethod:
    """One row over pairs.  Fields and their values are those of ``preference_loss``; nothing is
    hidden.

    ValueError for a value that ``preference_loss`` would not take, and for texts that are none.
    """

    name: str
    title: str
    source: str
    notes: tuple[str, ...] = ()
    score: str = "log_ratio_sum"
    link: str = "sigmoid"
    beta: float = 0.1
    gamma: float = 0.0
    label_smoothing: float = 0.0
    smoothing: str = "conservative"
    weight: float = 1.0
    nll_coef: float = 0.0

    def __post_init__(self) -> None:
        check_texts(self)
        check_choice("score", self.score, SCORES)
        link_function(self.link, self.beta, self.gamma)
        smoothing_function(self.smoothing, self.label_smoothing)
        check_number("weight", self.weight, at_least=0, at_most=MAX_FACTOR)
        check_number("nll_coef", self.nll_coef, at_least=0, at_most=MAX_FACTOR)

    @property
    def needs_reference(self) -> bool:
        """Whether the score compares with a reference policy: a second model in memory."""
        return self.score in REFERENCE_SCORES

    @property
    def gamma_beta_ratio(self) -> float:
        """The margin as SimPO's authors spell it in their code, gamma / beta."""
        return self.gamma / self.beta

    def three_answers(self) -> dict[str, str]:
        """The row in words: question -> answer, in the order of the book."""
        answers = (_score(self), _margin(self), _link(self))
        return dict(zip(THREE_QUESTIONS, answers, strict=True))


@dataclass(frozen=True)
class RewardModelMethod:
    """The row of a reward model: its score comes from a head, not from log-probs.

    center_coef is that of ``reward_model_loss``; the margin, if any, comes with the data.
    """

    name: str
    title: str
    source: str
    notes: tuple[str, ...] = ()
    center_coef: float = 0.0

    def __post_init__(self) -> None:
        check_texts(self)
        check_number("center_coef", self.center_coef, at_least=0, at_most=MAX_FACTOR)

    def three_answers(self) -> dict[str, str]:
        """The row in words: question -> answer, in the order of the book."""
        centre = f", plus {self.center_coef:g} × (r_w + r_l)²" if self.center_coef else ""
        answers = (
            "r(x, y), a scalar head read at the last real token",
            "the rater's, where the data have one; else 0",
            f"−log σ{centre}",
        )
        return dict(zip(THREE_QUESTIONS, answers, strict=True))


@dataclass(frozen=True)
class UnpairedMethod:
    """The row of a method that learns from single responses, each desirable or not.

    The fields are those of ``kto_loss``.
    """

    name: str
    title: str
    source: str
    notes: tuple[str, ...] = ()
    beta: float = 0.1
    weight_desirable: float = 1.0
    weight_undesirable: float = 1.0

    def __post_init__(self) -> None:
        check_texts(self)
        check_number("beta", self.beta, above=0, at_most=MAX_FACTOR)
        for field in ("weight_desirable", "weight_undesirable"):
            check_number(field, getattr(self, field), at_least=0, at_most=MAX_FACTOR)

    @property
    def needs_reference(self) -> bool:
        """Whether the score compares with a reference policy: it does."""
        return True

    def three_answers(self) -> dict[str, str]:
        """The row in words: question -> answer, in the order of the book."""
        answers = (
            f"{self.beta:g} × log π/π_ref, summed over the tokens",
            "none between answers: each is compared with z₀, the mean log π/π_ref of mismatched "
            "pairs (at least 0)",
            f"1 − σ, desirable × {self.weight_desirable:g}, undesirable × "
            f"{self.weight_undesirable:g}",
        )
        return dict(zip(THREE_QUESTIONS, answers, strict=True))


Method = PreferenceMethod | RewardModelMethod | UnpairedMethod


def compute_preference_loss(
    method: PreferenceMethod,
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    *,
    ref_chosen_logprobs: Tensor | None = None,
    ref_rejected_logprobs: Tensor | None = None,
    total: Any = None,
    token_total: Any = None,
    allow_empty: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a row over pairs and its statistics, as ``preference_loss`` gives them.

    The reference's log-probs are needed where ``method.needs_reference``; the other rows do not
    look at them.
    """
    _check_kind(method, PreferenceMethod, "pairs of log-probs")
    reference = {
        "ref_chosen_logprobs": ref_chosen_logprobs,
        "ref_rejected_logprobs": ref_rejected_logprobs,
    }
    return preference_loss(
        chosen_logprobs,
        rejected_logprobs,
        chosen_mask,
        rejected_mask,
        **(reference if method.needs_reference else {}),
        score=method.score,
        link=method.link,
        beta=method.beta,
        gamma=method.gamma,
        label_smoothing=method.label_smoothing,
        smoothing=method.smoothing,
        weight=method.weight,
        nll_coef=method.nll_coef,
        total=total,
        token_total=token_total,
        allow_empty=allow_empty,
    )


def compute_reward_model_loss(
    method: RewardModelMethod,
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    *,
    margin: Tensor | None = None,
    total: Any = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a reward model's row and its statistics, as ``reward_model_loss`` gives them."""
    _check_kind(method, RewardModelMethod, "pairs of rewards")
    return reward_model_loss(
        chosen_rewards,
        rejected_rewards,
        margin=margin,
        center_coef=method.center_coef,
        total=total,
    )


def compute_unpaired_loss(
    method: UnpairedMethod,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    desirable: Tensor,
    *,
    mismatched_log_ratios: Tensor,
    total: Any = None,
    allow_empty: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a row over single responses and its statistics, as ``kto_loss`` gives them."""
    _check_kind(method, UnpairedMethod, "single responses")
    return kto_loss(
        logprobs,
        ref_logprobs,
        response_mask,
        desirable,
        mismatched_log_ratios=mismatched_log_ratios,
        beta=method.beta,
        weight_desirable=method.weight_desirable,
        weight_undesirable=method.weight_undesirable,
        total=total,
        allow_empty=allow_empty,
    )


def simpo_from_ratio(*, beta: float = 2.0, gamma_beta_ratio: float = 0.5) -> PreferenceMethod:
    """SimPO's row in the spelling of its authors' code: gamma = gamma_beta_ratio × beta.

    The defaults are those of that code, and give ``SIMPO``.  ValueError: beta <= 0, a ratio < 0.
    """
    beta = check_number("beta", beta, above=0, at_most=MAX_FACTOR)
    ratio = check_number("gamma_beta_ratio", gamma_beta_ratio, at_least=0, at_most=MAX_FACTOR)
    return replace(SIMPO, beta=beta, gamma=ratio * beta)


def by_name(name: str) -> Method:
    """The row of that name.  ValueError, with the names there are, for any other."""
    rows = {row.name: row for row in ROWS}
    return rows[check_choice("method", name, tuple(rows))]


def _check_kind(method: Any, kind: type, what: str) -> None:
    if not isinstance(method, kind):
        row = isinstance(method, PreferenceMethod | RewardModelMethod | UnpairedMethod)
        found = f"{method.name!r} ({type(method).__name__})" if row else describe(method)
        raise ValueError(f"method must be a {kind.__name__}, a row over {what}; got {found}")


def _score(row: PreferenceMethod) -> str:
    words = {
        "log_ratio_sum": "log π/π_ref, summed over the tokens",
        "log_ratio_mean": "log π/π_ref, averaged over the tokens",
        "logprob_mean": "log π, averaged over the tokens; no reference",
        "log_odds": "log P/(1 − P) of P, the geometric mean of the tokens' π; no reference",
    }[row.score]
    scaled = row.link != "square" and row.beta != 1
    return f"{row.beta:g} × {words}" if scaled else words


def _margin(row: PreferenceMethod) -> str:
    if row.link == "square":
        return f"exactly 1/(2β) = {1 / (2 * row.beta):g}"
    if row.link == "hinge":
        return f"at least {1 + row.gamma:g}"
    return f"γ = {row.gamma:g}" if row.gamma else "0"


def _link(row: PreferenceMethod) -> str:
    words = {"sigmoid": "−log σ", "hinge": "max(0, margin − difference)", "square": "square"}
    answer = words[row.link]
    if row.label_smoothing:
        kind = {"conservative": "averaged over", "robust": "corrected for"}[row.smoothing]
        answer += f", {kind} labels that are wrong with probability {row.label_smoothing:g}"
    if row.weight != 1:
        answer = f"{row.weight:g} × {answer}"
    if row.nll_coef:
        times = "" if row.nll_coef == 1 else f"{row.nll_coef:g} × "
        answer += f", plus {times}the chosen response's NLL"
    return answer


REWARD_MODEL = RewardModelMethod(
    name="reward-model",
    title="Reward model",
    source="Ouyang et al. 2022 (InstructGPT), arXiv 2203.02155, eq. 1",
    notes=(
        "InstructGPT takes all pairs of a ranking of K answers as one batch element "
        "(ranking_loss); TRL has pairs only.",
        "The margin is Llama 2's (arXiv 2307.09288, eq. 2); TRL takes it from a column of the "
        "data.",
        "Centring (center_coef, recommended 0.01) is TRL's, not in these papers.",
        "transformers reads the rightmost token that is not the padding id; where padding and "
        "end-of-sequence share an id that is the token before the end. Here the mask decides.",
    ),
)
DPO = PreferenceMethod(
    name="dpo",
    title="DPO",
    source="Rafailov et al. 2023, arXiv 2305.18290, eq. 7 (beta: 0.5 for TL;DR)",
    notes=(
        "Log-probs are summed over the response, never averaged: TRL's sigmoid does the same.",
        "TRL 1.16 silently ignores label_smoothing with loss_type sigmoid.",
    ),
)
CDPO = replace(
    DPO,
    name="cdpo",
    title="cDPO",
    source="Mitchell 2023, A note on DPO with noisy preferences, eqs. 3 and 4",
    label_smoothing=0.1,
    notes=(
        "The note leaves the share of wrong labels to the data; 0.1 is an example.",
        "TRL dropped it in 0.29: since then its sigmoid loss silently ignores label_smoothing.",
    ),
)
ROBUST_DPO = replace(
    CDPO,
    name="robust-dpo",
    title="Robust DPO",
    source="Chowdhury et al. 2024, arXiv 2403.00409",
    smoothing="robust",
    notes=(
        "The share of wrong labels must be known; 0.1 is an example.",
        "TRL has it as loss_type robust, with the same value.",
    ),
)
HINGE = replace(
    DPO,
    name="hinge",
    title="Hinge",
    source="Zhao et al. 2023 (SLiC), arXiv 2305.10425; with a reference: Liu et al. 2023 (RSO), "
    "arXiv 2309.06657",
    link="hinge",
    notes=(
        "SLiC has no reference in its score; the log-ratio is RSO's, and TRL's hinge.",
        "beta is DPO's and TRL's default.",
    ),
)
IPO = replace(
    DPO,
    name="ipo",
    title="IPO",
    source="Azar et al. 2023, arXiv 2310.12036, eq. 17 (beta is its tau)",
    link="square",
    notes=(
        "The paper's eq. 17 sums log-ratios over the response; TRL's ipo averages them over its "
        "tokens, and says that the authors confirmed the average.",
    ),
)
IPO_AVERAGED = replace(
    IPO,
    name="ipo-averaged",
    title="IPO, per token",
    source="TRL, loss_type ipo; the sum of the paper (arXiv 2310.12036, eq. 17) is the row ipo",
    score="log_ratio_mean",
    notes=(
        "The average over tokens is TRL's reading; the paper does not mention it.",
        "TRL logs rewards from the summed log-ratio, here they are beta times the average.",
    ),
)
DPO_NORM = replace(
    DPO,
    name="dpo-norm",
    title="Length-normalised DPO",
    source="Lambert et al. 2024 (Tulu 3), arXiv 2411.15124; TRL, loss_type sigmoid_norm",
    score="log_ratio_mean",
    beta=5.0,
    notes=(
        "beta is Tulu 3's: an average over tokens is smaller than a sum; TRL's default stays 0.1.",
        "TRL logs rewards from the summed log-ratio, here they are beta times the average.",
    ),
)
SIMPO = PreferenceMethod(
    name="simpo",
    title="SimPO",
    source="Meng et al. 2024, arXiv 2405.14734, eqs. 4 to 6 (beta 2 to 2.5, gamma 0.5 to 1.5)",
    score="logprob_mean",
    beta=2.0,
    gamma=1.0,
    notes=(
        "gamma is the margin itself, as in the paper and in TRL's simpo_gamma; the authors' code "
        "takes gamma_beta_ratio = gamma / beta (simpo_from_ratio).",
        "TRL has it in its CPO trainer: set cpo_alpha=0, or a likelihood term is added, and beta, "
        "whose default there is 0.1.",
        "With label_smoothing, TRL's flipped term is −log σ(−(βh − γ)), which turns the margin "
        "round too; here the flipped pair must win by γ as well.",
    ),
)
ORPO = PreferenceMethod(
    name="orpo",
    title="ORPO",
    source="Hong et al. 2024, arXiv 2403.07691, eqs. 3 to 7 (lambda: 0.1 Mistral, 0.2 Llama 2, "
    "0.25 Phi-2)",
    score="log_odds",
    beta=1.0,
    weight=0.1,
    nll_coef=1.0,
    notes=(
        "The paper's likelihood term covers the chosen response; TRL's covers the prompt too.",
        "The weight of the odds-ratio term, lambda, is called beta in TRL.",
        "TRL logs lambda times the mean log-prob as rewards, here they are the log-odds.",
        "TRL computes the odds in float32, whatever the inputs.",
    ),
)
KTO = UnpairedMethod(
    name="kto",
    title="KTO",
    source="Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8",
    notes=(
        "z₀ is kept at 0 or above and has no gradient, in the paper and in TRL.",
        "TRL shifts the answers of one device's batch to get mismatched pairs, so it needs more "
        "than one row there.",
        "The paper wants λ_D n_D / (λ_U n_U) in [1, 3/2], TRL's documentation in [1, 4/3] "
        "(kto_weights).",
        "TRL's comment calls the loss eq. 7; it is eq. 8.",
    ),
)
ROWS: tuple[Method, ...] = (
    REWARD_MODEL,
    DPO,
    CDPO,
    ROBUST_DPO,
    HINGE,
    IPO,
    IPO_AVERAGED,
    DPO_NORM,
    SIMPO,
    ORPO,
    KTO,
)
