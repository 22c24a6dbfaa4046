"""A prompt read once for its rows: log-probs and gradient are those of the model's own pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_decoding import PLAIN, build
from transformers.models.llama import modeling_llama

from rlcore import llama, sampling
from rlcore.models import encode
from rlcore.sampling import response_logits, response_logprobs

PADDED = ["352041=", "352041=", "0=", "98=", "98=", "98=", "0=", "0="]  # "0=" comes again
ONE_LENGTH = ["12=", "12=", "12=", "34=", "34=", "90="]


def batch(tokenizer: Any, prompts: list[str], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of responses of different lengths up to `width`, padded with ids that differ."""
    encoded = encode(tokenizer, prompts)
    longest = max(map(len, encoded))
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 13, (len(prompts), longest + width), generator=numbers)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(encoded):
        start = longest - len(prompt)
        ids[i, start:longest] = torch.tensor(prompt)
        mask[i, start : longest + max(1, width - i)] = 1
    return ids, mask


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch):
    """Makes a model of float64 throughout: transformers' own norm would compute in float32."""

    def norm(self: Any, states: torch.Tensor) -> torch.Tensor:
        mean = states.square().mean(-1, keepdim=True)
        return self.weight * states / (mean + self.variance_epsilon).sqrt()

    def make(name: str) -> tuple[Any, Any]:
        model, tokenizer = build(PLAIN[name])
        assert llama.is_plain_llama(model)
        monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
        return model.double(), tokenizer

    return make


def passes(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, width: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Log-probs and gradients of our pass, and of the model's own."""
    real = mask[:, -width:].bool()
    push = torch.randn(real.shape, generator=torch.Generator().manual_seed(1)).double()
    results = []
    for plain in (True, False):
        monkeypatch.setattr(sampling, "is_plain_llama", lambda _, plain=plain: plain)
        model.zero_grad()
        logprobs = response_logprobs(model, ids, mask, width)
        (torch.where(real, logprobs, 0.0) * push).sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        results.append((logprobs.detach()[real], grads))
    return results


@pytest.mark.parametrize("name", [name for name in PLAIN if name != "our medium"])
@pytest.mark.parametrize("prompts", [PADDED, ONE_LENGTH], ids=["padded", "one length"])
def test_the_same_log_probs_and_gradient(
    name: str, prompts: list[str], double, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "eager attention":
        pytest.skip("transformers has the softmax of eager attention in float32")
    model, tokenizer = double(name)
    ids, mask = batch(tokenizer, prompts, 6)
    (ours, gradient), (wanted, whole) = passes(model, ids, mask, 6, monkeypatch)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-11)
    for found, expected in zip(gradient, whole, strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * float(expected.norm()))


@pytest.mark.parametrize("width", [1, 2])
def test_short_responses(width: int, double, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = double("shared keys")
    ids, mask = batch(tokenizer, PADDED, width)
    (ours, gradient), (wanted, whole) = passes(model, ids, mask, width, monkeypatch)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-11)
    for found, expected in zip(gradient, whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * float(expected.norm()))


def test_in_float32_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = build("tiny")
    ids, mask = batch(tokenizer, PADDED, 6)
    (ours, gradient), (wanted, whole) = passes(model, ids, mask, 6, monkeypatch)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)
    for found, expected in zip(gradient, whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.norm()))


def test_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns of each call of a layer, and whether its last column is all that is left."""
    model, tokenizer = build("tiny")
    calls: list[tuple[int, int, bool]] = []
    layer = llama._layer

    def noted(*arguments: Any, **options: Any) -> Any:
        calls.append((*arguments[1].shape[:2], options.get("only_last", False)))
        return layer(*arguments, **options)

    monkeypatch.setattr(llama, "_layer", noted)
    ids, mask = batch(tokenizer, PADDED, 6)
    logits = response_logits(model, ids, mask, 6)
    assert logits.shape == (8, 7, 13)
    # Four runs of rows with one prompt; a response's last token predicts nothing.
    assert calls == [(4, 7, False), (8, 5, False), (4, 7, True), (8, 5, False)]


def test_masks_that_cannot_be_shared(double, monkeypatch: pytest.MonkeyPatch) -> None:
    """No real token before a response: the model is asked, as for any other."""
    model, tokenizer = double("our nano")
    ids, mask = batch(tokenizer, ONE_LENGTH, 4)
    mask[0, :4] = 0  # a prompt of padding, and a response that starts late
    assert not llama.can_share(mask, 4)
    (ours, _), (wanted, _) = passes(model, ids, mask, 4, monkeypatch)
    assert torch.equal(ours, wanted)
