"""The sampler: right distribution, right log-probs, nothing changed by what it saves."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from rlcore import models
from rlcore.sampling import response_logprobs, sample
from rlcore.tasks import get_task

PROMPTS = ["352041=", "0=", "98=", "123456=", "5="]  # of different lengths: padding on the left


def random_policy(symbols: str, size: str):
    """A model with large random weights, so that it is neither uniform nor certain."""
    tokenizer = models.build_tokenizer(symbols)
    model = models.build_model(size, tokenizer, seed=0)
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.25, generator=numbers)
    return model, tokenizer


@pytest.fixture(scope="module")
def policy():
    return random_policy("0123456789=", "tiny")


@pytest.fixture(scope="module")
def small_policy():
    """Four tokens (pad, eos, a, b), so that all responses can be listed."""
    return random_policy("ab", "nano")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def full_forward_logprobs(model, samples, row: int, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of one response alone: no padding, no cache, no batch."""
    real = samples.attention_mask[row].bool()
    ids = samples.input_ids[row][real][None]
    n = int(samples.lengths[row])
    with torch.no_grad():
        logits = model(ids).logits[0].double() / temperature
    logp = logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    return logp[-n:]


def test_shapes_masks_and_texts(policy) -> None:
    model, tokenizer = policy
    out = sample(model, tokenizer, PROMPTS, group_size=3, max_new_tokens=9, generator=generator())
    rows, width = 15, int(out.lengths.max())
    assert len(out) == rows
    assert out.response_mask.shape == out.logprobs.shape == out.entropy.shape == (rows, width)
    assert out.input_ids.shape == out.attention_mask.shape == (rows, 7 + width)
    assert out.group_ids.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert out.prompts == [p for p in PROMPTS for _ in range(3)]
    eos = tokenizer.eos_token_id
    assert out.truncated.any()
    assert not out.truncated.all()
    for i in range(rows):
        n = int(out.lengths[i])
        assert out.response_mask[i].tolist() == [True] * n + [False] * (width - n)
        ids = out.input_ids[i, 7 : 7 + n].tolist()
        # The terminal token belongs to the response, is its last, and is there unless cut.
        assert (ids[-1] == eos) == (not out.truncated[i])
        assert eos not in ids[:-1]
        assert out.truncated[i] == (n == 9 and ids[-1] != eos)
        assert out.texts[i] == tokenizer.decode(ids[:-1] if ids[-1] == eos else ids)
        prompt = out.input_ids[i, :7][out.attention_mask[i, :7].bool()]
        assert tokenizer.decode(prompt) == out.prompts[i]
        assert (out.input_ids[i, 7 + n :] == tokenizer.pad_token_id).all()
        assert (out.logprobs[i, n:] == 0).all()
        assert (out.entropy[i, n:] == 0).all()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logprobs_are_those_of_a_full_forward_pass(policy, temperature: float) -> None:
    model, tokenizer = policy
    out = sample(
        model,
        tokenizer,
        PROMPTS,
        group_size=4,
        max_new_tokens=9,
        temperature=temperature,
        generator=generator(1),
    )
    width = out.response_mask.shape[1]
    scored = response_logprobs(
        model, out.input_ids, out.attention_mask, width, temperature=temperature
    )
    assert scored.requires_grad
    for row in range(len(out)):
        n = int(out.lengths[row])
        expected = full_forward_logprobs(model, out, row, temperature)
        for found in (out.logprobs[row, :n], scored[row, :n].detach()):
            # In float32; test_decoding.py compares in float64.
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-5)


def test_entropy_is_that_of_the_distribution_sampled_from(policy) -> None:
    model, tokenizer = policy
    out = sample(
        model, tokenizer, ["12="], group_size=6, max_new_tokens=5, temperature=0.8,
        generator=generator(),
    )  # fmt: skip
    with torch.no_grad():
        logits = model(out.input_ids).logits[:, 2:-1].double() / 0.8
    expected = torch.distributions.Categorical(logits=logits).entropy()
    mask = out.response_mask
    torch.testing.assert_close(out.entropy.double()[mask], expected[mask], rtol=0, atol=1e-5)


