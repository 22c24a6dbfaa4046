"""An algorithm is one row of answers to the five questions of the book.

The rows below differ in nothing but their choices; the arithmetic is in ``rlcore.objectives``, the
fields are explained in ``Algorithm``.  A new row needs no new code::

    MY_GRPO = dataclasses.replace(GRPO, name="my-grpo", beta=0.0, kl="none", epsilon_high=0.28)

Where a paper and its released code differ, the row is the paper's and its notes say the rest.
"""

from dataclasses import replace

from rlcore.answers import QUESTIONS
from rlcore.assembly import Estimates, compute_advantages, compute_loss, step_totals
from rlcore.choices import ADVANTAGES, KL_PLACES, OVERLONG, REWARDS, Algorithm
from rlcore.objectives._checks import check_choice

__all__ = [
    "ADVANTAGES",
    "BNPO",
    "BNPO_TRL",
    "CISPO",
    "DAPO",
    "DCPO",
    "DR_GRPO",
    "GDPO",
    "GRPO",
    "GRPO_MEAN_ONLY",
    "GSPO",
    "GSPO_TOKEN",
    "KL_PLACES",
    "LUSPO",
    "OVERLONG",
    "PPO",
    "QUESTIONS",
    "REINFORCE",
    "REWARDS",
    "RLOO",
    "ROWS",
    "SAPO",
    "SCST",
    "VAPO",
    "VESPO",
    "Algorithm",
    "Estimates",
    "by_name",
    "compute_advantages",
    "compute_loss",
    "step_totals",
]

