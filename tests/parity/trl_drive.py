"""TRL's own code, driven on tensors instead of models.

Every function here calls a method of an installed TRL trainer, unbound, on a stand-in that has the
attributes which the method reads; the loss, and with it the gradient, is TRL's.  A trainer cannot
be made without a model, a tokenizer and a data set, and needs none of them for its arithmetic.
Where the arithmetic is a stretch of a long method (the advantages), that stretch is found in the
installed source by what it assigns, compiled and run: nothing of TRL is copied here.

Written for TRL 1.16.  trl is imported inside the functions: this file can be imported without it.
"""

import ast
import contextlib
import copy
import importlib
import inspect
import tempfile
import textwrap
import warnings
from collections import defaultdict
from functools import cache
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Metrics = dict[str, float]

TRAINERS = {
    "grpo": "trl.trainer.grpo_trainer",
    "rloo": "trl.trainer.rloo_trainer",
    "dpo": "trl.trainer.dpo_trainer",
    "kto": "trl.trainer.kto_trainer",
    "sft": "trl.trainer.sft_trainer",
    "reward": "trl.trainer.reward_trainer",
    "cpo": "trl.experimental.cpo.cpo_trainer",
    "orpo": "trl.experimental.orpo.orpo_trainer",
    "utils": "trl.trainer.utils",
    "rewards": "trl.rewards",
}


def trl_module(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(TRAINERS[name])


class OneProcess:
    """What a trainer asks of its accelerator, when there is one process."""

    num_processes = 1
    process_index = 0
    device = torch.device("cpu")
    sync_gradients = True
    parallelism_config = None

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        return tensor

    def autocast(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()


class Trainer(SimpleNamespace):
    """The attributes that every trainer has; `mode` of the metrics is "train"."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(
            accelerator=OneProcess(),
            model=SimpleNamespace(training=True),
            aux_loss_enabled=False,
            current_gradient_accumulation_steps=1,
            _metrics={"train": defaultdict(list)},
            _total_train_tokens=0,
            _tp_size=1,
        )
        self.__dict__.update(attributes)

    def metrics(self) -> Metrics:
        return {name: values[-1] for name, values in self._metrics["train"].items() if values}


@cache
def _defaults(name: str) -> Any:
    module = trl_module(name)
    config = getattr(module, f"{name.upper()}Config", None) or module.RewardConfig
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        return config(output_dir=folder, use_cpu=True, bf16=False, report_to="none")


def settings(name: str, **changes: Any) -> Any:
    """TRL's config of a trainer with its own defaults, and these changes."""
    config = copy.copy(_defaults(name))
    for field, value in changes.items():
        if not hasattr(config, field):
            raise AttributeError(f"TRL's {type(config).__name__} has no field {field!r}")
        setattr(config, field, value)
    return config


# --- GRPO and RLOO ------------------------------------------------------------------------------


def _ids(mask: Tensor) -> dict[str, Tensor]:
    """Token ids that no loss looks at: the log-probs are given."""
    prompt = torch.ones(len(mask), 1, dtype=torch.int64)
    return {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.ones(mask.shape, dtype=torch.int64),
    }


def grpo_loss(
    config: Any,
    logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    old: Tensor | None = None,
    ref: Tensor | None = None,
    entropies: Tensor | None = None,
    tool_mask: Tensor | None = None,
    step_tokens: int | None = None,
    accumulation: int = 1,
) -> tuple[Tensor, Metrics]:
    """GRPOTrainer._compute_loss on one micro-batch.

    step_tokens: the active tokens of the whole step, when it is split into `accumulation` parts.
    """
    trainer = trl_module("grpo").GRPOTrainer
    config = copy.copy(config)
    config.steps_per_generation = accumulation
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    if entropies is None:
        entropies = torch.zeros_like(logprobs)
    stub = Trainer(
        args=config,
        loss_type=config.loss_type,
        beta=config.beta,
        epsilon_low=config.epsilon,
        epsilon_high=high,
        importance_sampling_level=config.importance_sampling_level,
        max_completion_length=config.max_completion_length,
        current_gradient_accumulation_steps=accumulation,
        top_entropy_quantile=config.top_entropy_quantile,
        off_policy_mask_threshold=config.off_policy_mask_threshold,
        entropy_coef=config.entropy_coef,
        use_adaptive_entropy=config.use_adaptive_entropy,
        _entropy_bonus_enabled=config.entropy_coef != 0.0,
        use_vllm=False,
        get_gamma_weights=trainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
    )
    inputs = _ids(mask) | {"completion_mask": mask, "advantages": advantages}
    if tool_mask is not None:
        inputs["tool_mask"] = tool_mask
    active = mask if tool_mask is None else mask * tool_mask
    tokens = active.sum() if step_tokens is None else torch.tensor(step_tokens)
    inputs["num_items_in_batch"] = tokens.to(logprobs.dtype)
    if old is not None:
        inputs["old_per_token_logps"] = old
    if ref is not None:
        inputs["ref_per_token_logps"] = ref
    return trainer._compute_loss(stub, None, inputs), stub.metrics()


def rloo_loss(
    config: Any, logprobs: Tensor, mask: Tensor, advantages: Tensor, old: Tensor
) -> tuple[Tensor, Metrics]:
    """RLOOTrainer._compute_loss on one batch."""
    stub = Trainer(
        args=config,
        epsilon_low=config.epsilon,
        epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
    )
    inputs = _ids(mask) | {
        "completion_mask": mask,
        "advantages": advantages,
        "old_logps": (old * mask).sum(dim=1),
    }
    loss = trl_module("rloo").RLOOTrainer._compute_loss(stub, None, inputs)
    return loss, stub.metrics()


def _assigns(statement: ast.stmt, name: str) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


@cache
def _stretch(trainer: str, kind: str) -> CodeType:
    """A stretch of _generate_and_score_completions, compiled.

    "advantages": from the first statement that assigns `unscorable_mask` to the first top-level one
    after it that assigns `advantages`; "truncated": the `if self.mask_truncated_completions`.
    """
    module = trl_module(trainer)
    method = getattr(module, f"{trainer.upper()}Trainer")._generate_and_score_completions
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(method)))
    body = ast.parse(source).body[0].body
    if kind == "advantages":
        first = next(i for i, line in enumerate(body) if _assigns(line, "unscorable_mask"))
        last = next(i for i in range(first, len(body)) if _assigns(body[i], "advantages"))
        lines = body[first : last + 1]
    else:
        lines = [
            line
            for line in body
            if isinstance(line, ast.If)
            and ast.unparse(line.test) == "self.mask_truncated_completions"
        ]
        if len(lines) != 1:
            raise LookupError(f"{module.__file__} no longer masks truncated completions in one if")
    return compile(ast.Module(lines, []), module.__file__, "exec")


