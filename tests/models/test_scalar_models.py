"""The scalar head: the same number wherever the padding is, and values before their token."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore import models
from rlcore.objectives import reward_model_loss
from rlcore.sampling import response_logprobs, sample

TOKENIZER = models.build_tokenizer("0123456789=")
TEXTS = ["352041=", "9=", "41="]
IDS = models.encode(TOKENIZER, TEXTS)


@pytest.fixture(scope="module")
def language_model() -> Any:
    return models.build_model("tiny", TOKENIZER, seed=0)


@pytest.fixture(scope="module")
def scalar_model(language_model: Any) -> Any:
    return models.build_scalar_model(language_model, seed=1)


def padded(left: Callable[[int], int], right: Callable[[int], int], fill: int = 0) -> tuple:
    """The three texts with so many padded slots on each side (of the ones that are missing)."""
    width = max(map(len, IDS))
    rows, masks = [], []
    for ids in IDS:
        before, after = left(width - len(ids)), right(width - len(ids))
        rows.append([fill] * before + ids + [fill] * after)
        masks.append([0] * before + [1] * len(ids) + [0] * after)
    return torch.tensor(rows), torch.tensor(masks)


LEFT = padded(lambda missing: missing, lambda missing: 0)
RIGHT = padded(lambda missing: 0, lambda missing: missing)
BOTH = padded(lambda missing: missing + 2, lambda missing: 1)


def alone(model: Any) -> list[Tensor]:
    """The values of each text without any padding."""
    return [
        models.token_values(model, torch.tensor([ids]), torch.ones(1, len(ids)))[0] for ids in IDS
    ]


def near(ours: Tensor, wanted: Any, atol: float = 1e-5) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(wanted), atol=atol, rtol=1e-5)


@pytest.mark.parametrize("where", [LEFT, RIGHT, BOTH], ids=["left", "right", "both"])
def test_values_and_rewards_whatever_side_the_padding_is_on(
    where: tuple, scalar_model: Any
) -> None:
    ids, mask = where
    values = models.token_values(scalar_model, ids, mask)
    assert values.shape == ids.shape
    for row, wanted in enumerate(alone(scalar_model)):
        near(values[row][mask[row] == 1], wanted)
    assert (values[mask == 0] == 0).all()
    rewards = models.response_rewards(scalar_model, ids, mask)
    near(rewards, torch.stack([value[-1] for value in alone(scalar_model)]))
    near(models.token_values(scalar_model, ids, mask.bool()), values)


def test_the_tokens_under_the_padding_mean_nothing(scalar_model: Any) -> None:
    """The end-of-sequence token too: the mask says what is real, not an id."""
    ids, mask = BOTH
    plain = models.response_rewards(scalar_model, ids, mask)
    for other in (TOKENIZER.eos_token_id, 7):
        spoilt = ids.masked_fill(mask == 0, other)
        near(models.response_rewards(scalar_model, spoilt, mask), plain)


def test_padding_may_hold_anything(language_model: Any, scalar_model: Any) -> None:
    """Ids that no vocabulary has, as labels hold them, in slots that the mask leaves out."""
    ids, mask = BOTH
    plain = models.token_values(scalar_model, ids, mask)
    scores = response_logprobs(language_model, ids, mask, 3)
    for other in (-100, 10**9):
        spoilt = ids.masked_fill(mask == 0, other)
        assert torch.equal(models.token_values(scalar_model, spoilt, mask), plain)
        again = response_logprobs(language_model, spoilt, mask, 3)
        assert torch.equal(again[mask[:, -3:] == 1], scores[mask[:, -3:] == 1])


def test_a_row_with_a_hole_is_the_row_without_it(language_model: Any, scalar_model: Any) -> None:
    """Whatever stands in the hole, and whatever the other rows look like."""
    for first in (0, 1):
        ids, mask = torch.tensor([IDS[0], IDS[0]]), torch.ones(2, 7, dtype=torch.long)
        ids[0, 2:4], mask[0, 2:4] = 7, 0
        mask[1, 0] = first  # with 0, one row is padded on the left as well
        short = torch.tensor([IDS[0][:2] + IDS[0][4:]])
        wanted = models.token_values(scalar_model, short, torch.ones_like(short))[0]
        values = models.token_values(scalar_model, ids, mask)[0]
        near(values[mask[0] == 1], wanted)
        near(models.token_values(scalar_model, ids[:1], mask[:1])[0], values)
        scores = response_logprobs(language_model, ids, mask, 2)[0]
        wanted = response_logprobs(language_model, short, torch.ones_like(short), 2)[0]
        near(scores, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_means_nothing(
    dtype: torch.dtype, tmp_path: Path, language_model: Any, scalar_model: Any
) -> None:
    models.save(scalar_model, TOKENIZER, tmp_path / "reward")
    torch.set_default_dtype(dtype)
    try:
        model = models.build_model("tiny", TOKENIZER, seed=0)
        scalar = models.build_scalar_model(model, seed=1)
        assert torch.get_default_dtype() == dtype
        loaded, _ = models.load_scalar_model(tmp_path / "reward")
        values = [models.token_values(one, *BOTH) for one in (scalar, loaded)]
        scores = response_logprobs(model, *LEFT, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, wanted in ((model, language_model), (scalar, scalar_model), (loaded, scalar_model)):
        assert one.dtype == torch.float32
        for ours, theirs in zip(one.state_dict().items(), wanted.state_dict().items(), strict=True):
            assert ours[0] == theirs[0]
            assert torch.equal(ours[1], theirs[1])
    for value in values:
        assert torch.equal(value, models.token_values(scalar_model, *BOTH))
    assert torch.equal(scores, response_logprobs(language_model, *LEFT, 3))


def test_the_default_device_means_nothing(language_model: Any, scalar_model: Any) -> None:
    torch.set_default_device("meta")
    try:
        model = models.build_model("tiny", TOKENIZER, seed=0, device="cpu")
        scalar = models.build_scalar_model(model, seed=1)
    finally:
        torch.set_default_device(None)
    for one, wanted in ((model, language_model), (scalar, scalar_model)):
        for ours, theirs in zip(one.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_the_numbers_are_a_linear_map_of_the_last_hidden_state(scalar_model: Any) -> None:
    """By the model that transformers makes of it, without our code: logits of its own head."""
    (ids,) = (torch.tensor([IDS[0]]),)
    hidden = scalar_model.model(ids).last_hidden_state
    ours = models.token_values(scalar_model, ids, torch.ones_like(ids))
    near(ours, scalar_model.score(hidden)[..., 0])
    near(ours[:, -1:], scalar_model(ids).logits)


def test_a_value_stands_before_its_token(language_model: Any, scalar_model: Any) -> None:
    """Column t has seen the prompt and y_<t, and neither y_t nor what follows."""
    generator = torch.Generator().manual_seed(0)
    drawn = sample(
        language_model,
        TOKENIZER,
        ["352=", "4="],
        group_size=3,
        max_new_tokens=5,
        generator=generator,
    )
    ids, mask, length = drawn.input_ids, drawn.attention_mask, drawn.response_mask.shape[1]
    values = models.response_values(scalar_model, ids, mask, length)
    assert values.shape == drawn.response_mask.shape == drawn.logprobs.shape
    scores = response_logprobs(language_model, ids, mask, length)
    assert scores.shape == values.shape
    prompt = ids.shape[1] - length
    for row in range(len(ids)):
        for t in range(int(drawn.lengths[row])):
            seen = ids[row, : prompt + t][mask[row, : prompt + t] == 1][None]
            wanted = models.response_rewards(scalar_model, seen, torch.ones_like(seen))
            near(values[row, t], wanted[0])
    near(values[0, 0], values[1, 0])  # one prompt, one value, whatever the response
    changed = ids.clone()
    changed[:, prompt + 1 :] = (changed[:, prompt + 1 :] + 1) % len(TOKENIZER)
    again = models.response_values(scalar_model, changed, mask, length)
    near(again[:, :2], values[:, :2])
    assert (again[:, 2:] - values[:, 2:]).abs().max() > 1e-2


def test_the_value_after_the_last_token(scalar_model: Any) -> None:
    """What a cut response bootstraps from: the column that response_values leaves out."""
    ids, mask = LEFT
    values = models.token_values(scalar_model, ids, mask)
    near(models.response_values(scalar_model, ids, mask, 3), values[:, -4:-1])
    near(models.last_token_values(values, mask), values[:, -1])


def test_the_head_is_drawn_from_its_seed_and_the_rest_is_copied(language_model: Any) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other, still = (
        models.build_scalar_model(language_model, seed=seed, std=std)
        for seed, std in ((1, None), (1, None), (2, None), (1, 0.0))
    )
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)
    assert (still.score.weight == 0).all()
    wanted = 1 / math.sqrt(64 + 1)
    assert first.score.weight.std().item() == pytest.approx(wanted, rel=0.2)
    halved = models.build_scalar_model(language_model, seed=1, std=wanted / 2)
    near(halved.score.weight, first.score.weight / 2, atol=1e-7)
    copied = dict(first.base_model.named_parameters())
    for name, parameter in language_model.base_model.named_parameters():
        assert torch.equal(copied[name], parameter)
        assert copied[name].data_ptr() != parameter.data_ptr()
    assert not first.training
    assert language_model.config.num_labels != 1
    ids, mask = LEFT
    assert (models.token_values(still, ids, mask) == 0).all()


def test_a_step_changes_the_copy_alone(language_model: Any) -> None:
    before = [parameter.clone() for parameter in language_model.parameters()]
    model = models.build_scalar_model(language_model, seed=1)
    models.response_rewards(model, *LEFT).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.abs().max() > 0
            parameter -= 0.1 * parameter.grad
    for parameter, wanted in zip(language_model.parameters(), before, strict=True):
        assert torch.equal(parameter, wanted)
        assert parameter.grad is None


def test_a_reward_model_learns_from_pairs(language_model: Any) -> None:
    """Twenty steps on three pairs, padded on either side: every chosen answer wins."""
    model = models.build_scalar_model(language_model, seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    (ids, mask), order = RIGHT, torch.tensor([1, 2, 0])
    left_ids, left_mask = LEFT
    for _ in range(20):
        chosen = models.response_rewards(model, ids, mask)
        loss, stats = reward_model_loss(
            chosen, models.response_rewards(model, left_ids.flip(1), left_mask.flip(1))[order]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert stats["accuracy"] == 1
    assert loss < 0.1


def test_dropout_is_off_and_the_mode_is_put_back(language_model: Any) -> None:
    noisy = models.build_model("nano", TOKENIZER, seed=0, dropout=0.5)
    model = models.build_scalar_model(noisy, seed=1).train()
    once, twice = (models.token_values(model, *BOTH) for _ in range(2))
    assert torch.equal(once, twice)
    assert model.training
    models.token_values(model.eval(), *BOTH)
    assert not model.training


def test_padding_that_is_not_a_number_harms_nothing(scalar_model: Any) -> None:
    """Some attention kernels leave NaN where a padded slot sees nothing at all."""
    ids, mask = LEFT

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        hidden = output.last_hidden_state
        output.last_hidden_state = hidden.masked_fill((mask == 0)[..., None], math.nan)
        return output

    plain = models.token_values(scalar_model, ids, mask)
    (wanted,) = torch.autograd.grad(plain.square().sum(), scalar_model.score.weight)
    hook = scalar_model.base_model.register_forward_hook(spoil)
    try:
        values = models.token_values(scalar_model, ids, mask)
        (slope,) = torch.autograd.grad(values.square().sum(), scalar_model.score.weight)
    finally:
        hook.remove()
    assert torch.equal(values, plain)
    assert torch.equal(slope, wanted)


def test_a_bfloat16_model_gives_float32_numbers(language_model: Any) -> None:
    model = models.build_scalar_model(
        models.build_model("tiny", TOKENIZER, seed=0, dtype="bfloat16"), seed=1
    )
    assert model.dtype == torch.bfloat16
    ids, mask = RIGHT
    values = models.token_values(model, ids, mask)
    assert values.dtype == torch.float32
    hidden = model.base_model(ids).last_hidden_state.double()
    wanted = (hidden @ model.score.weight[0].double()).masked_fill(mask == 0, 0)
    near(values.double(), wanted, atol=1e-5)
    assert not torch.equal(values, values.bfloat16().float())  # more digits than bfloat16 has


def test_saved_scalar_models_are_read_by_transformers_and_by_us(
    tmp_path: Path, scalar_model: Any, capfd: Any
) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = models.save(scalar_model, TOKENIZER, tmp_path / "reward")
    loaded, tokenizer = models.load_scalar_model(folder)
    assert capfd.readouterr().err == ""
    assert tokenizer("41=")["input_ids"] == IDS[2]
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    assert theirs.config.num_labels == 1
    for one in (loaded, theirs):
        for name, parameter in scalar_model.named_parameters():
            assert torch.equal(dict(one.named_parameters())[name], parameter)
        assert torch.equal(
            models.token_values(one, *BOTH), models.token_values(scalar_model, *BOTH)
        )
    near(theirs(torch.tensor([IDS[0]])).logits[0], alone(scalar_model)[0][-1:])
    assert not loaded.training


def test_a_folder_of_the_other_kind_is_named(
    tmp_path: Path, language_model: Any, scalar_model: Any
) -> None:
    models.save(scalar_model, TOKENIZER, tmp_path / "reward")
    with pytest.raises(ValueError, match="has a scalar head, not one of words; wanted load_scalar"):
        models.load(tmp_path / "reward")
    models.save(language_model, TOKENIZER, tmp_path / "words")
    with pytest.raises(ValueError, match=r"has no weights for score\.weight"):
        models.load_scalar_model(tmp_path / "words")
    with pytest.raises(ValueError, match="is not a model folder"):
        models.load_scalar_model(tmp_path / "nowhere")
    (tmp_path / "reward" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"path: the model in .* cannot be read"):
        models.load_scalar_model(tmp_path / "reward")


def test_several_labels_are_no_scalar_head(tmp_path: Path, language_model: Any) -> None:
    from transformers import LlamaForSequenceClassification

    config = type(language_model.config)(**language_model.config.to_dict())
    config.num_labels = 3
    three = LlamaForSequenceClassification(config)
    models.save(three, TOKENIZER, tmp_path / "three")
    with pytest.raises(ValueError, match=r"is no scalar model \(model: found Linear.*features=3"):
        models.load_scalar_model(tmp_path / "three")


def test_another_architecture() -> None:
    """GPT-2 counts positions in a table of its own, and calls its parts by other names."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(TOKENIZER), n_embd=16, n_layer=1, n_head=2, n_positions=16, pad_token_id=0
    )
    torch.manual_seed(0)
    model = models.build_scalar_model(GPT2LMHeadModel(config).eval(), seed=1)
    wanted = alone(model)
    for ids, mask in (LEFT, RIGHT, BOTH):
        values = models.token_values(model, ids, mask)
        for row, each in enumerate(wanted):
            near(values[row][mask[row] == 1], each)


