"""rlcore.to_trl: every row's config field by field, what TRL cannot express, and TRL's own code run
by the config that came out."""

from __future__ import annotations

import importlib.util
import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rlcore
from rlcore import preferences
from rlcore.algorithms import (
    BNPO,
    BNPO_TRL,
    CISPO,
    DAPO,
    DCPO,
    DR_GRPO,
    GDPO,
    GRPO,
    GRPO_MEAN_ONLY,
    GSPO,
    GSPO_TOKEN,
    LUSPO,
    PPO,
    REINFORCE,
    RLOO,
    ROWS,
    SAPO,
    SCST,
    VAPO,
    VESPO,
    Algorithm,
    compute_advantages,
    compute_loss,
)
from rlcore.objectives import token_logprobs
from rlcore.preferences import (
    CDPO,
    DPO,
    DPO_NORM,
    HINGE,
    IPO,
    IPO_AVERAGED,
    KTO,
    ORPO,
    REWARD_MODEL,
    ROBUST_DPO,
    SIMPO,
    PreferenceMethod,
    compute_preference_loss,
    compute_reward_model_loss,
    compute_unpaired_loss,
)
from rlcore.trl_export import TrlDifference, to_trl

sys.path.insert(0, str(Path(__file__).parent / "parity"))
import trl_drive as trl

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install '.[trl]'"
)

DAPO_ONCE = replace(DAPO, dynamic_sampling=False)
RLOO_CLIPPED = replace(
    RLOO, surrogate="clip", ratio_level="sequence_sum", aggregation="sequence_mean"
)
ADVANTAGES = (  # of a z-scored group of 8
    "advantages: TRL divides by the sample std of its group + 0.0001, the row by the population "
    "std + 0: TRL's are the row's multiplied by 0.935414 = sqrt((G - 1)/G) for G = 8, and by "
    "s / (s + 0.0001), s the sample std"
)


@pytest.fixture(autouse=True)
def quiet_trl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TRL's and transformers' own warnings, on loading and on CPU settings, are not ours."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


@pytest.fixture
def in_float64() -> Iterator[None]:
    """TRL makes some tensors in torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def export(method: Any, tmp_path: Path, **overrides: Any) -> tuple[Any, list[str]]:
    """The config, and what was said of differences."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", TrlDifference)
        config = to_trl(method, output_dir=str(tmp_path), report_to="none", **overrides)
    assert all(one.filename == __file__ for one in caught)
    return config, [str(one.message) for one in caught]


# --- fields -------------------------------------------------------------------------------------

