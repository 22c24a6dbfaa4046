"""The mistakes that the reward model, the preference losses and their rows must notice."""

# ruff: noqa: E501  (a table is read by its lines)

import dataclasses
import math
from typing import Any

import torch
from bad_calls import HOLE, INF_LP, LP, MASK, NAN_LP, of_tokens, table

from rlcore.objectives import (
    kto_loss,
    kto_weights,
    last_token_values,
    preference_loss,
    ranking_loss,
    reward_model_loss,
)
from rlcore.preferences import (
    DPO,
    IPO,
    KTO,
    REWARD_MODEL,
    SIMPO,
    RewardModelMethod,
    UnpairedMethod,
    by_name,
    compute_preference_loss,
    compute_reward_model_loss,
    compute_unpaired_loss,
    simpo_from_ratio,
)

W, L = torch.tensor([1.0, -0.5]), torch.tensor([0.5, 0.0])
NAN_W, INF_W = torch.tensor([1.0, math.nan]), torch.tensor([-math.inf, 0.0])
RANKED = torch.tensor([[2.0, 1.0, 0.0], [1.0, 0.5, math.nan]])
MARKS = torch.tensor([True, False])
HUGE = torch.full_like(LP, -1e30)


def pairs(*arguments: Any, **options: Any) -> Any:
    """A pair of responses twice, with a reference unless the score has none."""
    given = [LP, LP - 1, MASK, MASK]
    if options.get("score") not in ("logprob_mean", "log_odds"):
        options = {"ref_chosen_logprobs": LP, "ref_rejected_logprobs": LP, **options}
    return preference_loss(*arguments, *given[len(arguments) :], **options)


def kto(*arguments: Any, **options: Any) -> Any:
    given = [LP, LP, MASK, MARKS]
    options = {"mismatched_log_ratios": W, **options}
    return kto_loss(*arguments, *given[len(arguments) :], **options)


STEP = r"a call that sees a part of a step needs the counts of the whole step; got None"