REINFORCE = Algorithm(
    name="reinforce",
    title="REINFORCE",
    source="Williams 1992, with the mean of the batch as baseline",
    advantage="batch_mean",
    surrogate="reinforce",
    aggregation="sequence_sum",
    notes=(
        "The mean of the batch holds the response's own reward, which shrinks the mean gradient by "
        "(B-1)/B and changes nothing else.",
    ),
)
SCST = Algorithm(
    name="scst",
    title="SCST",
    source="Rennie et al. 2017, arXiv 1612.00563",
    advantage="greedy",
    surrogate="reinforce",
    aggregation="sequence_sum",
    notes=("The paper takes one response per prompt; TRL has no greedy baseline.",),
)
RLOO = Algorithm(
    name="rloo",
    title="RLOO",
    source="Ahmadian et al. 2024, arXiv 2402.14740 (beta: TL;DR)",
    advantage="leave_one_out",
    surrogate="reinforce",
    aggregation="sequence_sum",
    kl="reward",
    kl_estimator="k1",
    beta=0.03,
    notes=(
        "The paper takes beta = 0.03 for TL;DR and 0.10 for HH; TRL's default is 0.05.",
        "TRL clips the ratio of the whole response to [0.8, 1.2], which the paper leaves out: with "
        "one update per batch that changes nothing.",
    ),
)
PPO = Algorithm(
    name="ppo",
    title="PPO",
    source="Schulman et al. 2017, arXiv 1707.06347, eqs. 7, 9, 11 and 12; on language models "
    "Ouyang et al. 2022, arXiv 2203.02155, sec. 3.5 (beta, the KL per token)",
    reward="reward_model",
    advantage="gae",
    whiten=True,
    aggregation="token_mean",
    kl="reward",
    kl_estimator="k1",
    beta=0.02,
    value_coef=0.1,
    epsilon_value=0.2,
    notes=(
        "The paper's gamma = 0.99 and entropy coefficient 0.01 are for control and Atari; here "
        "gamma = 1 and no entropy term, as TRL 1.12.",
        "Whitened advantages, the clipped value loss with its factor 1/2, and its weight 0.1 are "
        "TRL 1.12's; the paper has an unclipped squared error of weight 1.",
        "TRL has no PPOTrainer since 1.13; 1.12 put the score one slot after the last token of "
        "every row shorter than the batch, verl puts it on the last token, as here.",
        "TRL 1.12's KL weight is 0.05; it whitens within each process.",
    ),
)
GRPO = Algorithm(
    name="grpo",
    title="GRPO",
    source="Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, eqs. 3 and 4",
    advantage="group_zscore",
    kl="loss",
    kl_estimator="k3",
    beta=0.04,
    notes=(
        "The paper states neither ddof nor eps: TRL has the sample std + 1e-4, verl the sample std "
        "+ 1e-6.",
        "TRL's defaults are another row: beta = 0, loss_type dapo, and the KL term times the ratio "
        "(use_bias_correction_kl).",
    ),
)
DR_GRPO = Algorithm(
    name="dr-grpo",
    title="Dr. GRPO",
    source="Liu et al. 2025, arXiv 2503.20783, sec. 3.2 and listing 1",
    advantage="group_mean",
    aggregation="constant",
    notes=(
        'TRL needs both loss_type="dr_grpo" and scale_rewards="none"; its constant is '
        "max_completion_length.",
    ),
)
DAPO = Algorithm(
    name="dapo",
    title="DAPO",
    source="Yu et al. 2025, arXiv 2503.14476, eqs. 8 to 13",
    overlong="penalty",
    dynamic_sampling=True,
    advantage="group_zscore",
    epsilon_low=0.2,
    epsilon_high=0.28,
    aggregation="token_mean",
    notes=(
        "Overlong filtering is a step of the paper's ablation before the soft penalty: "
        'overlong="filter".',
        "The paper's reward is 1 or -1; a verifier of 1 and 0 makes the penalty weigh twice as "
        "much beside it.",
        "The paper means over one group, TRL over the whole accumulated batch; TRL has no dynamic "
        "sampling, and epsilon_high must be set by hand.",
        "verl stops with an error after max_num_gen_batches rounds of sampling.",
    ),
)
DCPO = Algorithm(
    name="dcpo",
    title="DCPO",
    source="Yang et al. 2025, arXiv 2509.02333, eqs. 4 to 8 and 27",
    advantage="smoothed",
    clip_range="dynamic",
    epsilon_low=0.16,
    epsilon_high=0.2,
    ratio_max=10.0,
    aggregation="only_token_mean",
    notes=(
        "The paper's std is the population's; the released code takes the sample std, with which "
        "the recursion is no longer the std of all rewards.",
        'Eq. 8 sums over responses; the released "only-token-mean" is the token mean of a '
        "micro-batch, which is eq. 8 only with one response in each.",
        "The released scripts set the clip to 0.2 and 0.28 and leave the smoothing off; in the "
        "code the cap for A < 0 is clip_ratio_c, for A > 0 the larger of it and 10.",
    ),
)
GDPO = Algorithm(
    name="gdpo",
    title="GDPO",
    source="Liu et al. 2026, arXiv 2601.05242, eqs. 4 to 8",
    reward="several",
    advantage="decoupled",
    ddof=1,
    notes=(
        "The paper writes no ddof; its printed numbers are those of the sample std.",
        "Authors' TRL fork and TRL add 1e-4 to the std at both stages, the paper at the second.",
        "The authors' verl branch takes the batch statistics over tokens, so that long responses "
        "count more; their TRL fork turns a missing reward into 0, TRL leaves it out.",
    ),
)
GSPO = Algorithm(
    name="gspo",
    title="GSPO",
    source="Zheng et al. 2025, arXiv 2507.18071, eqs. 5 to 7",
    ratio_level="sequence",
    epsilon_low=3e-4,
    epsilon_high=4e-4,
    notes=(
        'TRL needs importance_sampling_level="sequence" with loss_type="grpo": its default '
        "loss_type weighs each response by its length.",
    ),
)
GSPO_TOKEN = replace(
    GSPO,
    name="gspo-token",
    title="GSPO-token",
    source="Zheng et al. 2025, arXiv 2507.18071, eqs. 13 and 14",
    ratio_level="sequence_token",
    notes=(
        "With one advantage per response, loss and gradient are those of GSPO: TRL, which has no "
        "such ratio, gets GSPO's.",
    ),
)
CISPO = Algorithm(
    name="cispo",
    title="CISPO",
    source="MiniMax 2025 (MiniMax-M1), arXiv 2506.13585, eqs. 4 and 5; the cap of 5 from Khatri et "
    "al. 2025 (ScaleRL), arXiv 2510.13786",
    surrogate="capped",
    epsilon_low=1.0,
    epsilon_high=4.0,
    aggregation="token_mean",
    notes=(
        "MiniMax-M1 sets no lower bound and does not print its epsilon_high.",
        "The paper's cap is 1 + epsilon_high; TRL's epsilon_high is the cap itself, and left unset "
        "it is 0.2, a weight of 0.2 for every token.",
    ),
)
VAPO = Algorithm(
    name="vapo",
    title="VAPO",
    source="Yue et al. 2025, arXiv 2504.05118, eqs. 3 to 10",
    advantage="gae",
    lam_critic=1.0,
    length_alpha=0.05,
    value_pretraining=True,
    epsilon_low=0.2,
    epsilon_high=0.28,
    aggregation="token_mean",
    value_coef=1.0,
    nll_coef=0.1,
    notes=(
        "1 - 1/(0.05 |y|) is negative below 20 tokens, where the paper is silent: clamped to 0.",
        "The critic has an optimizer and a learning rate of its own, so the weight of its loss is "
        "1 here.",
        "No code was released; verl's GAE with the same lambda gives the same numbers.",
    ),
)
BNPO = Algorithm(
    name="bnpo",
    title="BNPO",
    source="Xiao et al. 2025, arXiv 2506.02864; clip and aggregation of its released run.sh",
    advantage="beta_normalized",
    epsilon_low=0.2,
    epsilon_high=0.28,
    ratio_max=10.0,
    aggregation="sequence_sum",
    notes=('TRL\'s loss_type="bnpo" is something else: see bnpo-trl.',),
)
BNPO_TRL = Algorithm(
    name="bnpo-trl",
    title="TRL's bnpo",
    source='TRL, GRPOTrainer with loss_type="bnpo"',
    ddof=1,
    eps=1e-4,
    aggregation="token_mean",
    notes=(
        "TRL takes the token mean of each micro-batch by itself: with one response in each it is "
        "GRPO's mean.",
    ),
)
SAPO = Algorithm(
    name="sapo",
    title="SAPO",
    source="Gao et al. 2025, arXiv 2511.20347",
    surrogate="soft",
    notes=("TRL takes the negative temperature where A = 0, which has no effect.",),
)
LUSPO = Algorithm(
    name="luspo",
    title="LUSPO",
    source="Liu et al. 2026, arXiv 2602.05261",
    ratio_level="sequence",
    epsilon_low=2e-3,
    epsilon_high=2.5e-3,
    aggregation="sequence_sum",
    notes=('TRL needs importance_sampling_level="sequence" beside loss_type="luspo".',),
)
VESPO = Algorithm(
    name="vespo",
    title="VESPO",
    source="arXiv 2602.10693, in the form of TRL's loss_type vespo",
    surrogate="gamma",
    ratio_level="sequence_sum",
    aggregation="token_mean",
    notes=("The formula is TRL's; the paper was not read.",),
)
GRPO_MEAN_ONLY = replace(
    GRPO, name="grpo-mean-only", title="GRPO, mean only", advantage="group_mean"
)
ROWS = (
    REINFORCE,
    SCST,
    RLOO,
    PPO,
    GRPO,
    DR_GRPO,
    DAPO,
    DCPO,
    GDPO,
    GSPO,
    GSPO_TOKEN,
    CISPO,
    VAPO,
    BNPO,
    BNPO_TRL,
    SAPO,
    LUSPO,
    VESPO,
)


def by_name(name: str) -> Algorithm:
    """The row of that name.  ValueError, with the names there are, for any other."""
    rows = {row.name: row for row in (*ROWS, GRPO_MEAN_ONLY)}
    return rows[check_choice("algorithm", name, tuple(rows))]