@dataclasses.dataclass
class Unlike:
    """Something that is not a model."""

    config: str = "none"


def test_bad_arguments(language_model: Any, scalar_model: Any) -> None:
    ids, mask = LEFT
    hole, apart = RIGHT[1].clone(), mask.clone()
    hole[1] = torch.tensor([1, 1, 1, 1, 0, 1, 1])
    apart[2] = torch.tensor([0, 0, 1, 0, 0, 1, 1])
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: models.build_scalar_model(language_model, seed=-1), "seed: found -1"),
        (
            lambda: models.build_scalar_model(language_model, seed=0, std=-1),
            "std: found -1; wanted",
        ),
        (lambda: models.build_scalar_model(language_model, seed=0, std=math.nan), "std: found nan"),
        (lambda: models.build_scalar_model(language_model, seed=0, std=True), "std: found True"),
        (lambda: models.build_scalar_model(scalar_model, seed=0), "model: found LlamaForSeq"),
        (lambda: models.build_scalar_model(Unlike(), seed=0), "model: found Unlike; wanted a caus"),
        (lambda: models.token_values(language_model, ids, mask), "model: found none as the head"),
        (
            lambda: models.token_values(scalar_model, ids, mask[:1]),
            r"attention_mask: found a tensor of shape \(1, 7\) .*; wanted that of .*, \(3, 7\)",
        ),
        *(
            (
                lambda call=call, wrong=wrong: call(*wrong),
                message,
            )
            for call in (
                lambda ids, mask: models.token_values(scalar_model, ids, mask),
                lambda ids, mask: models.response_rewards(scalar_model, ids, mask),
                lambda ids, mask: models.response_values(scalar_model, ids, mask, 3),
                lambda ids, mask: response_logprobs(language_model, ids, mask, 3),
            )
            for wrong, message in (
                ((ids[0], mask[0]), r"input_ids: found a tensor of shape \(7,\)"),
                (
                    (ids.tolist(), mask),
                    r"input_ids: found \[\[.*\(list\); wanted integers of shape",
                ),
                ((None, mask), "input_ids: found None"),
                ((ids[:0], mask[:0]), r"input_ids: found a tensor of shape \(0, 7\)"),
                ((ids.float(), mask), "input_ids: found .* dtype torch.float32"),
                ((ids.bool(), mask), "input_ids: found .* dtype torch.bool"),
                ((ids.to_sparse(), mask), "input_ids: found .* layout torch.sparse_coo"),
                (
                    (ids + 99, mask),
                    r"input_ids: found 1\d\d at a real token; wanted ids from 0 to 12",
                ),
                ((ids - 99, mask), "input_ids: found -9\\d at a real token"),
                ((ids, None), "attention_mask: found None"),
                ((ids, mask.tolist()), r"attention_mask: found \[\[.*\(list\)"),
                ((ids, mask * 2), "attention_mask must hold only 0 and 1 .*; got 2"),
                ((ids, -mask), "attention_mask must hold only 0 and 1 .*; got -1"),
                ((ids, mask / mask), "attention_mask must hold only 0 and 1 .*; got nan"),
            )
        ),
        *(
            (
                lambda call=call, length=length: call(length),
                f"response_length: found {length!r}.*; wanted 1 to 6, a whole number",
            )
            for call in (
                lambda length: models.response_values(scalar_model, ids, mask, length),
                lambda length: response_logprobs(language_model, ids, mask, length),
            )
            for length in (0, 1.5, "2", None, True, -1, 2**70)
        ),
        *(
            (
                lambda std=std: models.build_scalar_model(language_model, seed=0, std=std),
                "std: found .*; wanted None or a number from 0 to 1000",
            )
            for std in (1e308, 10**400, 10**5000, 1001, "1", torch.ones(2, 2))
        ),
        *(
            (lambda seed=seed: models.build_scalar_model(language_model, seed=seed), "seed: found ")
            for seed in (10**400, 10**5000, 1.5, None, torch.ones(2, 2))
        ),
        *(
            (
                lambda call=call, m=m, row=row: call(m),
                f"attention_mask: found .* token 1 .* row {row};",
            )
            for call in (
                lambda mask: models.response_values(scalar_model, ids, mask, 3),
                lambda mask: response_logprobs(language_model, ids, mask, 3),
            )
            for m, row in ((hole, 1), (apart, 2))
        ),
        (lambda: models.response_values(scalar_model, ids, mask, 0), "response_length: found 0"),
        (lambda: models.response_values(scalar_model, ids, mask, 7), "response_length: .*1 to 6"),
        (
            lambda: models.response_rewards(scalar_model, ids, mask * 0),
            "attention_mask row 0 is em",
        ),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=f"^{message}") as caught:
            call()
        assert len(str(caught.value)) < 250, "a message does not print a batch"