ONLINE = {
    "loss_type": "grpo",
    "beta": 0.0,
    "use_bias_correction_kl": False,
    "epsilon": 0.2,
    "epsilon_high": 0.2,
    "delta": None,
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "mask_truncated_completions": False,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "num_generations": 8,
    "num_iterations": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "repetition_penalty": 1.0,
    "disable_dropout": True,
    "reward_weights": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
}
SEQUENCE = {"importance_sampling_level": "sequence"}
GRPO_ROWS: list[tuple[Algorithm, dict[str, Any]]] = [
    (GRPO, {"beta": 0.04}),
    (replace(GRPO, kl_importance_weighted=True), {"beta": 0.04, "use_bias_correction_kl": True}),
    (GRPO_MEAN_ONLY, {"beta": 0.04, "scale_rewards": "none"}),
    (replace(GRPO, advantage="batch_zscore"), {"beta": 0.04, "scale_rewards": "batch"}),
    (DR_GRPO, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    (DAPO_ONCE, {"loss_type": "dapo", "epsilon_high": 0.28}),
    (
        replace(DAPO_ONCE, overlong="filter", ratio_max=3.0, entropy_coef=0.01),
        {
            "loss_type": "dapo",
            "epsilon_high": 0.28,
            "delta": 3.0,
            "mask_truncated_completions": True,
            "entropy_coef": 0.01,
        },
    ),
    (GDPO, {"multi_objective_aggregation": "normalize_then_sum"}),
    (GSPO, {**SEQUENCE, "epsilon": 3e-4, "epsilon_high": 4e-4}),
    (GSPO_TOKEN, {**SEQUENCE, "epsilon": 3e-4, "epsilon_high": 4e-4}),
    (CISPO, {"loss_type": "cispo", "epsilon": 1.0, "epsilon_high": 5.0}),
    (
        replace(CISPO, epsilon_high=0.28),
        {"loss_type": "cispo", "epsilon": 1.0, "epsilon_high": 1.28},
    ),
    (BNPO_TRL, {"loss_type": "bnpo"}),
    (SAPO, {"loss_type": "sapo"}),
    (
        replace(SAPO, tau_positive=0.9, tau_negative=1.2),
        {"loss_type": "sapo", "sapo_temperature_pos": 0.9, "sapo_temperature_neg": 1.2},
    ),
    (LUSPO, {**SEQUENCE, "loss_type": "luspo", "epsilon": 2e-3, "epsilon_high": 2.5e-3}),
    (
        VESPO,
        {
            "loss_type": "vespo",
            "vespo_k_pos": 2.0,
            "vespo_lambda_pos": 3.0,
            "vespo_k_neg": 3.0,
            "vespo_lambda_neg": 2.0,
        },
    ),
]  # fmt: skip


def fields_of(config: Any, names: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


@needs_trl
@pytest.mark.parametrize(
    ("row", "changed"), GRPO_ROWS, ids=lambda value: getattr(value, "name", "")
)
def test_the_fields_of_a_grpo_config(row: Algorithm, changed: dict, tmp_path: Path) -> None:
    config, _ = export(row, tmp_path)
    assert type(config).__name__ == "GRPOConfig"
    wanted = ONLINE | changed
    assert fields_of(config, wanted) == wanted


@needs_trl
def test_the_fields_of_a_rloo_config(tmp_path: Path) -> None:
    wanted = {
        "beta": 0.03,
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "normalize_advantages": False,
        "reward_clip_range": None,
        "mask_truncated_completions": False,
        **{name: ONLINE[name] for name in ("num_generations", "num_iterations", "temperature")},
        **{name: ONLINE[name] for name in ("top_p", "top_k", "disable_dropout", "reward_weights")},
    }
    for row in (RLOO, RLOO_CLIPPED):
        config, _ = export(row, tmp_path)
        assert type(config).__name__ == "RLOOConfig"
        assert fields_of(config, wanted) == wanted
    config, _ = export(replace(RLOO, kl="none", beta=0.0, epsilon_high=0.3), tmp_path)
    assert (config.beta, config.epsilon_high) == (0.0, 0.3)


DPO_FIELDS = {
    "loss_weights": [1.0],
    "beta": 0.1,
    "label_smoothing": 0.0,
    "f_divergence_type": "reverse_kl",
    "ld_alpha": None,
    "use_weighting": False,
    "disable_dropout": True,
}
PREFERENCE_ROWS: list[tuple[Any, str, dict[str, Any]]] = [
    (DPO, "DPOConfig", DPO_FIELDS | {"loss_type": ["sigmoid"]}),
    (replace(DPO, weight=0.5), "DPOConfig", DPO_FIELDS | {"loss_weights": [0.5]}),
    (ROBUST_DPO, "DPOConfig", DPO_FIELDS | {"loss_type": ["robust"], "label_smoothing": 0.1}),
    (
        replace(ROBUST_DPO, label_smoothing=0.0),
        "DPOConfig",
        DPO_FIELDS | {"loss_type": ["sigmoid"]},
    ),
    (HINGE, "DPOConfig", DPO_FIELDS | {"loss_type": ["hinge"]}),
    (IPO_AVERAGED, "DPOConfig", DPO_FIELDS | {"loss_type": ["ipo"]}),
    (DPO_NORM, "DPOConfig", DPO_FIELDS | {"loss_type": ["sigmoid_norm"], "beta": 5.0}),
    (
        SIMPO,
        "CPOConfig",
        {
            "loss_type": "simpo",
            "beta": 2.0,
            "simpo_gamma": 1.0,
            "cpo_alpha": 0.0,
            "alpha": 0.0,
            "label_smoothing": 0.0,
        },
    ),
    (ORPO, "ORPOConfig", {"beta": 0.1, "disable_dropout": True}),
    (
        replace(KTO, weight_desirable=1.2, weight_undesirable=0.8),
        "KTOConfig",
        {"loss_type": "kto", "beta": 0.1, "desirable_weight": 1.2, "undesirable_weight": 0.8},
    ),
    (REWARD_MODEL, "RewardConfig", {"center_rewards_coefficient": None}),
    (
        replace(REWARD_MODEL, center_coef=0.01),
        "RewardConfig",
        {"center_rewards_coefficient": 0.01},
    ),
]


@needs_trl
@pytest.mark.parametrize(
    ("row", "kind", "wanted"), PREFERENCE_ROWS, ids=lambda value: getattr(value, "name", "")
)
def test_the_fields_of_a_preference_config(
    row: Any, kind: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    config, _ = export(row, tmp_path)
    assert type(config).__name__ == kind
    assert fields_of(config, wanted) == wanted


def test_every_row_is_expressed_or_refused() -> None:
    """No row of the two modules is left out of the tables of this file."""
    expressed = {row.name for row, _ in GRPO_ROWS} | {RLOO.name}
    refused = {row.name for row, _ in INEXPRESSIBLE if isinstance(row, Algorithm)}
    assert {row.name for row in (*ROWS, GRPO_MEAN_ONLY)} <= expressed | refused
    expressed = {row.name for row, _, _ in PREFERENCE_ROWS}
    refused = {row.name for row, _ in INEXPRESSIBLE if not isinstance(row, Algorithm)}
    assert {row.name for row in preferences.ROWS} <= expressed | refused


# --- what TRL has not -----------------------------------------------------------------------------

INEXPRESSIBLE: list[tuple[Any, list[str]]] = [
    (REINFORCE, ["no trainer takes the mean of the batch", 'surrogate="reinforce": GRPOTrainer']),
    (SCST, ["no trainer takes the greedy answer", 'surrogate="reinforce"']),
    (PPO, [r"no trainer with a critic \(PPOTrainer was removed in 1.13\)", 'kl="reward"']),
    (VAPO, ["no trainer with a critic", "nll_coef: its losses have no likelihood term"]),
    (
        DCPO,
        [
            "no trainer remembers the rewards of earlier visits to a prompt",
            "its clip range is the same for all tokens",
            'aggregation="only_token_mean": .* "sequence_mean" is the same divided by their number',
        ],
    ),
    (BNPO, [r'no trainer normalises by a Beta density \(its loss_type="bnpo" is a token mean']),
    (
        DAPO,
        [r"it samples once per step; dataclasses.replace\(row, dynamic_sampling=False\) can be"],
    ),
    (replace(RLOO, dynamic_sampling=True), ["dynamic_sampling: it samples once per step"]),
    (replace(GRPO, kl_estimator="k2"), ['kl_estimator="k2": GRPOTrainer has k3']),
    (
        replace(GRPO, kl="reward", kl_estimator="k1"),
        ['kl="reward": GRPOTrainer has its KL term in the loss; RLOOTrainer has it'],
    ),
    (
        replace(GRPO, surrogate="reinforce"),
        ['surrogate="clip" has the same gradient in the first update of a batch'],
    ),
    (
        replace(GRPO, ratio_level="sequence_sum"),
        ["only RLOOTrainer clips the ratio of a whole response"],
    ),
    (replace(CISPO, epsilon_low=0.5), ['epsilon_low: loss_type="cispo" has no lower end']),
    (
        replace(CISPO, aggregation="sequence_mean"),
        ['aggregation="sequence_mean": loss_type="cispo" has "token_mean"'],
    ),
    (replace(CISPO, ratio_level="sequence_sum"), ["GRPOTrainer takes the root of that ratio"]),
    (
        replace(SAPO, aggregation="token_mean"),
        ['aggregation="token_mean": loss_type="sapo" has "sequence_mean"'],
    ),
    (
        replace(VESPO, aggregation="constant"),
        ['aggregation="constant": loss_type="vespo" has "token_mean"'],
    ),
    (
        replace(VESPO, kl="loss", beta=0.1, kl_importance_weighted=True),
        ['kl_importance_weighted with ratio_level="sequence_sum"'],
    ),
    (
        replace(GSPO_TOKEN, kl="loss", beta=0.1, kl_importance_weighted=True),
        ['kl_importance_weighted with ratio_level="sequence_token"'],
    ),
    (replace(GRPO, nll_coef=0.1), ["nll_coef: its losses have no likelihood term"]),
    (
        replace(RLOO, aggregation="token_mean"),
        ["RLOOTrainer has surrogate=.* got 'reinforce', 'token', 'token_mean'"],
    ),
    (replace(RLOO, surrogate="clip"), ["got 'clip', 'token', 'sequence_sum'"]),
    (replace(RLOO_CLIPPED, ratio_max=2.0), ["ratio_max: RLOOTrainer has no such cap"]),
    (replace(RLOO, kl="loss"), ['kl="loss": RLOOTrainer has its KL term in the reward']),
    (replace(RLOO, entropy_coef=0.1), ["entropy_coef: RLOOTrainer has no entropy term"]),
    (
        CDPO,
        [
            'cDPO was removed in 0.29, and since then loss_type "sigmoid" ignores '
            'label_smoothing without a word; smoothing="robust" can be expressed'
        ],
    ),
    (
        IPO,
        ['its "ipo" averages the log-ratio over the tokens; score="log_ratio_mean" can be'],
    ),
    (
        replace(HINGE, label_smoothing=0.1, smoothing="robust"),
        ["no loss_type has score='log_ratio_sum', link='hinge' and label_smoothing=0.1"],
    ),
    (
        replace(DPO, score="log_ratio_mean", link="hinge"),
        ["no loss_type has score='log_ratio_mean', link='hinge' and label_smoothing=0"],
    ),
    (replace(DPO, gamma=0.5), ["gamma: DPOTrainer has no margin"]),
    (replace(DPO, nll_coef=0.5), ["nll_coef: the likelihood term of DPOTrainer"]),
    (replace(SIMPO, link="hinge"), ["link='hinge': CPOTrainer has this score with the sigmoid"]),
    (replace(SIMPO, label_smoothing=0.1), ["CPOTrainer turns the margin round too"]),
    (replace(SIMPO, weight=2.0), ["weight: CPOTrainer has none"]),
    (replace(SIMPO, nll_coef=1.0), ["nll_coef: the likelihood term of CPOTrainer"]),
    (replace(ORPO, nll_coef=0.5), ["nll_coef=0.5: ORPOTrainer has 1.0"]),
    (replace(ORPO, beta=2.0), ["beta=2.0: ORPOTrainer has 1.0"]),
    (replace(ORPO, gamma=0.1), ["gamma=0.1: ORPOTrainer has 0.0"]),
]


@pytest.mark.parametrize(
    ("row", "reasons"), INEXPRESSIBLE, ids=lambda value: getattr(value, "name", "")
)
def test_what_trl_cannot_express_says_why(row: Any, reasons: list[str]) -> None:
    """Every reason is named, not the first alone; no TRL is needed to know."""
    text = f"^{row.name} cannot be expressed in TRL: .*"
    for reason in reasons:
        with pytest.raises(ValueError, match=text + reason):
            to_trl(row)


def test_what_is_no_row() -> None:
    with pytest.raises(ValueError, match=r"^method must be a row of .* got 'grpo' \(str\)"):
        to_trl("grpo")
    for wrong in (torch.ones(2, 2), 10**400, [GRPO] * 99):
        with pytest.raises(ValueError, match=r"^method must be a row of .* got") as caught:
            to_trl(wrong)
        assert len(str(caught.value)) < 300


def test_without_trl_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match=r"to_trl needs TRL, .*: pip install '\.\[trl\]'"):
        to_trl(GRPO)
    with pytest.raises(ValueError, match="dcpo cannot be expressed"):  # known without it
        to_trl(DCPO)


def test_a_broken_trl_is_not_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that fails inside TRL keeps its own message."""

    def broken(name: str) -> None:
        raise ModuleNotFoundError("No module named 'accelerate'", name="accelerate")

    monkeypatch.setattr("rlcore.trl_export.import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="accelerate"):
        to_trl(GRPO)


def test_it_is_reached_from_the_package() -> None:
    assert rlcore.to_trl is to_trl
    assert "to_trl" in rlcore.__all__
    with pytest.raises(AttributeError, match="module 'rlcore' has no attribute 'to_verl'"):
        _ = rlcore.to_verl


# --- overrides ----------------------------------------------------------------------------------


@needs_trl
def test_what_a_row_leaves_open_can_be_set(tmp_path: Path) -> None:
    config, said = export(
        GRPO,
        tmp_path,
        num_generations=4,
        num_iterations=3,
        temperature=0.7,
        max_completion_length=99,
        learning_rate=1e-5,
    )
    assert (config.num_generations, config.num_iterations, config.temperature) == (4, 3, 0.7)
    assert (config.max_completion_length, config.learning_rate) == (99, 1e-5)
    assert config.beta == 0.04
    assert len(said) == 1
    assert f"multiplied by {math.sqrt(3 / 4):.6g} = sqrt((G - 1)/G) for G = 4" in said[0]


@needs_trl
@pytest.mark.parametrize(
    ("row", "overrides", "message"),
    [
        (GRPO, {"beta": 0.1}, r"beta is the row's \(0.04\): change the row with .*; got 0.1"),
        (CISPO, {"epsilon_high": 0.28}, r"epsilon_high is the row's \(5.0\)"),
        (DPO, {"loss_type": "ipo"}, r"loss_type is the row's \(\['sigmoid'\]\)"),
        (GRPO, {"epsilon_hi": 0.28}, r"GRPOConfig of this TRL \(1\..*\) has no field 'epsilon_hi'"),
        (DPO, {"num_generations": 8}, "DPOConfig of this TRL .* has no field 'num_generations'"),
        (GRPO, {"num_generations": "8"}, "num_generations must be an integer >= 1; got '8'"),
        *(
            (row, {"num_generations": wrong}, "num_generations must be an integer >= 1; got")
            for row in (BNPO_TRL, GDPO, RLOO_CLIPPED, DR_GRPO)
            for wrong in ("8", None, 2.5, 0, True)
        ),
        (DPO, {"beta": torch.ones(2, 2)}, "beta is the row's .*; got a tensor of shape"),
        (
            BNPO_TRL,
            {"temperature": "1", "steps_per_generation": "2"},
            "GRPOConfig of this TRL .* does not take .*steps_per_generation='2', temperature='1': ",
        ),
        (GRPO, {"num_generations": 1}, "GRPO requires at least 2 generations per prompt"),
    ],
)
def test_bad_overrides(row: Any, overrides: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        export(row, tmp_path, **overrides)


@needs_trl
def test_no_warning_where_an_error_comes(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrlDifference)
        with pytest.raises(ValueError, match="beta is the row's"):
            to_trl(GRPO, beta=0.1, output_dir=str(tmp_path))


# --- differences that are a factor, or elsewhere --------------------------------------------------


@needs_trl
@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (DR_GRPO, []),
        (GRPO_MEAN_ONLY, []),
        (BNPO_TRL, []),
        (RLOO_CLIPPED, []),
        (replace(GDPO, eps=1e-4), []),
        (DPO, []),
        (SIMPO, []),
        (KTO, []),
        (REWARD_MODEL, []),
        (GRPO, [f"{ADVANTAGES} (its KL term is not)"]),
        (GSPO, [ADVANTAGES]),
        (GSPO_TOKEN, [ADVANTAGES]),
        (CISPO, [ADVANTAGES]),
        (SAPO, [ADVANTAGES]),
        (LUSPO, [ADVANTAGES]),
        (VESPO, [ADVANTAGES]),
        (
            DAPO_ONCE,
            [
                ADVANTAGES,
                "overlong penalty: not a field; add trl.rewards.get_soft_overlong_punishment("
                "max_completion_length, soft_punish_cache) to reward_funcs, with soft_punish_cache "
                "= 0.2 * max_completion_length; TRL sums the rewards, as the row does",
            ],
        ),
        (
            replace(BNPO_TRL, ddof=0),
            [
                "advantages: TRL divides by the sample std of its group + 0.0001, the row by the "
                "population std + 0.0001: TRL's are the row's multiplied by (k s + 0.0001) / "
                "(s + 0.0001) with k = 0.935414 = sqrt((G - 1)/G) for G = 8, s the sample std"
            ],
        ),
        (
            replace(BNPO_TRL, eps=1e-6),
            [
                "advantages: TRL divides by the sample std of its group + 0.0001, the row by the "
                "sample std + 1e-06: TRL's are the row's multiplied by (s + 1e-06) / (s + 0.0001), "
                "s the sample std"
            ],
        ),
        (
            replace(SAPO, advantage="batch_zscore"),
            [
                "advantages: TRL divides by the sample std of the batch + 0.0001, the row by the "
                "population std + 0: TRL's are the row's multiplied by sqrt((N - 1)/N), N the "
                "rewards of the generation batch, and by s / (s + 0.0001), s the sample std"
            ],
        ),
        (
            GDPO,
            [
                "advantages: TRL divides each reward by its group's sample std + 0.0001, and their "
                "sum by the batch's sample std + 0.0001; the row by the sample std + 0 and the "
                "sample std + 0.0001"
            ],
        ),
        (
            RLOO,
            [
                "ratio: TRL multiplies by the ratio of the whole response and clips it to "
                "[0.8, 1.2], the row has neither: the same gradient while num_iterations=1 and "
                "steps_per_generation = gradient_accumulation_steps, when that ratio is 1; the "
                "value of the loss differs"
            ],
        ),
        (
            replace(DR_GRPO, overlong="filter", entropy_coef=0.1),
            [
                "truncated responses: TRL leaves them out of the loss and still divides by all "
                "responses: the row's loss multiplied by the share of responses that are left",
                "entropy: TRL takes its mean over each micro-batch, the row over the tokens of the "
                "step: alike with one micro-batch per step",
            ],
        ),
        (
            ORPO,
            ["likelihood: TRL's covers the prompt too, the row's the chosen response alone"],
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_differences_are_named(row: Any, wanted: list[str], tmp_path: Path) -> None:
    _, said = export(row, tmp_path)
    assert said == [f"{row.name}: {difference}" for difference in wanted]


REWARDS = torch.tensor([1, 0, 0.5, 0, 1, 1, 0, 1], dtype=torch.float64)


@needs_trl
@pytest.mark.parametrize(
    ("row", "factor"),
    [
        (GRPO, lambda s, k: k * s / (s + 1e-4)),
        (replace(BNPO_TRL, ddof=0), lambda s, k: (k * s + 1e-4) / (s + 1e-4)),
        (replace(BNPO_TRL, eps=1e-6), lambda s, k: (s + 1e-6) / (s + 1e-4)),
        (replace(SAPO, advantage="batch_zscore"), lambda s, k: k * s / (s + 1e-4)),
        (BNPO_TRL, lambda s, k: 1.0),
        (DR_GRPO, lambda s, k: 1.0),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_factor_is_exact(row: Algorithm, factor: Any, tmp_path: Path, in_float64) -> None:
    """TRL's advantages, by its own code from this config, are ours times what the warning says."""
    config, _ = export(row, tmp_path, num_generations=4)
    theirs = trl.grpo_advantages(config, REWARDS[:, None], 4, torch.ones(1))
    ours = compute_advantages(row, REWARDS, torch.arange(8) // 4).advantages
    if row.advantage == "batch_zscore":
        s, k = REWARDS.std().expand(8), math.sqrt(7 / 8)
    else:
        s, k = REWARDS.view(2, 4).std(dim=1).repeat_interleave(4), math.sqrt(3 / 4)
    torch.testing.assert_close(ours * factor(s, k), theirs, rtol=1e-12, atol=1e-15)


# --- the config drives TRL's code ---------------------------------------------------------------


class Step:
    """Random tensors of 8 responses to 2 prompts, 0 in padding as TRL has it."""

    def __init__(self, moved: float) -> None:
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        lengths = torch.tensor([4, 2, 3, 1, 3, 4, 2, 2])
        self.mask = torch.arange(4) < lengths[:, None]
        self.old = -normal(8, 4).abs() * self.mask
        self.new = (self.old + moved * normal(8, 4) * self.mask).requires_grad_()
        self.ref = (self.old + 0.2 * normal(8, 4)) * self.mask
        self.entropies = (normal(8, 4).abs() * self.mask).requires_grad_()
        self.several = torch.stack([REWARDS, normal(8)], dim=1)
        self.truncated = torch.arange(8) % 4 == 1

    def gradients(self, loss: Tensor) -> list[Tensor]:
        leaves = (self.new, self.entropies)
        found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
        return [torch.zeros(8, 4) if one is None else one for one in found]


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


DRIVEN = [row for row, _ in GRPO_ROWS] + [
    replace(GRPO, name="grpo-filter", overlong="filter", kl="none", beta=0.0),
    replace(SAPO, name="sapo-kl", kl="loss", beta=0.1, kl_importance_weighted=True),
]


@needs_trl
@pytest.mark.parametrize("moved", [0.0, 0.3])
@pytest.mark.parametrize("row", DRIVEN, ids=lambda row: row.name)
def test_a_grpo_config_drives_trl_to_our_number(
    row: Algorithm, moved: float, tmp_path: Path, in_float64
) -> None:
    """TRL's advantages and loss from the config; our loss of the row on the same advantages."""
    step = Step(moved)
    config, _ = export(row, tmp_path, num_generations=4, max_completion_length=6)
    rewards = step.several if row.reward == "several" else REWARDS[:, None]
    advantages = trl.grpo_advantages(config, rewards, 4, torch.ones(rewards.shape[1]))
    mask = step.mask
    if config.mask_truncated_completions:
        mask = trl.mask_of_truncated(step.mask, step.truncated)
    theirs, _ = trl.grpo_loss(
        config,
        step.new,
        mask.double(),
        advantages,
        old=step.old,
        ref=step.ref,
        entropies=step.entropies,
    )
    ours, _ = compute_loss(
        row,
        step.new,
        step.old,
        advantages,
        step.mask,
        ref_logprobs=step.ref,
        entropies=step.entropies,
        constant=config.max_completion_length,
        truncated=step.truncated,
    )
    if row.overlong == "filter" and row.aggregation == "sequence_mean":
        ours = ours * 6 / 8  # the share of responses that are left, as the warning says
    same(ours, theirs)
    for one, other in zip(step.gradients(ours), step.gradients(theirs), strict=True):
        same(one, other)
    assert step.gradients(theirs)[0].abs().sum() > 0


@needs_trl
@pytest.mark.parametrize(("row", "moved"), [(RLOO, 0.0), (RLOO_CLIPPED, 0.0), (RLOO_CLIPPED, 0.1)])
def test_a_rloo_config_drives_trl_to_our_number(
    row: Algorithm, moved: float, tmp_path: Path, in_float64
) -> None:
    """Advantages with the KL in the reward; the row without a ratio has TRL's gradient at ratio 1,
    the row with TRL's clip has its value too, also away from it."""
    step = Step(moved)
    config, _ = export(row, tmp_path, num_generations=4)
    advantages = trl.rloo_advantages(
        config, REWARDS[:, None], 4, torch.ones(1), step.old, step.ref, step.mask.double()
    )
    mine = compute_advantages(
        row,
        REWARDS,
        torch.arange(8) // 4,
        old_logprobs=step.old,
        ref_logprobs=step.ref,
        response_mask=step.mask,
    ).advantages
    same(mine, advantages)
    theirs, _ = trl.rloo_loss(config, step.new, step.mask.double(), advantages, step.old)
    ours, _ = compute_loss(row, step.new, step.old, advantages, step.mask)
    same(step.gradients(ours)[0], step.gradients(theirs)[0])
    assert torch.isclose(ours, theirs) == (row is RLOO_CLIPPED)


@needs_trl
def test_the_row_rloo_parts_from_trl_once_the_policy_has_moved(tmp_path: Path, in_float64) -> None:
    """The warning is not idle."""
    step = Step(0.3)
    config, _ = export(RLOO, tmp_path)
    theirs, _ = trl.rloo_loss(config, step.new, step.mask.double(), REWARDS - 0.5, step.old)
    ours, _ = compute_loss(RLOO, step.new, step.old, REWARDS - 0.5, step.mask)
    assert not torch.allclose(step.gradients(ours)[0], step.gradients(theirs)[0], atol=1e-3)


def pairs() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Masks, log-probs and reference log-probs of two sides of three pairs."""
    generator = torch.Generator().manual_seed(3)
    masks, policy, reference = [], [], []
    for slots, lengths in ((5, [5, 2, 3]), (4, [1, 4, 2])):
        mask = torch.arange(slots) < torch.tensor(lengths)[:, None]
        masks.append(mask)
        for sides in (policy, reference):
            drawn = torch.randn(3, slots, generator=generator, dtype=torch.float64)
            sides.append(-drawn.abs() * mask)
        policy[-1].requires_grad_()
    return masks, policy, reference


@needs_trl
@pytest.mark.parametrize(
    "row",
    [DPO, replace(DPO, weight=0.5), ROBUST_DPO, HINGE, IPO_AVERAGED, DPO_NORM],
    ids=lambda row: row.name,
)
def test_a_dpo_config_drives_trl_to_our_number(
    row: PreferenceMethod, tmp_path: Path, in_float64
) -> None:
    masks, policy, reference = pairs()
    config, _ = export(row, tmp_path)
    theirs, _ = trl.dpo_loss(config, *policy, *[mask.double() for mask in masks], *reference)
    ours, _ = compute_preference_loss(
        row, *policy, *masks, ref_chosen_logprobs=reference[0], ref_rejected_logprobs=reference[1]
    )
    same(ours, theirs)
    for one, other in zip(
        *(torch.autograd.grad(loss, policy) for loss in (ours, theirs)), strict=True
    ):
        same(one, other)


@needs_trl
@pytest.mark.parametrize("row", [SIMPO, ORPO], ids=lambda row: row.name)
def test_a_config_without_a_reference_drives_trl_to_our_number(
    row: PreferenceMethod, tmp_path: Path, in_float64
) -> None:
    """From logits on, behind a prompt of one token, of which TRL's ORPO learns nothing."""
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, 7, (3, slots), generator=generator) for slots in (6, 5)]
    ends = (torch.tensor([6, 3, 4]), torch.tensor([2, 5, 3]))
    masks = [
        (torch.arange(each.shape[1]) >= 1) & (torch.arange(each.shape[1]) < end[:, None])
        for each, end in zip(ids, ends, strict=True)
    ]
    logits = torch.randn(6, 6, 7, generator=generator).requires_grad_()
    config, _ = export(row, tmp_path)
    drive = trl.simpo_loss if row is SIMPO else trl.orpo_loss
    theirs, _ = drive(config, logits, *ids, *masks, prompt=1)
    logprobs = [
        token_logprobs(side[:, : each.shape[1]], each)
        for side, each in zip((logits[:3], logits[3:]), ids, strict=True)
    ]
    ours, _ = compute_preference_loss(row, *logprobs, *[mask[:, 1:] for mask in masks])
    tolerance = 1e-12 if row is SIMPO else 1e-6  # ORPO's odds are float32 in TRL
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=0, atol=tolerance)


