"""`python -m rlcore train ... --model MODEL`: from a pretrained model, with chat and LoRA."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcore import training
from rlcore.__main__ import main
from rlcore.models import load
from rlcore.tasks import load_pairs
from rlcore.training import read_run

ASK = "Sort these digits: {}"
QUIET = ["--device", "cpu", "--threads", "1", "--quiet", "--max-new-tokens", "4"]
SMALL = ["--steps", "1", "--prompts-per-step", "4", "--group-size", "4", "--n", "4"]


def train(name: str, model: Path | str, out: Path, *more: str, task: str = "sort") -> int:
    start = ["train", name, "--task", task, "--model", str(model), "--out", str(out)]
    return main([*start, *QUIET, *more])


def test_grpo_with_chat_and_lora(folder, tmp_path, capsys) -> None:
    out = tmp_path / "r"
    more = ["--chat", ASK, "--lora", "4", "--micro-batch-size", "5", *SMALL]
    assert train("grpo", folder, out, *more) == 0
    run = read_run(out)
    assert run.settings["task"] == "sort/chat"
    assert run.settings["micro_batch_size"] == 5
    assert set(run.settings) >= {"frozen", "parameters"}
    assert run.samples[0]["prompt"].startswith("<|im_start|>system\nYou are a small model")
    assert "user\nSort these digits: " in run.samples[0]["prompt"]
    words = ["evaluate", "--task", "sort", "--model", str(out / "model"), "--n", "4", *QUIET[:2]]
    capsys.readouterr()
    assert main([*words, "--chat", ASK, "--max-new-tokens", "4"]) == 0
    assert f"greedy {run.evaluations[-1]['greedy']:.3f}" in capsys.readouterr().out


def test_sft_dpo_and_a_reward_model(folder, tmp_path) -> None:
    sft = tmp_path / "sft"
    few = ["--sft-steps", "2", "--sft-batch-size", "4"]
    assert train("sft", folder, sft, "--chat", ASK, *few, task="reviews") == 0
    assert read_run(sft).settings["task"] == "reviews/chat"
    few = ["--chat", "--lora", "2", "--steps", "1", "--pairs", "8", "--n", "8"]
    assert train("dpo", sft / "model", tmp_path / "dpo", *few, task="reviews") == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(training.recipes.RECIPES, "reviews", small_pairs())
        assert train("dpo", sft / "model", tmp_path / "dpo", *few, task="reviews") == 0
        judge = tmp_path / "judge"
        assert train("reward-model", sft / "model", judge, *few, task="reviews") == 0
    assert load_pairs(tmp_path / "dpo" / "pairs.jsonl").prompts[0].startswith("<|im_start|>")
    assert read_run(tmp_path / "dpo").metrics[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert "frozen" in read_run(judge).settings


def small_pairs() -> training.Recipe:
    from dataclasses import replace

    return replace(training.RECIPES["reviews"], preference_batch_size=8)


def test_a_compact_model_takes_lora_after_its_own_sft(tmp_path) -> None:
    words = ["train", "grpo", "--task", "sort", "--out", str(tmp_path / "r"), *QUIET[:5], *SMALL]
    sft = ["--size", "nano", "--sft-steps", "2", "--sft-batch-size", "4", "--lora", "2"]
    assert main([*words, *sft]) == 0
    assert "frozen" in read_run(tmp_path / "r").settings
    assert "frozen" not in json.loads((tmp_path / "r" / "start" / "run.json").read_text())
    model, _ = load(tmp_path / "r" / "model", device="cpu")
    assert model.config.hidden_size == 32


def test_a_name_takes_the_settings_for_pretrained_models(folder, tmp_path, monkeypatch) -> None:
    """A folder takes the recipe's, as it may hold a compact model."""
    from rlcore import command

    monkeypatch.setenv("RLCORE_CACHE", str(folder.parent))
    (folder.parent / "smollm2-135m").symlink_to(folder)
    seen = []
    monkeypatch.setattr(command.training, "train_policy", lambda *a, **k: seen.append(k) or stop())
    for model in ("smollm2-135m", folder):
        with pytest.raises(Stop):
            main(["train", "grpo", "--task", "sort", "--model", str(model), "--out", "x"])
    with pytest.raises(Stop):
        main(["train", "grpo", "--task", "sort", "--model", "smollm2-135m", "--out", "x",
              "--learning-rate", "0.1"])  # fmt: skip
    assert [k["learning_rate"] for k in seen] == [1e-5, 5e-4, 0.1]
    assert [k["prompts_per_step"] for k in seen] == [8, 32, 8]


class Stop(Exception):
    pass


def stop() -> None:
    raise Stop


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["grpo", "--chat"], "--chat has no meaning with grpo without --start"),
        (["grpo", "--revision", "a"], "--revision has no meaning with grpo without --start"),
        (["sft", "--lora", "2"], "--lora has no meaning with sft without --start"),
        (["sft", "--start", "M", "--size", "nano"], "--size has no meaning with --start"),
        (["sft", "--start", "M", "--micro-batch-size", "2"], "--micro-batch-size has no meaning"),
        (["grpo", "--start", "M", "--micro-batch-size", "0"], "micro_batch_size: found 0"),
        (["grpo", "--start", "M", "--lora", "0"], "--lora: found 0"),
        (["grpo", "--start", "M", "--revision", "a"], "revision: found 'a'"),
        (["grpo", "--start", "M", "--chat", "Sort"], "instruction: found 'Sort'"),
        (["grpo", "--start", "M", "--max-new-tokens", "0"], "max_new_tokens: found 0"),
        (["grpo", "--start", "smollm2-135m"], "rlcore fetch smollm2-135m"),
    ],
)
def test_wrong_words_are_named(words, message, folder, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path))
    given = [str(folder) if word == "M" else word for word in words]
    out = tmp_path / "r"
    assert main(["train", *given, "--task", "sort", "--out", str(out), "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
