"""On a GPU: the same samples as on the CPU, and a run that trains and resumes."""

from __future__ import annotations

import pytest
import torch

from rlcore.devices import using_precision
from rlcore.lora import Lora, add_lora
from rlcore.sampling import response_logprobs, sample
from rlcore.training import row, train_policy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SETTINGS = {
    "steps": 4,
    "prompts_per_step": 8,
    "group_size": 4,
    "learning_rate": 1e-2,
    "seed": 0,
    "progress": False,
}


def test_samples_and_logprobs_are_those_of_the_cpu(make) -> None:
    """float64, so that no sample falls on the other side of a boundary by rounding."""
    outs = []
    for device in ("cpu", "cuda"):
        model, tokenizer = make(device=device, dtype="float64")
        out = sample(
            model, tokenizer, ["12=", "3="], group_size=16, max_new_tokens=6,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        width = out.response_mask.shape[1]
        scored = response_logprobs(model, out.input_ids, out.attention_mask, width).detach()
        torch.testing.assert_close(
            scored[out.response_mask], out.logprobs[out.response_mask].double(), rtol=0, atol=1e-5
        )
        outs.append(out)
    assert outs[0].texts == outs[1].texts
    torch.testing.assert_close(outs[0].logprobs, outs[1].logprobs.cpu(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_cuda_graph_gives_the_same_samples(make, precision) -> None:
    """Again after the weights have moved: nothing of them is kept in the recording."""
    model, tokenizer = make(size="tiny", device="cuda")
    prompts = ["12=", "3=", "4567="]
    for _ in range(2):
        with using_precision(precision):
            pair = [
                sample(
                    model, tokenizer, prompts, group_size=16, max_new_tokens=24,
                    generator=torch.Generator().manual_seed(0), cuda_graph=graph,
                )
                for graph in (False, True)
            ]  # fmt: skip
        width = min(out.logprobs.shape[1] for out in pair)
        same = pair[0].input_ids[:, :width] == pair[1].input_ids[:, :width]
        assert same.float().mean() > 0.95  # a draw may lie at a boundary
        if precision == "float32":
            gap = (pair[0].logprobs[:, :width] - pair[1].logprobs[:, :width])[:, 0].abs().max()
            assert gap < 1e-4
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)


def test_a_run_trains_by_a_cuda_graph(coin, make) -> None:
    run = train_policy(
        *make(device="cuda"), coin, row("scst"), **SETTINGS, device="cuda", cuda_graph=True
    )
    assert run.finished
    assert run.settings["cuda_graph"]


def test_a_run_trains_and_resumes_on_the_gpu(coin, make, tmp_path) -> None:
    model, tokenizer = make(device="cuda")
    run = train_policy(
        model, tokenizer, coin, row("grpo", beta=0.04), **SETTINGS, out=tmp_path, device="cuda"
    )
    assert run.finished
    assert next(model.parameters()).is_cuda
    again = train_policy(
        *make(device="cuda"), coin, row("grpo", beta=0.04), **SETTINGS, out=tmp_path,
        device="cuda", resume=True,
    )  # fmt: skip
    assert again.metrics == run.metrics


def test_bfloat16_and_lora_train_on_the_gpu(coin, make) -> None:
    """Log-probs of the sampler near those of a forward pass; only the matrices move."""
    model, tokenizer = make(size="tiny", device="cuda")
    add_lora(model, Lora(rank=4), seed=0)
    before = {name: w.clone() for name, w in model.named_parameters()}
    run = train_policy(
        model, tokenizer, coin, row("grpo", beta=0.04), **SETTINGS, device="cuda", precision="bf16"
    )
    assert run.metrics[0]["kl"] == pytest.approx(0, abs=1e-3)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]) != ("lora_" in name), name