@needs_trl
def test_a_kto_config_drives_trl_to_our_number(tmp_path: Path, in_float64) -> None:
    row = replace(KTO, weight_desirable=1.2, weight_undesirable=0.8)
    masks, policy, reference = pairs()
    desirable = torch.tensor([True, False, True])
    config, _ = export(row, tmp_path)
    theirs, _ = trl.kto_loss(
        config, policy[0], masks[0], reference[0], desirable, policy[1], reference[1], masks[1]
    )
    mismatched = (policy[1] - reference[1]).sum(dim=1).detach()
    ours, _ = compute_unpaired_loss(
        row, policy[0], reference[0], masks[0], desirable, mismatched_log_ratios=mismatched
    )
    same(ours, theirs)
    same(torch.autograd.grad(ours, policy[0])[0], torch.autograd.grad(theirs, policy[0])[0])


@needs_trl
@pytest.mark.parametrize("center", [0.0, 0.01])
def test_a_reward_config_drives_trl_to_our_number(
    center: float, tmp_path: Path, in_float64
) -> None:
    row = replace(REWARD_MODEL, center_coef=center)
    chosen = torch.tensor([1.2, -0.3]).requires_grad_()
    rejected, margin = torch.tensor([0.4, 0.1]), torch.tensor([0.5, 0.0])
    config, _ = export(row, tmp_path)
    theirs, _ = trl.reward_loss(config, chosen, rejected, margin)
    ours, _ = compute_reward_model_loss(row, chosen, rejected, margin=margin)
    same(ours, theirs)
    same(torch.autograd.grad(ours, chosen)[0], torch.autograd.grad(theirs, chosen)[0])


@needs_trl
def test_trl_has_no_ppo_trainer() -> None:
    """What the message says: not in this TRL, neither stable nor experimental."""
    import trl as installed

    assert not hasattr(installed, "PPOTrainer")
    assert importlib.util.find_spec("trl.experimental.ppo") is None