def grpo_advantages(config: Any, rewards: Tensor, group_size: int, weights: Tensor) -> Tensor:
    """rewards (B, n), one column per reward function (NaN: it gave none) -> advantages (B,)."""
    names = dict(vars(trl_module("grpo")))
    names |= {
        "self": Trainer(
            multi_objective_aggregation=config.multi_objective_aggregation,
            scale_rewards=config.scale_rewards,
            reward_weights=weights,
            reward_funcs=[None] * rewards.shape[1],
        ),
        "rewards_per_func": rewards.clone(),
        "num_generations": group_size,
        "device": rewards.device,
    }
    exec(_stretch("grpo", "advantages"), names)
    return names["advantages"]


def rloo_advantages(
    config: Any,
    rewards: Tensor,
    group_size: int,
    weights: Tensor,
    old: Tensor,
    ref: Tensor,
    mask: Tensor,
) -> Tensor:
    """rewards (B, n) -> advantages (B,), with TRL's KL term in the reward."""
    names = dict(vars(trl_module("rloo")))
    names |= {
        "self": Trainer(
            beta=config.beta,
            normalize_advantages=config.normalize_advantages,
            reward_clip_range=config.reward_clip_range,
            reward_weights=weights,
        ),
        "rewards_per_func": rewards.clone(),
        "num_generations": group_size,
        "device": rewards.device,
        "gather": lambda tensor: tensor,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "completion_mask": mask,
    }
    exec(_stretch("rloo", "advantages"), names)
    return names["advantages"]


def mask_of_truncated(mask: Tensor, truncated: Tensor) -> Tensor:
    """GRPO's completion mask after mask_truncated_completions; `truncated` (B,): cut short."""
    token, eos, pad = 5, 1, 0
    names = {
        "torch": torch,
        "self": SimpleNamespace(
            mask_truncated_completions=True,
            eos_token_ids=[eos],
            _tokenizer=SimpleNamespace(pad_token_id=pad),
        ),
        "completion_ids_list": [[token, token if cut else eos] for cut in truncated.tolist()],
        "completion_mask": mask.long(),
        "tool_mask": None,
        "device": mask.device,
    }
    exec(_stretch("grpo", "truncated"), names)
    return names["completion_mask"]


# --- models that return what they are given -------------------------------------------------------