def exact_distribution(model, tokenizer, prompt: str, n: int, change) -> dict[str, float]:
    """Probability of every response of at most n tokens, by enumeration with full passes."""
    eos, vocabulary = tokenizer.eos_token_id, len(tokenizer)
    result: dict[tuple[int, ...], float] = {}
    start = models.encode(tokenizer, [prompt])[0]

    def walk(response: tuple[int, ...], probability: float) -> None:
        if response and (response[-1] == eos or len(response) == n):
            result[response] = probability
            return
        with torch.no_grad():
            logits = model(torch.tensor([[*start, *response]])).logits[0, -1].double()
        for token, p in enumerate(change(logits).tolist()):
            if p > 0:
                walk((*response, token), probability * p)

    walk((), 1.0)
    assert sum(result.values()) == pytest.approx(1.0)
    assert len(result) <= sum(vocabulary**k for k in range(1, n + 1))
    return result


def plain(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1)


def hot(logits: torch.Tensor) -> torch.Tensor:
    return (logits / 2.0).softmax(-1)


def top_two(logits: torch.Tensor) -> torch.Tensor:
    p = logits.softmax(-1)
    least = p.sort().values[-2]
    kept = torch.where(p >= least, p, 0.0)
    return kept / kept.sum()


def top_seventy(logits: torch.Tensor) -> torch.Tensor:
    """Tokens in falling order until they hold 70 %."""
    p = logits.softmax(-1)
    kept, mass = torch.zeros_like(p), 0.0
    for token in p.argsort(descending=True).tolist():
        if mass >= 0.7:
            break
        kept[token], mass = p[token], mass + float(p[token])
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({}, plain),
        ({"temperature": 2.0}, hot),
        ({"top_k": 2}, top_two),
        ({"top_p": 0.7}, top_seventy),
    ],
    ids=["plain", "temperature", "top-k", "top-p"],
)
def test_frequencies_are_the_exact_distribution(small_policy, settings, change) -> None:
    """Every response of up to 3 tokens: its frequency among 40,000, and its log-prob."""
    model, tokenizer = small_policy
    exact = exact_distribution(model, tokenizer, "ab", 3, change)
    n = 40_000
    out = sample(
        model,
        tokenizer,
        ["ab"],
        group_size=n,
        max_new_tokens=3,
        generator=generator(7),
        **settings,
    )
    counts: dict[tuple[int, ...], int] = {}
    for ids, length, logp in zip(
        out.input_ids[:, 2:].tolist(), out.lengths.tolist(), out.logprobs.sum(1).tolist(),
        strict=True,
    ):  # fmt: skip
        response = tuple(ids[:length])
        assert logp == pytest.approx(math.log(exact[response]), abs=1e-5)
        counts[response] = counts.get(response, 0) + 1
    # Pearson's chi-squared over the responses expected at least 5 times; the rest pooled.
    common = [r for r in exact if n * exact[r] >= 5]
    expected = [n * exact[r] for r in common] + [n * (1 - sum(exact[r] for r in common))]
    seen = [counts.get(r, 0) for r in common]
    seen.append(n - sum(seen))
    pairs = [(s, e) for s, e in zip(seen, expected, strict=True) if e > 1e-6]
    chi = sum((s - e) ** 2 / e for s, e in pairs)
    freedom = len(pairs) - 1
    # Wilson-Hilferty, five standard deviations: fails for a distribution off by a per cent or so.
    limit = freedom * (1 - 2 / (9 * freedom) + 5 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi < limit


def test_that_frequency_test_can_fail(small_policy) -> None:
    model, tokenizer = small_policy
    exact = exact_distribution(model, tokenizer, "ab", 3, plain)
    out = sample(
        model, tokenizer, ["ab"], group_size=40_000, max_new_tokens=3, temperature=1.05,
        generator=generator(7),
    )  # fmt: skip
    first = out.input_ids[:, 2]
    for token in range(4):
        p = sum(q for r, q in exact.items() if r[0] == token)
        error = abs(float((first == token).double().mean()) - p)
        if error > 5 * math.sqrt(p * (1 - p) / 40_000):
            return
    pytest.fail("a temperature of 1.05 in place of 1 went unnoticed")


def test_greedy_is_generate_token_for_token(policy) -> None:
    model, tokenizer = policy
    task = get_task("sort")
    prompts = [*PROMPTS, *(task.draw(random.Random(i)) for i in range(40))]
    out = sample(model, tokenizer, prompts, max_new_tokens=12, greedy=True)
    encoded = tokenizer(prompts, padding=True, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        expected = model.generate(**encoded, max_new_tokens=12, do_sample=False)
    width = min(expected.shape[1], out.input_ids.shape[1])
    assert torch.equal(out.input_ids[:, :width], expected[:, :width])
    assert (expected[:, width:] == tokenizer.pad_token_id).all()
    assert (out.logprobs == 0).all()  # chosen with certainty
    assert out.lengths.unique().numel() > 1  # rows did finish at different times


def test_greedy_does_not_need_or_advance_a_generator(policy) -> None:
    model, tokenizer = policy
    numbers = generator()
    before = numbers.get_state()
    sample(model, tokenizer, ["1="], max_new_tokens=2, greedy=True, generator=numbers)
    assert torch.equal(numbers.get_state(), before)


@pytest.mark.parametrize("prompts", [PROMPTS, ["12=", "34="]], ids=["padded", "one length"])
def test_dropping_finished_rows_changes_no_sample(policy, prompts) -> None:
    model, tokenizer = policy
    both = [
        sample(
            model, tokenizer, prompts, group_size=16, max_new_tokens=10, generator=generator(2),
            drop_finished=drop,
        )
        for drop in (True, False)
    ]  # fmt: skip
    assert both[0].lengths.unique().numel() > 2
    for name in ("input_ids", "attention_mask", "lengths", "truncated"):
        assert torch.equal(getattr(both[0], name), getattr(both[1], name))
    torch.testing.assert_close(both[0].logprobs, both[1].logprobs, rtol=0, atol=1e-5)


def test_a_prompt_is_sampled_alike_beside_longer_ones(policy) -> None:
    """Padding on the left and position ids: a greedy answer does not depend on the neighbours."""
    model, tokenizer = policy
    together = sample(model, tokenizer, PROMPTS, max_new_tokens=8, greedy=True).texts
    alone = [sample(model, tokenizer, [p], max_new_tokens=8, greedy=True).texts[0] for p in PROMPTS]
    assert together == alone


def test_case_c03_a_group_is_not_one_answer_repeated() -> None:
    tokenizer = models.build_tokenizer("0123456789=")
    model = models.build_model("tiny", tokenizer, seed=0)

    def group(seed: int) -> list[str]:
        out = sample(
            model, tokenizer, ["12="], group_size=8, max_new_tokens=6, generator=generator(seed)
        )
        return out.texts

    assert len(set(group(0))) >= 6
    assert group(0) == group(0)
    assert group(0) != group(1)
    shared = generator(0)
    out = [
        sample(model, tokenizer, ["12="], group_size=4, max_new_tokens=6, generator=shared).texts
        for _ in range(2)
    ]
    assert out[0] != out[1]  # one generator for the run: it moves on


def test_model_is_left_as_it_was(policy) -> None:
    model, tokenizer = policy
    for training in (True, False):
        model.train(training)
        out = sample(model, tokenizer, ["1="], max_new_tokens=3, generator=generator())
        assert model.training is training
        with pytest.raises(ValueError, match="characters without a token"):
            sample(model, tokenizer, ["?"], max_new_tokens=3, generator=generator())
        assert model.training is training
    model.eval()
    assert not out.logprobs.requires_grad
    # no_grad, not inference_mode: what was sampled can be used in a loss.
    assert not out.logprobs.is_inference()


def test_case_a29_dropout_is_off_for_sampling_and_scoring() -> None:
    tokenizer = models.build_tokenizer("0123456789=")
    model = models.build_model("tiny", tokenizer, seed=0, dropout=0.5).train()
    out = sample(model, tokenizer, ["12="], group_size=8, max_new_tokens=6, generator=generator())
    width = out.response_mask.shape[1]
    scored = [
        response_logprobs(model, out.input_ids, out.attention_mask, width).detach()
        for _ in range(2)
    ]
    assert torch.equal((scored[0] - scored[1]).exp(), torch.ones_like(scored[0]))
    torch.testing.assert_close(
        scored[0][out.response_mask], out.logprobs[out.response_mask], rtol=0, atol=1e-5
    )
    assert model.training


def test_seeded_samples_ignore_and_keep_the_global_state(policy) -> None:
    model, tokenizer = policy
    settings = {"group_size": 4, "max_new_tokens": 6}
    torch.manual_seed(0)
    first = sample(model, tokenizer, PROMPTS, generator=generator(), **settings)
    state = torch.get_rng_state()
    again = sample(model, tokenizer, PROMPTS, generator=generator(), **settings)
    assert torch.equal(first.input_ids, again.input_ids)
    assert torch.equal(first.logprobs, again.logprobs)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, r"prompts: found \[\]; wanted a non-empty list"),
        ({"prompts": "12="}, "prompts: found '12='; wanted a non-empty list"),
        ({"prompts": ["1=", ""]}, "prompts: number 1 is empty"),
        ({"prompts": ["1x"]}, r"text: '1x' has characters without a token: \['x'\]"),
        ({"group_size": 0}, "group_size: found 0; wanted a whole number of at least 1"),
        ({"group_size": 2.0}, "group_size: found 2.0"),
        ({"max_new_tokens": 0}, "max_new_tokens: found 0"),
        ({"temperature": 0}, "temperature: found 0; .*use greedy=True"),
        ({"temperature": -1.0}, r"temperature: found -1.0; .*use greedy=True"),
        ({"temperature": math.nan}, "temperature: found nan"),
        ({"temperature": math.inf}, "temperature: found inf"),
        ({"temperature": 1e-40}, "temperature: found 1e-40; wanted 1e-30 to 1e30"),
        ({"prompts": None}, "prompts: found None"),
        ({"prompts": [None]}, r"prompts: found \[None\]"),
        ({"top_p": "x"}, "top_p: found 'x'"),
        (
            {"max_new_tokens": 9999},
            r"10001 tokens together; the model has \d+ positions",
        ),
        ({"top_k": 0}, "top_k: found 0"),
        ({"top_k": 1.5}, "top_k: found 1.5"),
        ({"top_p": 0}, "top_p: found 0"),
        ({"top_p": 1.1}, "top_p: found 1.1"),
        ({"generator": None}, "generator: found None; wanted a torch.Generator, or greedy=True"),
        ({"generator": 0}, "generator: found 0"),
    ],
)
def test_bad_input(policy, change, message: str) -> None:
    settings = {"prompts": ["1="], "max_new_tokens": 3, "generator": generator(), **change}
    with pytest.raises(ValueError, match=message):
        sample(*policy, settings.pop("prompts"), **settings)


