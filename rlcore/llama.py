"""The layers of a Llama from its own weights, where that saves work: a prompt is read once.

Responses to one prompt share it. In a causal model what stands in the columns of the prompt does
not depend on the response, so its keys and values are computed once for all of them, and the last
layer of the prompt only at its end. Gradients pass through all of it: they are those of the model's
own forward pass over every whole row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlcore.blocks import feed_forward, rms_norm

STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # angles that do not depend on the length


def is_plain_llama(model: Any) -> bool:
    """Whether the layers computed here, and by `LlamaDecoder`, are those of the model.

    A `LlamaForCausalLM` in float32, of transformers' own layers throughout: no biases, no adapters,
    no hooks, nothing sharded, and rotary angles that do not depend on the length. (In other dtypes
    transformers computes parts of a layer in float32.)
    """
    from transformers.models.llama import modeling_llama as llama

    if type(model) is not llama.LlamaForCausalLM:
        return False
    known = (
        llama.LlamaForCausalLM,
        llama.LlamaModel,
        llama.LlamaDecoderLayer,
        llama.LlamaAttention,
        llama.LlamaMLP,
        llama.LlamaRMSNorm,
        llama.LlamaRotaryEmbedding,
        nn.Embedding,
        nn.Linear,
        nn.ModuleList,
        nn.SiLU,
        type(model.model.layers[0].mlp.act_fn),
    )
    for module in model.modules():
        hooks = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        biased = isinstance(module, nn.Linear) and module.bias is not None
        if type(module) not in known or hooks or biased:
            return False
    config: Any = model.config
    first = model.lm_head.weight
    return (
        config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in STATIC_ROPE
        and all(
            type(p) is nn.Parameter and (p.dtype, p.device) == (torch.float32, first.device)
            for p in model.parameters()
        )
        and not torch.is_autocast_enabled(first.device.type)
    )


def side_by_side(weight: Tensor, head_dim: int) -> Tensor:
    """A query or key weight in whose heads each rotated pair stands side by side.

    transformers pairs element i of a head with element i + D/2. The order within a head changes no
    product of a query with a key, and a rotation of neighbours is a product of complex numbers.
    """
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def angles(model: Any, length: int) -> Tensor:
    """(length, D/2), complex: by what the pairs of a head are multiplied at each position."""
    weight = model.lm_head.weight
    places = torch.arange(length, device=weight.device)[None]
    cos, sin = (part[0].chunk(2, -1)[0] for part in model.model.rotary_emb(weight, places))
    return torch.complex(cos.contiguous(), sin.contiguous())


def can_share(mask: Tensor, response_length: int) -> bool:
    """Whether every prompt ends with a real token, and every response is padded on the right."""
    start = mask[:, -response_length - 1 : -1]
    return bool(start[:, 0].all() & (mask[:, -response_length:] <= start).all())


def shared_prompt_logits(model: Any, ids: Tensor, mask: Tensor, response_length: int) -> Tensor:
    """Logits (B, T+1, V): T of them predict the T = `response_length` last columns of ids (B, P+T),
    those of the last column say nothing.

    The model must be one of `is_plain_llama` in evaluation mode, the mask one of `can_share`. Rows
    with one prompt that follow each other share it.
    """
    prompt_length = ids.shape[1] - response_length
    prompts, real = ids[:, :prompt_length], mask[:, :prompt_length].bool()
    new = (prompts[1:] != prompts[:-1]).any(1) | (real[1:] != real[:-1]).any(1)
    owner = F.pad(new.cumsum(0), (1, 0))  # (B,), the number of a row's prompt
    first = F.pad(new, (1, 0), value=True)
    prompts, real = prompts[first], real[first]
    padded = not bool(real.all())

    places = (real.cumsum(1) - 1).clamp(min=0)
    turns = angles(model, ids.shape[1])
    prompt_turns, seen = turns[:prompt_length], None
    # The last token of a response predicts nothing that is asked for.
    follow = torch.arange(response_length - 1, device=ids.device)
    response_turns = turns[prompt_length + follow]
    causal = (follow <= follow[:, None])[None]
    if padded:
        prompt_turns = turns[places]
        response_turns = turns[places[owner, -1:] + 1 + follow]
        # A padded slot sees itself: what it computes is never looked at, but must not be NaN.
        own = torch.eye(prompt_length, dtype=torch.bool, device=ids.device)
        seen = ((real[:, None] | own) & own.new_ones(own.shape).tril())[:, None]
        before = real[owner, None].expand(-1, response_length - 1, -1)
    else:
        before = causal.new_ones(1, response_length - 1, prompt_length)
    looked_at = torch.cat([before, causal.expand(len(before), -1, -1)], 2)[:, None]
    hidden_from = torch.zeros_like(looked_at, dtype=model.lm_head.weight.dtype)
    hidden_from.masked_fill_(~looked_at, -torch.inf)

    x = model.model.embed_tokens(prompts)  # the padding token gets no gradient
    y = model.model.embed_tokens(ids[:, prompt_length:-1])
    layers = model.model.layers
    for layer in layers:
        end = layer is layers[-1]  # nothing but the last column is used after it
        x, keys, values = _layer(layer, x, prompt_turns, seen, only_last=end)
        if response_length > 1:
            past = keys[owner], values[owner]
            y, _, _ = _layer(layer, y, response_turns, hidden_from, past=past)
    hidden = F.pad(torch.cat([x[owner], y], 1), (0, 0, 0, 1))
    norm = model.model.norm
    return F.linear(rms_norm(hidden, norm.weight, norm.variance_epsilon), model.lm_head.weight)


def _layer(
    layer: Any,
    x: Tensor,
    turns: Tensor,
    mask: Tensor | None,
    *,
    past: tuple[Tensor, Tensor] | None = None,
    only_last: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """x (rows, n, d) after a layer, and its keys and values (rows, key heads, n, D).

    past: keys and values of what stands before x. only_last: x at the last column alone, (rows, 1,
    d). No mask: causal.
    """
    attention, mlp = layer.self_attn, layer.mlp
    head_dim, norm = attention.head_dim, layer.post_attention_layernorm
    normed = rms_norm(x, layer.input_layernorm.weight, norm.variance_epsilon)

    def heads(weight: Tensor, normed: Tensor) -> Tensor:
        return F.linear(normed, weight).unflatten(-1, (-1, head_dim))

    def rotated(weight: Tensor, normed: Tensor, turns: Tensor) -> Tensor:
        pairs = heads(side_by_side(weight, head_dim), normed).unflatten(-1, (-1, 2))
        turned = torch.view_as_complex(pairs) * turns.unsqueeze(-2)
        return torch.view_as_real(turned).flatten(-2).transpose(1, 2)

    keys = rotated(attention.k_proj.weight, normed, turns)
    values = heads(attention.v_proj.weight, normed).transpose(1, 2)
    if only_last:
        x, normed, turns = x[:, -1:], normed[:, -1:], turns[..., -1:, :]
        mask = None if mask is None else mask[..., -1:, :]
    queries = rotated(attention.q_proj.weight, normed, turns)
    seen = (keys, values)
    if past is not None:
        seen = torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)
    attended = F.scaled_dot_product_attention(
        queries,
        *seen,
        attn_mask=mask,
        is_causal=mask is None and queries.shape[2] > 1,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    x = x + F.linear(attended.transpose(1, 2).flatten(2), attention.o_proj.weight)
    feed = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    return feed_forward(x, norm.weight, norm.variance_epsilon, *feed), keys, values