def _outputs(log_probs: Tensor, label_mask: Tensor | None = None) -> SimpleNamespace:
    """What a model with TRL's fused head returns: log-probs of the labels (0 where there is none),
    and the figures that only TRL's logs use."""
    nothing = torch.zeros_like(log_probs).detach()
    return SimpleNamespace(
        log_probs=log_probs,
        entropy=nothing,
        mean_logits=nothing,
        is_top1=nothing.bool(),
        label_mask=label_mask,
    )


def _behind_prompt(tokens: Tensor, prompt: int, width: int) -> Tensor:
    """(B, T) per response token -> (B, prompt + width), 0 in the prompt and behind the response."""
    return torch.nn.functional.pad(tokens, (prompt, width - tokens.shape[1]))


# --- preferences --------------------------------------------------------------------------------


def dpo_loss(
    config: Any,
    chosen: Tensor,
    rejected: Tensor,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    prompt: int = 1,
) -> tuple[Tensor, Metrics]:
    """DPOTrainer._compute_loss.  Log-probs (B, T) of chosen and (B, S) of rejected answers, 0 in
    padding; `prompt` tokens stand before each."""
    width = max(chosen.shape[1], rejected.shape[1])
    both = torch.cat(
        [
            _behind_prompt(tokens * mask, prompt - 1, width)
            for tokens, mask in ((chosen, chosen_mask), (rejected, rejected_mask))
        ]
    )  # log-probs of the tokens after the first; a model gives none in padding
    masks = torch.cat(
        [_behind_prompt(mask.long(), prompt, width) for mask in (chosen_mask, rejected_mask)]
    )
    stub = Trainer(
        args=config,
        ld_alpha=config.ld_alpha,
        precompute_ref_logps=True,
        f_divergence_type=config.f_divergence_type,
        loss_types=config.loss_type if isinstance(config.loss_type, list) else [config.loss_type],
        loss_weights=config.loss_weights or [1.0],
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        use_weighting=config.use_weighting,
    )
    inputs = {
        "input_ids": torch.ones_like(masks),
        "attention_mask": torch.ones_like(masks),
        "completion_mask": masks,
        "ref_chosen_logps": (ref_chosen * chosen_mask).sum(dim=1),
        "ref_rejected_logps": (ref_rejected * rejected_mask).sum(dim=1),
    }
    loss = trl_module("dpo").DPOTrainer._compute_loss(
        stub, lambda **_: _outputs(both), inputs, return_outputs=False
    )
    return loss, stub.metrics()


def _pair_of_logits(
    name: str,
    stub: Trainer,
    logits: Tensor,
    chosen_ids: Tensor,
    rejected_ids: Tensor,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    prompt: int,
) -> tuple[Tensor, Metrics]:
    """CPO's and ORPO's get_batch_loss_metrics on logits (2B, L, V): chosen, then rejected."""
    trainer = getattr(trl_module(name), f"{name.upper()}Trainer")
    for method in ("concatenated_forward", f"{'cpo' if name == 'cpo' else 'odds_ratio'}_loss"):
        setattr(stub, method, getattr(trainer, method).__get__(stub))
    for method in ("concatenated_inputs", "get_batch_logps"):
        setattr(stub, method, getattr(trainer, method))
    batch: dict[str, Tensor] = {}
    for side, ids, mask in (
        ("chosen", chosen_ids, chosen_mask),
        ("rejected", rejected_ids, rejected_mask),
    ):
        here = mask.bool()
        batch[f"{side}_input_ids"] = ids
        batch[f"{side}_attention_mask"] = torch.cat(
            [torch.ones(len(ids), prompt, dtype=torch.bool), here[:, prompt:]], dim=1
        ).long()
        batch[f"{side}_labels"] = torch.where(here, ids, -100)

    def model(input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=logits[:, : input_ids.shape[1]])

    return trainer.get_batch_loss_metrics(stub, model, batch, "train")


def simpo_loss(config: Any, *tensors: Tensor, prompt: int) -> tuple[Tensor, Metrics]:
    """CPOTrainer with loss_type="simpo"; tensors and prompt as _pair_of_logits."""
    stub = Trainer(
        args=config,
        loss_type=config.loss_type,
        beta=config.beta,
        simpo_gamma=config.simpo_gamma,
        label_smoothing=config.label_smoothing,
        cpo_alpha=config.cpo_alpha,
        alpha=config.alpha,
        is_encoder_decoder=False,
        pad_token_id=0,
    )
    return _pair_of_logits("cpo", stub, *tensors, prompt)


def orpo_loss(config: Any, *tensors: Tensor, prompt: int) -> tuple[Tensor, Metrics]:
    """ORPOTrainer; tensors and prompt as _pair_of_logits.  Its likelihood is also the prompt's."""
    stub = Trainer(args=config, beta=config.beta, is_encoder_decoder=False, padding_value=0)
    return _pair_of_logits("orpo", stub, *tensors, prompt)