def test_the_smallest_top_p_keeps_the_most_likely_token(policy) -> None:
    settings = {"group_size": 4, "max_new_tokens": 4}
    out = sample(*policy, PROMPTS, top_p=1e-46, generator=generator(), **settings)
    assert out.texts == sample(*policy, PROMPTS, greedy=True, **settings).texts
    assert torch.equal(out.logprobs, torch.zeros_like(out.logprobs))


def test_response_length_out_of_range(policy) -> None:
    ids = torch.tensor([[2, 3, 4]])
    for length in (0, 3):
        with pytest.raises(ValueError, match=f"response_length: found {length}; wanted 1 to 2"):
            response_logprobs(policy[0], ids, torch.ones_like(ids), length)


def test_top_k_and_top_p_together_in_the_stated_order(small_policy) -> None:
    """top-k first: of probabilities .4 .3 .2 .1, k = 3 leaves .444 .333 .222, p = .75 two."""
    from rlcore.sampling import _cut

    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert _cut(logits, 3, 0.75).isfinite().tolist() == [[True, True, False, False]]
    assert _cut(logits, 3, 0.78).isfinite().tolist() == [[True, True, True, False]]
    assert _cut(logits, None, 0.78).isfinite().tolist() == [[True, True, True, False]]
    assert _cut(logits, 9, 1.0).isfinite().all()
    tied = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()
    assert _cut(tied, 2, None).isfinite().all()  # ties with the last one stay


def test_draw_never_picks_an_impossible_token() -> None:
    from rlcore.sampling import _draw

    p = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]], dtype=torch.float64)
    picked = [
        int(_draw(p * scale, torch.tensor([u], dtype=torch.float64)))
        for u, scale in itertools.product([0.0, 0.49999, 0.5, 0.999999, 1 - 2**-53], [1.0, 1 / 3])
    ]
    assert set(picked) <= {1, 3}
    assert picked == [1, 1, 1, 1, 3, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_others_changes_nothing(dtype: torch.dtype, policy) -> None:
    def samples():
        return sample(*policy, PROMPTS, group_size=8, max_new_tokens=9, generator=generator())

    wanted = samples()
    torch.set_default_dtype(dtype)
    try:
        found = samples()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.logprobs.dtype == torch.float32
    assert torch.equal(found.logprobs, wanted.logprobs)
    assert torch.equal(found.input_ids, wanted.input_ids)
