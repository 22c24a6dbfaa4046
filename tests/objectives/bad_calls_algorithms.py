"""The mistakes that the rows of rlcore.algorithms must notice."""

# ruff: noqa: E501  (a table is read by its lines)

import dataclasses
import math
from typing import Any

import torch
from bad_calls import ADV, HOLE, IDS, LP, MASK, R, table

from rlcore.algorithms import (
    BNPO,
    CISPO,
    DAPO,
    DCPO,
    DR_GRPO,
    GDPO,
    GRPO,
    GSPO,
    PPO,
    REINFORCE,
    RLOO,
    SCST,
    VAPO,
    VESPO,
    Algorithm,
    by_name,
    compute_advantages,
    compute_loss,
    step_totals,
)
from rlcore.preferences import DPO

FILTER = dataclasses.replace(DR_GRPO, overlong="filter", aggregation="token_mean")
CUT = torch.tensor([False, True])
VALUES = {"values": LP, "old_values": LP, "returns": LP}


ENTROPIC = dataclasses.replace(GRPO, kl="none", beta=0.0, entropy_coef=0.1)
GRPO_PLAIN = dataclasses.replace(GRPO, kl="none", beta=0.0)
LIKELY = dataclasses.replace(GRPO, kl="none", beta=0.0, nll_coef=0.1)
PART = r"a call that sees a part of a step needs the counts of the whole step; got None"


def change(row: Any, **fields: Any) -> Any:
    return lambda: dataclasses.replace(row, **fields)


def part_of(row: Any, **totals: Any) -> Any:
    given = {**VALUES, "entropies": -LP, "correct": torch.tensor([True, False])}
    return lambda: compute_loss(row, LP, LP, ADV, MASK, constant=3, **given, **totals)