def kto_loss(
    config: Any,
    logprobs: Tensor,
    mask: Tensor,
    ref: Tensor,
    desirable: Tensor,
    mismatched: Tensor,
    ref_mismatched: Tensor,
    mismatched_mask: Tensor,
    *,
    prompt: int = 1,
) -> tuple[Tensor, Metrics]:
    """KTOTrainer._compute_loss; log-probs (B, T) of answers and (B, S) of mismatched ones."""
    trainer = trl_module("kto").KTOTrainer
    stub = Trainer(
        args=config,
        loss_type=config.loss_type,
        calculate_KL=True,
        precompute_ref_logps=True,
        beta=config.beta,
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
    )
    stub._compute_kl_logps = trainer._compute_kl_logps.__get__(stub)
    masks = _behind_prompt(mask.long(), prompt, mask.shape[1])
    kl_masks = _behind_prompt(mismatched_mask.long(), prompt, mismatched_mask.shape[1])
    own, other = 1, 2  # token ids that tell the model which answers it reads
    batch = {
        "input_ids": torch.full_like(masks, own),
        "attention_mask": masks,
        "completion_mask": masks,
        "KL_input_ids": torch.full_like(kl_masks, other),
        "KL_attention_mask": kl_masks,
        "KL_completion_mask": kl_masks,
        "label": desirable,
        "ref_logps": (ref * mask).sum(dim=1),
        "ref_KL_logps": (ref_mismatched * mismatched_mask).sum(dim=1),
    }

    def model(input_ids: Tensor, **_: Any) -> SimpleNamespace:
        answers = logprobs * mask if input_ids[0, 0] == own else mismatched * mismatched_mask
        return _outputs(_behind_prompt(answers, prompt - 1, answers.shape[1]))

    loss = trainer._compute_loss(stub, model, batch, return_outputs=False)
    return loss, stub.metrics()


# --- reward model and supervised fine-tuning ------------------------------------------------------


def reward_loss(
    config: Any, chosen: Tensor, rejected: Tensor, margin: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """RewardTrainer.compute_loss on the rewards (B,) of chosen and rejected answers."""
    stub = Trainer(args=config)
    rewards = torch.cat([chosen, rejected])[:, None]
    inputs = {"attention_mask": torch.ones(len(rewards), 1)}
    if margin is not None:
        inputs["margin"] = margin
    loss = trl_module("reward").RewardTrainer.compute_loss(
        stub, lambda **_: SimpleNamespace(logits=rewards), inputs
    )
    return loss, stub.metrics()


def sft_loss(
    config: Any, logits: Tensor, labels: Tensor, step_tokens: int | None = None
) -> tuple[Tensor, Metrics]:
    """SFTTrainer.compute_loss on logits (B, L, V) and labels (B, L), -100 where there is none."""
    shifted = labels[:, 1:]
    known = shifted != -100
    logprobs = logprobs_of(logits[:, :-1], shifted.clamp(min=0)) * known
    stub = Trainer(
        args=config,
        compute_loss_func=None,
        label_smoother=None,
        get_tp_size=lambda: 1,
    )
    loss = trl_module("sft").SFTTrainer.compute_loss(
        stub,
        lambda **_: _outputs(logprobs, known),
        {"labels": labels, "attention_mask": torch.ones_like(labels)},
        num_items_in_batch=step_tokens,
    )
    return loss, stub.metrics()


# --- logits and lengths -------------------------------------------------------------------------


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return trl_module("utils").selective_log_softmax(logits, tokens)


def entropy_of(logits: Tensor) -> Tensor:
    return trl_module("utils").entropy_from_logits(logits)


def logprobs_and_entropies(
    model: Any, ids: Tensor, attention_mask: Tensor, response_slots: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """GRPOTrainer's own forward pass of a model of transformers: (B, response_slots) each."""
    trl_module("utils").add_fused_lm_head(
        model, temperature=temperature, outputs=("log_probs", "entropy")
    )
    method = trl_module("grpo").GRPOTrainer._get_per_token_logps_and_entropies
    logprobs, entropies, _ = inspect.unwrap(method)(
        Trainer(), model, ids, attention_mask, response_slots, compute_entropy=True
    )
    return logprobs, entropies


def overlong(lengths: list[int], max_length: int, cache_length: int) -> list[float]:
    punish = trl_module("rewards").get_soft_overlong_punishment(max_length, cache_length)
    return punish([[7] * length for length in lengths])