TABLE = table(
    last_token_values=of_tokens(last_token_values, "values", "attention_mask"),
    reward_model_loss=[
        (lambda: reward_model_loss(1.0, L), r"chosen_rewards must be real and of shape \(B,\), B >= 1; got 1.0 \(float\)"),
        (lambda: reward_model_loss(W[:, None], L), r"chosen_rewards must be real and of shape \(B,\), B >= 1; got a tensor of shape \(2, 1\)"),
        (lambda: reward_model_loss(W[:0], L[:0]), r"chosen_rewards must be real and of shape \(B,\), B >= 1; got a tensor of shape \(0,\)"),
        (lambda: reward_model_loss(W.to(torch.complex64), L), "chosen_rewards must be real .* dtype torch.complex64"),
        (lambda: reward_model_loss(W.to_sparse(), L), "chosen_rewards must be real .* layout torch.sparse_coo"),
        (lambda: reward_model_loss(NAN_W, L), r"chosen_rewards must be finite and at most 1e\+12 in size; got nan in row 1"),
        (lambda: reward_model_loss(INF_W, L), r"chosen_rewards must be finite and at most 1e\+12 in size; got -inf in row 0"),
        (lambda: reward_model_loss(W * 1e20, L), r"chosen_rewards must be finite and at most 1e\+12 in size; got 1e\+20 in row 0"),
        (lambda: reward_model_loss(W, L.tolist()), r"rejected_rewards must be real and of shape \(2,\), as chosen_rewards; got \[0.5, 0.0\] \(list\)"),
        (lambda: reward_model_loss(W, L[:1]), r"rejected_rewards must be real and of shape \(2,\), as chosen_rewards; got a tensor of shape \(1,\)"),
        (lambda: reward_model_loss(W, L[:, None]), r"rejected_rewards must be real and of shape \(2,\), as chosen_rewards; got a tensor of shape \(2, 1\)"),
        (lambda: reward_model_loss(W, NAN_W), "rejected_rewards must be finite .*; got nan in row 1"),
        (lambda: reward_model_loss(W, L.to("meta")), "rejected_rewards must be on cpu, as chosen_rewards; got meta"),
        (lambda: reward_model_loss(W, L, margin=1.0), r"margin must be real and of shape \(2,\), as chosen_rewards; got 1.0 \(float\)"),
        (lambda: reward_model_loss(W, L, margin=L[:1]), r"margin must be real and of shape \(2,\), as chosen_rewards; got a tensor of shape \(1,\)"),
        (lambda: reward_model_loss(W, L, margin=INF_W), "margin must be finite .*; got -inf in row 0"),
        (lambda: reward_model_loss(W, L, center_coef=-0.1), r"center_coef must be a finite number >= 0 and <= 1e\+09; got -0.1"),
        (lambda: reward_model_loss(W, L, center_coef=None), r"center_coef must be a finite number >= 0 and <= 1e\+09; got None"),
        (lambda: reward_model_loss(W, L, center_coef=1e10), r"center_coef must be a finite number >= 0 and <= 1e\+09; got 10000000000.0"),
        (lambda: reward_model_loss(W, L, total=1), "total must be at least the 2 pairs of this part; got 1"),
        (lambda: reward_model_loss(W, L, total=2.0), "total must be an integer >= 1; got 2.0"),
    ],
    ranking_loss=[
        (lambda: ranking_loss(RANKED[0]), r"rewards must be real and of shape \(B, K\), B >= 1 and K >= 2, best first; got a tensor of shape \(3,\)"),
        (lambda: ranking_loss(RANKED[:, :1]), r"rewards must be real and of shape .* got a tensor of shape \(2, 1\)"),
        (lambda: ranking_loss(RANKED[:0]), r"rewards must be real and of shape .* got a tensor of shape \(0, 3\)"),
        (lambda: ranking_loss(RANKED.tolist()), r"rewards must be real and of shape .* got \[\[2.0"),
        (lambda: ranking_loss(RANKED.to(torch.complex64)), "rewards must be real .* dtype torch.complex64"),
        (lambda: ranking_loss(RANKED.nan_to_num(0).to_sparse()), "rewards must be real .* layout torch.sparse_coo"),
        (lambda: ranking_loss(RANKED.nan_to_num(math.inf)), r"rewards must be at most 1e\+12 in size, or NaN where no answer is; got inf in row 1, place 2"),
        (lambda: ranking_loss(RANKED * 1e20), r"rewards must be at most 1e\+12 in size, .*; got 2e\+20 in row 0, place 0"),
        (lambda: ranking_loss(torch.tensor([[1.0, 0.0], [1.0, math.nan]])), "rewards row 1 must rank at least 2 answers; got 1"),
        (lambda: ranking_loss(RANKED, total=1), "total must be at least the 2 rankings of this part; got 1"),
        (lambda: ranking_loss(RANKED, total="2"), "total must be an integer >= 1; got '2'"),
    ],
    preference_loss=[
        *of_tokens(lambda lp, m: pairs(lp, LP, m), "chosen_logprobs", "chosen_mask"),
        *of_tokens(lambda lp, m: pairs(LP, lp, MASK, m), "rejected_logprobs", "rejected_mask"),
        *of_tokens(lambda lp, m: pairs(ref_chosen_logprobs=lp), "ref_chosen_logprobs")[:7],
        *of_tokens(lambda lp, m: pairs(ref_rejected_logprobs=lp), "ref_rejected_logprobs")[:7],
        (lambda: pairs(LP, LP[:1], MASK, MASK[:1]), "rejected_mask must have 2 rows, as chosen_mask; got 1"),
        (lambda: pairs(LP.to("meta")), "chosen_logprobs must be on cpu, as the mask; got meta"),
        (lambda: pairs(HUGE), r"chosen_logprobs must be finite and at most 1e\+12 in size when summed over a response; got -3e\+30 in row 0"),
        (lambda: pairs(LP, HUGE), r"rejected_logprobs must be finite and at most 1e\+12 .*; got -3e\+30 in row 0"),
        (lambda: pairs(ref_chosen_logprobs=HUGE), r"ref_chosen_logprobs must be finite and at most 1e\+12 in size when the log-ratio is summed over a response; got 3e\+30 in row 0"),
        (lambda: pairs(score="ratio"), "score must be one of log_ratio_sum, log_ratio_mean, logprob_mean, log_odds; got 'ratio'"),
        (lambda: pairs(link="logistic"), "link must be one of sigmoid, hinge, square; got 'logistic'"),
        (lambda: pairs(smoothing="none"), "smoothing must be one of conservative, robust; got 'none'"),
        (lambda: pairs(beta=0), r"beta must be a finite number > 0 and <= 1e\+09; got 0"),
        (lambda: pairs(beta=-0.1), r"beta must be a finite number > 0 and <= 1e\+09; got -0.1"),
        (lambda: pairs(beta=math.nan), r"beta must be a finite number > 0 and <= 1e\+09; got nan"),
        (lambda: pairs(beta=torch.tensor(0.1)), r"beta must be a finite number > 0 and <= 1e\+09; got a tensor of shape \(\)"),
        (lambda: pairs(link="hinge", beta="0.1"), r"beta must be a finite number > 0 and <= 1e\+09; got '0.1'"),
        (lambda: pairs(link="square", beta=1e-7), r"beta must be a finite number >= 1e-06 and <= 1e\+09; got 1e-07"),
        (lambda: pairs(gamma=-1), r"gamma must be a finite number >= 0 and <= 1e\+09; got -1"),
        (lambda: pairs(link="square", gamma=1.0), 'gamma must be 0 with link="square"; got 1.0'),
        (lambda: pairs(label_smoothing=-0.1), "label_smoothing must be a finite number >= 0 and <= 0.5; got -0.1"),
        (lambda: pairs(label_smoothing=0.6), "label_smoothing must be a finite number >= 0 and <= 0.5; got 0.6"),
        (lambda: pairs(label_smoothing=0.5, smoothing="robust"), 'label_smoothing must be below 0.5 with smoothing="robust"; got 0.5'),
        (lambda: pairs(weight=-1), r"weight must be a finite number >= 0 and <= 1e\+09; got -1"),
        (lambda: pairs(weight=True), r"weight must be a finite number >= 0 and <= 1e\+09; got True"),
        (lambda: pairs(nll_coef=math.inf), r"nll_coef must be a finite number >= 0 and <= 1e\+09; got inf"),
        (lambda: pairs(ref_chosen_logprobs=None), 'ref_chosen_logprobs must be given with score="log_ratio_sum"; got None'),
        (lambda: pairs(score="log_ratio_mean", ref_rejected_logprobs=None), 'ref_rejected_logprobs must be given with score="log_ratio_mean"; got None'),
        (lambda: pairs(score="logprob_mean", ref_chosen_logprobs=LP), r'ref_chosen_logprobs must be None with score="logprob_mean", which has no reference; got a tensor of shape \(2, 3\)'),
        (lambda: pairs(score="log_odds", ref_rejected_logprobs=LP), 'ref_rejected_logprobs must be None with score="log_odds", which has no reference; got a tensor'),
        (lambda: pairs(-LP, score="log_odds"), r'chosen_logprobs must be at most 0 with score="log_odds": they are logs of probabilities; got a mean of 1.16667 in row 0'),
        (lambda: pairs(LP, -LP, score="log_odds"), "rejected_logprobs must be at most 0 .*; got a mean of 1.16667 in row 0"),
        (lambda: pairs(total=1), "total must be at least the 2 pairs of this part; got 1"),
        (lambda: pairs(total=[2]), r"total must be an integer >= 1; got \[2\]"),
        (lambda: pairs(nll_coef=1, token_total=4), "token_total must be at least the 5 tokens of this part; got 4"),
        (lambda: pairs(token_total="abc"), "token_total must be an integer >= 1; got 'abc'"),
        (lambda: pairs(token_total=4), "token_total must be at least the 5 tokens of this part; got 4"),
        (lambda: pairs(nll_coef=1, total=2), f"token_total must be given with total=2: {STEP}"),
        (lambda: pairs(nll_coef=1, token_total=9), f"total must be given with token_total=9: {STEP}"),
        (lambda: pairs(nll_coef=1, token_total=0), "token_total must be an integer >= 1; got 0"),
    ],
    kto_loss=[
        (lambda: kto(LP, LP, MASK, torch.tensor([1, 0j])), r"desirable must be real and of shape \(2,\), one per row of response_mask; got .* torch.complex64"),
        *of_tokens(lambda lp, m: kto(lp, LP, m), "logprobs"),
        *of_tokens(lambda lp, m: kto(LP, lp), "ref_logprobs")[:7],
        (lambda: kto(HUGE), r"logprobs - ref_logprobs must be finite and at most 1e\+12 in size when summed over a response; got -3e\+30 in row 0"),
        (lambda: kto(LP, LP, MASK, MARKS[:1]), r"desirable must be real and of shape \(2,\), one per row of response_mask; got a tensor of shape \(1,\)"),
        (lambda: kto(LP, LP, MASK, [1, 0]), r"desirable must be real and of shape \(2,\), one per row of response_mask; got \[1, 0\]"),
        (lambda: kto(LP, LP, MASK, torch.tensor([1, -1])), r"desirable must hold only 0 and 1 \(or booleans\); got -1"),
        (lambda: kto(LP, LP, MASK, torch.tensor([1, math.nan])), r"desirable must hold only 0 and 1 \(or booleans\); got nan"),
        (lambda: kto(LP, LP, MASK, MARKS.to("meta")), "desirable must be on cpu, as the mask; got meta"),
        (lambda: kto(mismatched_log_ratios=0.1), r"mismatched_log_ratios must be real and of shape \(B,\), B >= 1; got 0.1 \(float\)"),
        (lambda: kto(mismatched_log_ratios=W[:0]), r"mismatched_log_ratios must be real .* got a tensor of shape \(0,\)"),
        (lambda: kto(mismatched_log_ratios=LP), r"mismatched_log_ratios must be real .* got a tensor of shape \(2, 3\)"),
        (lambda: kto(mismatched_log_ratios=NAN_W), "mismatched_log_ratios must be finite .*; got nan in row 1"),
        (lambda: kto(beta=0), r"beta must be a finite number > 0 and <= 1e\+09; got 0"),
        (lambda: kto(weight_desirable=-1), r"weight_desirable must be a finite number >= 0 and <= 1e\+09; got -1"),
        (lambda: kto(weight_undesirable=math.nan), r"weight_undesirable must be a finite number >= 0 and <= 1e\+09; got nan"),
        (lambda: kto(total=1), "total must be at least the 2 responses of this part; got 1"),
    ],
    kto_weights=[
        (lambda: kto_weights(torch.tensor([1, 0j])), r"desirable must be real, of shape \(N,\) and hold only 0 and 1; got .* torch.complex64"),
        (lambda: kto_weights([True, False]), r"desirable must be real, of shape \(N,\) and hold only 0 and 1; got \[True, False\] \(list\)"),
        (lambda: kto_weights(MASK), r"desirable must be real, of shape \(N,\) and hold only 0 and 1; got a tensor of shape \(2, 3\)"),
        (lambda: kto_weights(torch.tensor([1, -1])), r"desirable must be real, of shape \(N,\) and hold only 0 and 1"),
        (lambda: kto_weights(torch.tensor([True, True])), "desirable must hold both kinds; got 2 desirable and 0 undesirable"),
        (lambda: kto_weights(torch.tensor([0])), "desirable must hold both kinds; got 0 desirable and 1 undesirable"),
        (lambda: kto_weights(MARKS, ratio=0), r"ratio must be a finite number > 0 and <= 1e\+09; got 0"),
    ],
    preferences=[
        (lambda: by_name("ppo"), "method must be one of reward-model, dpo, cdpo, robust-dpo, hinge, ipo, ipo-averaged, dpo-norm, simpo, orpo, kto; got 'ppo'"),
        (lambda: by_name(None), "method must be one of reward-model, .*; got None"),
        (lambda: dataclasses.replace(DPO, score="reward"), "score must be one of log_ratio_sum, .*; got 'reward'"),
        (lambda: dataclasses.replace(DPO, link="relu"), "link must be one of sigmoid, hinge, square; got 'relu'"),
        (lambda: dataclasses.replace(DPO, smoothing="soft"), "smoothing must be one of conservative, robust; got 'soft'"),
        (lambda: dataclasses.replace(DPO, beta=0), r"beta must be a finite number > 0 .*; got 0"),
        (lambda: dataclasses.replace(IPO, beta=1e-9), r"beta must be a finite number >= 1e-06 .*; got 1e-09"),
        (lambda: dataclasses.replace(IPO, gamma=1.0), 'gamma must be 0 with link="square"; got 1.0'),
        (lambda: dataclasses.replace(SIMPO, gamma=-1.0), "gamma must be a finite number >= 0 .*; got -1.0"),
        (lambda: dataclasses.replace(DPO, label_smoothing=1), "label_smoothing must be a finite number >= 0 and <= 0.5; got 1"),
        (lambda: dataclasses.replace(DPO, label_smoothing=0.5, smoothing="robust"), "label_smoothing must be below 0.5"),
        (lambda: dataclasses.replace(DPO, weight=-1), "weight must be a finite number >= 0 .*; got -1"),
        (lambda: dataclasses.replace(DPO, nll_coef="1"), "nll_coef must be a finite number >= 0 .*; got '1'"),
        (lambda: dataclasses.replace(REWARD_MODEL, center_coef=-1), "center_coef must be a finite number >= 0 .*; got -1"),
        *(
            (lambda row=row, fields=fields: dataclasses.replace(row, **fields), message)
            for row in (DPO, REWARD_MODEL, KTO)
            for fields, message in (
                ({"name": 3}, r"name must be a string that is not empty; got 3 \(int\)"),
                ({"name": ""}, "name must be a string that is not empty; got ''"),
                ({"title": None}, "title must be a string that is not empty; got None"),
                ({"source": 5}, r"source must be a string; got 5 \(int\)"),
                ({"notes": "one"}, "notes must be a tuple or a list of strings; got 'one'"),
                ({"notes": None}, "notes must be a tuple or a list of strings; got None"),
                ({"notes": [torch.ones(2, 2)]}, r"notes must be a tuple or a list of strings; got a tensor of shape \(2, 2\)"),
            )
        ),
        (lambda: dataclasses.replace(KTO, beta=0), "beta must be a finite number > 0 .*; got 0"),
        (lambda: dataclasses.replace(KTO, weight_desirable=-1), "weight_desirable must be a finite number >= 0 .*; got -1"),
        (lambda: dataclasses.replace(KTO, weight_undesirable=None), "weight_undesirable must be a finite number >= 0 .*; got None"),
        (lambda: simpo_from_ratio(beta=0), "beta must be a finite number > 0 .*; got 0"),
        (lambda: simpo_from_ratio(gamma_beta_ratio=-1), "gamma_beta_ratio must be a finite number >= 0 .*; got -1"),
        (lambda: compute_preference_loss(KTO, LP, LP, MASK, MASK), r"method must be a PreferenceMethod, a row over pairs of log-probs; got 'kto' \(UnpairedMethod\)"),
        (lambda: compute_preference_loss(torch.ones(2, 2), LP, LP, MASK, MASK), r"method must be a PreferenceMethod, a row over pairs of log-probs; got a tensor of shape \(2, 2\)"),
        (lambda: compute_reward_model_loss(None, W, L), "method must be a RewardModelMethod, a row over pairs of rewards; got None"),
        (lambda: compute_preference_loss(DPO.__class__, LP, LP, MASK, MASK), r"method must be a PreferenceMethod, a row over pairs of log-probs; got .*erenceMethod.* \(type\)"),
        (lambda: compute_preference_loss("dpo", LP, LP, MASK, MASK), r"method must be a PreferenceMethod, a row over pairs of log-probs; got 'dpo' \(str\)"),
        (lambda: compute_preference_loss(DPO, LP, LP, MASK, MASK), 'ref_chosen_logprobs must be given with score="log_ratio_sum"; got None'),
        (lambda: compute_preference_loss(SIMPO, LP, LP, MASK, HOLE), "rejected_mask row 1 is empty"),
        (lambda: compute_preference_loss(SIMPO, NAN_LP, LP, MASK, MASK), "chosen_logprobs must be finite at every real token; got nan in row 1, slot 0"),
        (lambda: compute_preference_loss(SIMPO, LP, INF_LP, MASK, MASK), "rejected_logprobs must be finite at every real token; got -inf in row 0, slot 2"),
        (lambda: compute_reward_model_loss(DPO, W, L), r"method must be a RewardModelMethod, a row over pairs of rewards; got 'dpo' \(PreferenceMethod\)"),
        (lambda: compute_unpaired_loss(DPO, LP, LP, MASK, MARKS, mismatched_log_ratios=W), r"method must be a UnpairedMethod, a row over single responses; got 'dpo'"),
        (lambda: RewardModelMethod("a", "A", "none", center_coef=math.nan), "center_coef must be a finite number"),
        (lambda: UnpairedMethod("a", "A", "none", beta=math.inf), "beta must be a finite number"),
    ],
)  # fmt: skip
