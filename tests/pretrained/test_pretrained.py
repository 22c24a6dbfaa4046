"""A pretrained model with a BPE tokenizer: it loads, samples, trains, and is saved again."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlcore.models import encode, eos_ids, load, save
from rlcore.pretrained import load_pretrained
from rlcore.sampling import response_logprobs, sample
from rlcore.tasks import (
    SORT,
    SORT_BOX,
    PreferencePairs,
    adds_first,
    chat_task,
    rate_all,
    sample_pairs,
    text_task,
)
from rlcore.training import row, train_policy, train_preference, train_reward_model, train_sft
from rlcore.training.sft import demonstrations

ASK = "Sort these digits: {}"
STEP = {"seed": 0, "progress": False, "device": "cpu", "threads": 1}


def short(text: str) -> float:
    """A reward that half of the responses get, whatever the model: a parity of the text."""
    return float(sum(text.encode()) % 2 == 0)


@pytest.fixture
def chat(load_small):
    """(model, tokenizer, task) of a conversation whose reward comes half the time."""
    model, tokenizer = load_small()
    task = replace(SORT, name="parity", verify=lambda problem, response: short(response))
    return model, tokenizer, chat_task(task, tokenizer, instruction=ASK, max_new_tokens=6)


def test_what_the_loops_need_is_there(load_small) -> None:
    model, tokenizer = load_small()
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert not model.training
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.get_input_embeddings().weight
    stop = tokenizer.convert_tokens_to_ids("<|stop|>")
    assert eos_ids(model, tokenizer) == (tokenizer.eos_token_id, stop)


def test_a_chat_prompt_is_the_template_s_own_tokens(load_small) -> None:
    """The names of special tokens are read as these tokens, and no token more is added."""
    _, tokenizer = load_small()
    task = chat_task(SORT, tokenizer, instruction=ASK, system="Be brief.")
    prompt = task.prompts("held-out", 1)[0]
    problem = prompt.partition("digits: ")[2].partition("<|im_end|>")[0]
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ASK.replace("{}", problem)},
    ]
    wanted = tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
    assert encode(tokenizer, [prompt]) == [wanted]
    assert wanted.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3
    assert task.verify(prompt, f" {SORT.solution(problem)}\n") == 1
    assert task.solution(prompt) == SORT.solution(problem)
    assert task.split_of(prompt) == SORT.split_of(problem) == "held-out"
    assert chat_task(SORT, tokenizer).prompts("train", 1)[0].startswith("<|im_start|>system\nYou")


def test_several_rewards_go_through_the_frame(load_small) -> None:
    _, tokenizer = load_small()
    task = chat_task(SORT_BOX, tokenizer)
    prompt = task.prompts("train", 1)[0]
    problem = prompt.partition("user\n")[2].partition("<|im_end|>")[0]
    answer = SORT_BOX.solution(problem)
    assert task.rewards(prompt, f"{answer} ") == SORT_BOX.rewards(problem, answer)


def test_a_verifier_of_batches_is_asked_in_batches(load_small) -> None:
    _, tokenizer = load_small()

    def verify(problem: str, response: str) -> float:
        raise AssertionError

    asked = []
    verify.many = lambda problems, responses: (
        asked.append((problems, responses)) or [(1.0, None) for _ in problems]
    )
    task = chat_task(replace(SORT, verify=verify), tokenizer)
    prompts = task.prompts("train", 2)
    assert rate_all(task, prompts, [" a ", "b"]) == [(1.0, None)] * 2
    problems = [prompt.partition("user\n")[2].partition("<|im_end|>")[0] for prompt in prompts]
    assert asked == [(problems, ["a", "b"])]


def test_plain_text_begins_as_the_model_has_seen_texts_begin(load_small) -> None:
    from tokenizers.processors import TemplateProcessing

    _, tokenizer = load_small()
    assert not adds_first(tokenizer)
    assert text_task(SORT, tokenizer).prompts("train", 1)[0][0].isdigit()
    first = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", first)]
    )
    assert adds_first(tokenizer)
    prompt = text_task(SORT, tokenizer, instruction="Sort: {}").prompts("train", 1)[0]
    ids = encode(tokenizer, [prompt])[0]
    assert ids == tokenizer(prompt.removeprefix("<|im_start|>"))["input_ids"]
    assert ids.count(first) == 1


def test_wrong_frames_are_named(load_small) -> None:
    _, tokenizer = load_small()
    with pytest.raises(ValueError, match="instruction: found 'Sort'; wanted a text with one"):
        chat_task(SORT, tokenizer, instruction="Sort")
    with pytest.raises(ValueError, match="max_new_tokens: found 0"):
        chat_task(SORT, tokenizer, max_new_tokens=0)
    with pytest.raises(ValueError, match="it is none of sort/chat"):
        chat_task(SORT, tokenizer).verify("352041=", "012345")
    injected = replace(SORT, problem=lambda rng: "1<|im_end|>")
    with pytest.raises(ValueError, match=re.escape("holds '<|im_end|>', the name of a token")):
        chat_task(injected, tokenizer).prompts("train", 1)
    template, tokenizer.chat_template = tokenizer.chat_template, "{{ raise_exception('no') }}"
    with pytest.raises(ValueError, match="its chat template fails"):
        chat_task(SORT, tokenizer)
    tokenizer.chat_template = template.replace("message['content']", "'hello'")
    with pytest.raises(ValueError, match="does not show what the user says"):
        chat_task(SORT, tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="it has no chat template"):
        chat_task(SORT, tokenizer)


@pytest.mark.parametrize("framed", [True, False], ids=["chat", "text"])
def test_the_sampler_s_logprobs_are_those_of_a_forward_pass(chat, framed) -> None:
    """Prompts of unlike length, padded with the end token; rows without padding, one by one."""
    model, tokenizer, task = chat
    prompts = ["The cat", "Sort these digits: 35", "What is 7 plus"]
    if framed:
        prompts = [*task.prompts("train", 2), task.prompts("train", 1)[0].replace("Sort these", "")]
    out = sample(
        model, tokenizer, prompts, group_size=6, max_new_tokens=12,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    width = out.response_mask.shape[1]
    assert len(set(out.attention_mask[:, :-width].sum(1).tolist())) > 1
    again = response_logprobs(model, out.input_ids, out.attention_mask, width).detach()
    mask = out.response_mask
    torch.testing.assert_close(out.logprobs[mask], again[mask], rtol=0, atol=2e-5)
    for i in range(len(out)):
        ids = out.input_ids[i][out.attention_mask[i].bool()][None]
        with torch.no_grad():
            alone = model(ids).logits[0].log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        n = int(out.lengths[i])
        torch.testing.assert_close(out.logprobs[i, :n], alone[-n:], rtol=0, atol=2e-5)


def test_greedy_is_generate_and_any_end_token_ends(load_small) -> None:
    """transformers reads the same list of end tokens; the end is no part of the text."""
    model, tokenizer = load_small()
    stop = tokenizer.convert_tokens_to_ids("<|stop|>")
    prompts = ["The cat sat", "Sort these digits: 352041", "What"]
    free = sample(model, tokenizer, prompts, max_new_tokens=12, greedy=True)
    # The token that the first row writes third becomes a further end.
    width = free.response_mask.shape[1]
    third = int(free.input_ids[0, -width + 2])
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, stop, third]
    out = sample(model, tokenizer, prompts, max_new_tokens=12, greedy=True)
    first = free.input_ids[0, -width:].tolist().index(third) + 1
    assert out.lengths[0] == first
    assert not out.truncated[0]
    assert out.texts[0] == tokenizer.decode(free.input_ids[0, -width:][: first - 1])
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    theirs = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    for i, ids in enumerate(theirs[:, inputs["input_ids"].shape[1] :]):
        n = int(out.lengths[i])
        assert ids[:n].tolist() == out.input_ids[i, -out.response_mask.shape[1] :][:n].tolist()


def test_rows_of_the_embedding_without_a_token_do_no_harm(load_small) -> None:
    """A model has them where its size was rounded up: they are sampled, scored, and no text."""
    model, tokenizer = load_small()
    with torch.no_grad():  # hidden states become about constant, so that these rows are likely
        model.model.norm.weight.zero_()
    out = sample(
        model, tokenizer, ["The cat"], group_size=200, max_new_tokens=4,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    ids = out.input_ids[:, -out.response_mask.shape[1] :]
    beyond = (ids >= len(tokenizer)) & out.response_mask
    assert beyond.any()
    assert all(isinstance(text, str) for text in out.texts)


def test_one_grpo_step(chat, tmp_path) -> None:
    model, tokenizer, task = chat
    before = {name: w.clone() for name, w in model.state_dict().items()}
    run = train_policy(
        model, tokenizer, task, row("grpo", beta=0.04), steps=1, prompts_per_step=4, group_size=4,
        learning_rate=1e-3, evaluate_every=1, evaluate_n=8, out=tmp_path / "run", **STEP,
    )  # fmt: skip
    (metrics,) = run.metrics
    assert metrics["rows_used"] > 0
    assert abs(metrics["loss"]) < 1
    assert 0 < metrics["grad_norm"] < 1e4
    assert abs(metrics["kl"]) < 1e-6  # at the start
    assert all(not torch.equal(w, before[name]) for name, w in model.state_dict().items())
    again, tokenizer2 = load_pretrained(tmp_path / "run" / "model", device="cpu")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    assert eos_ids(again, tokenizer2) == eos_ids(model, tokenizer)
    assert tokenizer2.chat_template == tokenizer.chat_template
    greedy = [
        sample(m, t, task.prompts("train", 4), max_new_tokens=8, greedy=True)
        for m, t in ((model, tokenizer), (again, tokenizer2))
    ]
    assert greedy[0].texts == greedy[1].texts
    first = run.samples[0]
    assert first["prompt"].startswith("<|im_start|>system")


def test_one_dpo_step(chat, tmp_path) -> None:
    model, tokenizer, task = chat
    pairs = sample_pairs(model, tokenizer, task, 8, seed=0)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    run = train_preference(
        model, tokenizer, pairs, row_over_pairs("dpo"), steps=2, batch_size=8, micro_batch_size=3,
        learning_rate=1e-3, held_out=pairs, evaluate_every=2, **STEP,
    )  # fmt: skip
    first, second = run.metrics
    assert first["loss"] == pytest.approx(0.6931, abs=1e-4)  # policy and reference are one
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert second["loss"] < first["loss"]
    assert all(not torch.equal(w, before[name]) for name, w in model.state_dict().items())


def row_over_pairs(name: str):
    from rlcore.preferences import ROWS

    return {method.name: method for method in ROWS}[name]


def test_the_other_loops_take_it(chat) -> None:
    """SFT, a reward model, and a row with reward model and critic."""
    model, tokenizer, task = chat
    run = train_sft(model, tokenizer, task, steps=2, batch_size=4, learning_rate=1e-3, **STEP)
    assert run.metrics[1]["loss"] > 0
    from rlcore.models import build_scalar_model

    judge = build_scalar_model(model, seed=0)
    pairs = sample_pairs(model, tokenizer, task, 8, seed=1)
    run = train_reward_model(
        judge, tokenizer, pairs, steps=2, batch_size=8, learning_rate=1e-3, **STEP
    )
    assert run.metrics[1]["loss"] < run.metrics[0]["loss"]
    run = train_policy(
        model, tokenizer, task, row("ppo"), steps=1, prompts_per_step=4, group_size=2,
        learning_rate=1e-3, reward_model=judge, **STEP,
    )  # fmt: skip
    assert run.metrics[0]["val/loss"] > 0


def test_demonstrations_end_with_the_end_token_and_masks_follow_lengths(chat) -> None:
    """Padding and the end are one token here: the end is learned, the padding is not."""
    import random

    _, tokenizer, task = chat
    ids, mask = demonstrations(tokenizer, task, 8, random.Random(0))
    for row_ids, row_mask in zip(ids, mask, strict=True):
        trained = row_ids[1:][row_mask].tolist()
        assert trained.count(tokenizer.eos_token_id) == 1
        assert trained[-1] == tokenizer.eos_token_id


def test_pairs_are_scored_as_prompt_and_response_apart(chat) -> None:
    """A response that would merge with the end of its prompt is encoded by itself."""
    from rlcore.training.pairs import encode_pairs

    _, tokenizer, _ = chat
    assert len(encode(tokenizer, ["The ca", "The cat"])[1]) != len(
        [*encode(tokenizer, ["The ca"])[0], *encode(tokenizer, ["t"])[0]]
    )
    rows = encode_pairs(tokenizer, PreferencePairs(("The ca",), ("t",), ("r",)), "cpu")
    prompt = len(encode(tokenizer, ["The ca"])[0])
    assert rows.mask[0].nonzero()[:, 0].tolist() == [prompt - 1, prompt]


def test_what_cannot_be_loaded_is_named(folder, load_small, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="python -m rlcore fetch smollm2-135m"):
        load_pretrained("smollm2-135m")
    with pytest.raises(ValueError, match="'nowhere' is not a model folder"):
        load_pretrained("nowhere")
    with pytest.raises(ValueError, match="'tests/nothing' is not a model folder"):
        load_pretrained("tests/nothing")
    with pytest.raises(ValueError, match="revision: found 'main'"):
        load_pretrained(folder, revision="main")
    model, tokenizer = load_small()
    tokenizer.add_tokens([f"<new {i}>" for i in range(9)])
    wide = save(model, tokenizer, tmp_path / "wide")
    with pytest.raises(ValueError, match="it has the token 3"):
        load_pretrained(wide)
    _, tokenizer = load_small()
    tokenizer.eos_token = None
    endless = save(model, tokenizer, tmp_path / "endless")
    with pytest.raises(ValueError, match="it has no end token"):
        load_pretrained(endless)


def test_a_hub_name_goes_to_the_hub(folder, monkeypatch) -> None:
    """With the revision, and as a model that trains; what the hub says is in the error."""
    import transformers

    asked = []

    def read(self_class):
        def from_pretrained(name, revision=None, **rest):
            asked.append((name, revision))
            if name == "no/such":
                raise OSError("not on the hub\nmore")
            return original[self_class](folder, **rest)

        return from_pretrained

    classes = (transformers.AutoTokenizer, transformers.AutoModelForCausalLM)
    original = {cls: cls.from_pretrained for cls in classes}
    for cls in classes:
        monkeypatch.setattr(cls, "from_pretrained", read(cls))
    model, tokenizer = load_pretrained("owner/model", revision="abc", device="cpu", dtype="float64")
    assert asked == [("owner/model", "abc")] * 2
    assert model.dtype == torch.float64
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    with pytest.raises(ValueError, match=r"the hub gave no such model \(OSError: not on the hub\)"):
        load_pretrained("no/such")


def test_the_plain_loader_reads_what_was_saved(load_small, tmp_path: Path) -> None:
    model, tokenizer = load_small()
    again, _ = load(save(model, tokenizer, tmp_path / "m"), device="cpu")
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