TABLE = table(
    algorithms=[
        (lambda: by_name("ppo2"), "algorithm must be one of reinforce, scst, rloo, ppo, grpo, dr-grpo, dapo, dcpo, gdpo, gspo, .*; got 'ppo2'"),
        (lambda: by_name([]), r"algorithm must be one of reinforce, .*; got \[\]"),
        (change(GRPO, ddof=True), r"ddof must be 0 .* or 1 .*; got True"),
        (change(GRPO, kl=torch.ones(2)), "kl must be one of none, reward, loss; got"),
        (change(GRPO, advantage="median"), "advantage must be one of batch_mean, greedy, leave_one_out, gae, group_mean, group_zscore, batch_zscore, smoothed, decoupled, beta_normalized; got 'median'"),
        (change(GRPO, reward="coin"), "reward must be one of verifier, reward_model, several; got 'coin'"),
        (change(GRPO, overlong="cut"), "overlong must be one of keep, filter, penalty; got 'cut'"),
        (change(GRPO, overlong_cache=1.5), "overlong_cache must be a finite number >= 0 and <= 1; got 1.5"),
        (change(GRPO, dynamic_sampling="yes"), "dynamic_sampling must be True or False; got 'yes'"),
        (change(PPO, whiten=1), "whiten must be True or False; got 1"),
        (change(GRPO, kl_importance_weighted=None), "kl_importance_weighted must be True or False; got None"),
        (change(GRPO, ddof=3), r"ddof must be 0 .* or 1 .*; got 3"),
        (change(GRPO, surrogate="none"), "surrogate must be one of clip, reinforce, capped, soft, gamma; got 'none'"),
        (change(GRPO, ratio_level="word"), "ratio_level must be one of token, sequence, sequence_sum, sequence_token; got 'word'"),
        (change(GRPO, clip_range="wide"), "clip_range must be one of fixed, dynamic; got 'wide'"),
        (change(GRPO, aggregation="mean"), "aggregation must be one of sequence_mean, .*, only_token_mean; got 'mean'"),
        (change(GRPO, kl="both"), "kl must be one of none, reward, loss; got 'both'"),
        (change(GRPO, kl_estimator="k0"), "kl_estimator must be one of k1, k2, k3; got 'k0'"),
        (change(GRPO, epsilon_low=-1), "epsilon_low must be a finite number >= 0 and <= 1; got -1"),
        (change(GRPO, epsilon_high=math.inf), "epsilon_high must be a finite number >= 0 .*; got inf"),
        (change(GRPO, eps=-1), "eps must be a finite number >= 0; got -1"),
        (change(GDPO, batch_eps=-1), "batch_eps must be a finite number >= 0; got -1"),
        (change(GRPO, tau_negative=0), r"tau_negative must be a finite number >= 1e-06 and <= 1e\+06; got 0"),
        (change(GRPO, beta=math.nan), "beta must be a finite number >= 0 and <= 1e\\+30; got nan"),
        (change(PPO, gamma=1.1), "gamma must be a finite number >= 0 and <= 1; got 1.1"),
        (change(PPO, lam=-0.1), "lam must be a finite number >= 0 and <= 1; got -0.1"),
        (change(VAPO, lam_critic=2), "lam_critic must be a finite number >= 0 and <= 1; got 2"),
        (change(VAPO, length_alpha=0), "length_alpha must be a finite number > 0 .*; got 0"),
        (change(PPO, epsilon_value=0), "epsilon_value must be a finite number > 0 .*; got 0"),
        (change(PPO, value_coef=-1), "value_coef must be a finite number >= 0 .*; got -1"),
        (change(GRPO, entropy_coef=-1), "entropy_coef must be a finite number >= 0 .*; got -1"),
        (change(GRPO, nll_coef="0.1"), "nll_coef must be a finite number >= 0 .*; got '0.1'"),
        (change(DCPO, ratio_max=0.5), "ratio_max must be a finite number >= 1 .*; got 0.5"),
        (change(DR_GRPO, beta=0.1), 'beta must be 0 when kl="none"; got 0.1'),
        (change(RLOO, kl_estimator="k3"), "kl_estimator must be k1 when kl=\"reward\"; got 'k3'"),
        (change(SCST, kl="reward", kl_estimator="k1"), 'kl must be none or loss when advantage="greedy", whose rewards are compared as they are; got \'reward\''),
        (change(BNPO, kl="reward", kl_estimator="k1"), 'kl must be none or loss when advantage="beta_normalized"'),
        (change(GDPO, kl="reward", kl_estimator="k1"), 'kl must be none or loss when advantage="decoupled"'),
        (change(GRPO, advantage="decoupled"), "reward must be several when advantage=\"decoupled\"; got 'verifier'"),
        (change(GDPO, overlong="penalty"), 'overlong="penalty" and dynamic_sampling need one reward; got advantage="decoupled"'),
        (change(GDPO, dynamic_sampling=True), 'overlong="penalty" and dynamic_sampling need one reward'),
        (change(GRPO, whiten=True), "whiten is for advantage=\"gae\", which has a critic; got True with 'group_zscore'"),
        (change(GRPO, value_pretraining=True), "value_pretraining is for advantage=\"gae\", which has a critic; got True with 'group_zscore'"),
        (change(PPO, value_pretraining=1), "value_pretraining must be True or False; got 1"),
        (change(GRPO, value_coef=0.5), 'value_coef is for advantage="gae", which has a critic; got 0.5'),
        (change(GRPO, epsilon_value=0.2), 'epsilon_value is for advantage="gae"'),
        (change(GRPO, length_alpha=0.05), 'length_alpha is for advantage="gae"'),
        (change(GRPO, lam_critic=0.0), 'lam_critic is for advantage="gae", which has a critic; got 0.0'),
        (change(VESPO, ratio_level="token"), "ratio_level must be sequence_sum when surrogate=\"gamma\"; got 'token'"),
        (change(GSPO, clip_range="dynamic"), "ratio_level must be token when clip_range=\"dynamic\"; got 'sequence'"),
        (change(REINFORCE, ratio_max=10.0), "ratio_max is for surrogate=\"clip\" or clip_range=\"dynamic\"; got 10.0 with 'reinforce'"),
        (change(CISPO, ratio_max=10.0), 'ratio_max is for surrogate="clip"'),
        (change(GRPO, ratio_max=1.1), r"ratio_max must be at least 1 \+ epsilon_high = 1.2; got 1.1"),
        (change(GRPO, dynamic_sampling=torch.ones(2, 2)), r"dynamic_sampling must be True or False; got a tensor of shape \(2, 2\)"),
        (change(GRPO, name=3), r"name must be a string that is not empty; got 3 \(int\)"),
        (change(GRPO, name=""), "name must be a string that is not empty; got ''"),
        (change(GRPO, title=None), "title must be a string that is not empty; got None"),
        (change(GRPO, title=" "), "title must be a string that is not empty; got ' '"),
        (change(GRPO, source=5), r"source must be a string; got 5 \(int\)"),
        (change(GRPO, source=torch.ones(2, 2)), r"source must be a string; got a tensor of shape \(2, 2\)"),
        (change(GRPO, notes="one"), "notes must be a tuple or a list of strings; got 'one'"),
        (change(GRPO, notes=None), "notes must be a tuple or a list of strings; got None"),
        (change(GRPO, notes=("one", 2)), r"notes must be a tuple or a list of strings; got 2 \(int\)"),
        (change(GRPO, notes={"one"}), r"notes must be a tuple or a list of strings; got \{'one'\} \(set\)"),
        (change(REINFORCE, clip_range="dynamic"), "clip_range must be fixed when surrogate=\"reinforce\", which has no range; got 'dynamic'"),
    ],
    compute_advantages=[
        (lambda: compute_advantages(RLOO, R, IDS), r"old_logprobs, ref_logprobs and response_mask must be given: rloo has its KL term in the reward \(beta=0.03\); got None"),
        (lambda: compute_advantages(PPO, ADV, IDS[:2], response_mask=MASK, values=LP), "old_logprobs, ref_logprobs and response_mask must be given: ppo has its KL term"),
        (lambda: compute_advantages(PPO, ADV, IDS[:2], response_mask=MASK), "values must be given: ppo has advantage='gae'; got None"),
        (lambda: compute_advantages(VAPO, ADV, IDS[:2], values=LP), "response_mask must be given: vapo has advantage='gae'; got None"),
        (lambda: compute_advantages(VAPO, R, IDS, response_mask=MASK, values=LP), r"rewards must be of shape \(2,\)"),
        (lambda: compute_advantages(VAPO, ADV, IDS[:2], response_mask=MASK, values=LP[:1]), r"values must be a tensor of shape \(2, 3\), that of the mask; got a tensor of shape \(1, 3\)"),
        (lambda: compute_advantages(VAPO, ADV, IDS[:2], response_mask=HOLE, values=LP), "response_mask row 1 is empty"),
        (lambda: compute_advantages(SCST, R, IDS), "greedy_rewards must be given: scst has advantage='greedy'; got None"),
        (lambda: compute_advantages(DAPO, ADV, IDS[:2], max_length=3), "response_mask must be given: dapo has overlong='penalty'; got None"),
        (lambda: compute_advantages(DAPO, ADV, IDS[:2], response_mask=MASK), "max_length must be given: dapo has overlong='penalty'; got None"),
        (lambda: compute_advantages(DAPO, ADV, IDS[:2], response_mask=MASK, max_length=2.5), "max_length must be an integer >= 1; got 2.5"),
        (lambda: compute_advantages(DAPO, R, IDS, response_mask=MASK, max_length=3), r"rewards must be of shape \(2,\), one per row of response_mask; got a tensor of shape \(4,\)"),
        (lambda: compute_advantages(DAPO, R.view(2, 2), IDS, response_mask=MASK, max_length=3), r"rewards must be real and of shape \(B,\)"),
        (lambda: compute_advantages(GRPO, R[:1], IDS[:1]), "group_ids: every group needs at least 2 rows"),
        (lambda: compute_advantages(GDPO, R, IDS), r"rewards must be .* \(B, n\)"),
        (lambda: compute_advantages(DCPO, R, IDS, history=3), "history must be"),
        *((lambda row=row: compute_advantages(row, R, IDS), "algorithm must be an Algorithm, a row of rlcore.algorithms; got") for row in ("grpo", None, DPO, Algorithm, [GRPO])),
        *(
            (lambda row=row, ids=ids: compute_advantages(row, ADV, ids, response_mask=MASK, values=LP, greedy_rewards=ADV), message)
            for row in (VAPO, SCST, REINFORCE)
            for ids, message in (
                (None, "group_ids must be a tensor or a list of integers; got None"),
                ("ab", "group_ids must be a tensor or a list of integers; got 'ab'"),
                (IDS, r"group_ids must be of shape \(2,\), as rewards; got a tensor of shape \(4,\)"),
                (ADV, "group_ids must hold integers, the prompts' ids; got .* dtype torch.float32"),
            )
        ),
    ],
    compute_loss=[
        (lambda: compute_loss("grpo", LP, LP, ADV, MASK), r"algorithm must be an Algorithm, a row of rlcore.algorithms; got 'grpo' \(str\)"),
        (lambda: compute_loss(None, LP, LP, ADV, MASK), "algorithm must be an Algorithm, .*; got None"),
        (lambda: compute_loss(DPO, LP, LP, ADV, MASK), r"algorithm must be an Algorithm, .*; got .* \(PreferenceMethod\)"),
        (part_of(ENTROPIC, total=5), f"token_total must be given with total=5: {PART}"),
        (part_of(dataclasses.replace(PPO, aggregation="sequence_mean"), total=5), f"token_total must be given with total=5: {PART}"),
        (part_of(dataclasses.replace(PPO, aggregation="only_token_mean"), total=5), f"token_total must be given with total=5: {PART}"),
        (part_of(PPO, token_total=9), f"total must be given with token_total=9: {PART}"),
        (part_of(VAPO, total=9), f"correct_total must be given with total=9: {PART}"),
        (part_of(VAPO, total=9, token_total=9), f"correct_total must be given with total=9: {PART}"),
        (part_of(VAPO, correct_total=9), f"total must be given with correct_total=9: {PART}"),
        (part_of(LIKELY, total=9), f"correct_total must be given with total=9: {PART}"),
        (part_of(LIKELY, correct_total=9), f"total must be given with correct_total=9: {PART}"),
        (part_of(dataclasses.replace(LIKELY, aggregation="only_token_mean"), token_total=9), f"correct_total must be given with token_total=9: {PART}"),
        (part_of(GRPO_PLAIN, token_total=9), f"total must be given with token_total=9: {PART}"),
        (part_of(LIKELY, total=9, correct_total=1), "correct_total must be at least the 3 tokens of correct responses of this part; got 1"),
        (part_of(LIKELY, total=9, correct_total="9"), "correct_total must be an integer >= 1; got '9'"),
        (lambda: compute_loss(GRPO, LP, LP, ADV, MASK), "ref_logprobs must be given when beta > 0; got None with beta=0.04"),
        (lambda: compute_loss(DR_GRPO, LP, LP, ADV, MASK), "constant must be given to aggregate over a constant; got None"),
        (lambda: compute_loss(SCST, LP, LP, ADV, HOLE), "response_mask row 1 is empty"),
        (lambda: compute_loss(FILTER, LP, LP, ADV, MASK), "truncated must be given: dr-grpo has overlong='filter'; got None"),
        (lambda: compute_loss(FILTER, LP, LP, ADV, HOLE, truncated=CUT), "response_mask row 1 is empty"),
        (lambda: compute_loss(FILTER, LP, LP, ADV, MASK, truncated=CUT.float()), "truncated must hold booleans"),
        (lambda: compute_loss(change(SCST, entropy_coef=0.1)(), LP, LP, ADV, MASK), "entropies must be given: scst has entropy_coef=0.1; got None"),
        (lambda: compute_loss(PPO, LP, LP, ADV, MASK), "old_values must be given: ppo has epsilon_value=0.2; got None"),
        (lambda: compute_loss(PPO, LP, LP, ADV, MASK, old_values=LP), "values must be given: ppo has value_coef=0.1; got None"),
        (lambda: compute_loss(VAPO, LP, LP, ADV, MASK, values=LP), "returns must be given: vapo has value_coef=1.0; got None"),
        (lambda: compute_loss(VAPO, LP, LP, ADV, MASK, **VALUES), "correct must be given: vapo has nll_coef=0.1; got None"),
        (lambda: compute_loss(VAPO, LP, LP, ADV, MASK, **VALUES, correct=ADV), r"correct must be booleans of shape \(2,\); got a tensor of shape \(2,\) and dtype torch.float32"),
        (lambda: compute_loss(VAPO, LP, LP, ADV, MASK, **VALUES, correct=CUT[:1]), r"correct must be booleans of shape \(2,\); got a tensor of shape \(1,\)"),
    ],
    step_totals=[
        (lambda: step_totals("grpo", MASK), r"algorithm must be an Algorithm, a row of rlcore.algorithms; got 'grpo' \(str\)"),
        (lambda: step_totals(None, MASK), "algorithm must be an Algorithm, .*; got None"),
        (lambda: step_totals(DPO, MASK), r"algorithm must be an Algorithm, .*; got .* \(PreferenceMethod\)"),
        (lambda: step_totals(GRPO, MASK[0]), r"response_mask must be a tensor of shape \(B, T\)"),
        (lambda: step_totals(FILTER, MASK), "truncated must be given: dr-grpo has overlong='filter'; got None"),
        (lambda: step_totals(GRPO, MASK, known=CUT[:1]), r"known must be booleans of shape \(2,\); got a tensor of shape \(1,\)"),
        (lambda: step_totals(GRPO, MASK, correct=ADV), r"correct must be booleans of shape \(2,\); got a tensor of shape \(2,\) and dtype torch.float32"),
    ],
)  # fmt: skip
