"""`python -m rlcore`: does what the notebook does, and says in one line what is wrong."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch

from rlcore import models, training
from rlcore.__main__ import main
from rlcore.algorithms import Algorithm, by_name
from rlcore.preferences import ROWS as OVER_PAIRS
from rlcore.tasks import get_task, load_pairs, sample_pairs
from rlcore.training import read_run, recipe, row, sft_start, train_policy

SMALL = ["--sft-steps", "6", "--sft-batch-size", "8", "--steps", "3", "--prompts-per-step", "4",
         "--group-size", "4", "--size", "nano", "--n", "16", "--threads", "1", "--device", "cpu",
         "--quiet"]  # fmt: skip


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlcore", *map(str, words)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def test_the_command_is_the_notebook_bit_for_bit(tmp_path) -> None:
    """The chapter's three lines, and the command in a process of its own: the same weights."""
    setup = recipe(
        "sort",
        size="nano",
        sft_steps=6,
        sft_batch_size=8,
        steps=3,
        prompts_per_step=4,
        group_size=4,
    )
    model, tokenizer, task, sft_run = sft_start(
        setup, seed=1, progress=False, threads=1, device="cpu"
    )
    run = train_policy(
        model, tokenizer, task, row("grpo"), **setup.policy_settings(), seed=1, progress=False,
        threads=1, device="cpu",
    )  # fmt: skip
    out = tmp_path / "run"
    done = command("train", "grpo", "--task", "sort", "--seed", "1", "--out", out, *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert "finished after 3 steps" in done.stdout
    assert "step 0: held-out accuracy: greedy 0.0" in done.stdout
    loaded, _ = models.load(out / "model", device="cpu")
    for a, b in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)
    recorded = read_run(out)
    assert recorded.metrics == run.metrics
    assert read_run(out / "start").metrics == sft_run.metrics
    assert recorded.settings["seed"] == 1

    described = json.loads((out / "run.json").read_text("utf-8"))
    assert described["command"].startswith("python -m rlcore train grpo --task sort --seed 1")
    assert described["threads"] == 1
    assert described["device"] == "cpu"
    assert described["versions"]["torch"] == torch.__version__
    assert set(described) >= {"commit", "cpu", "seconds", "settings", "status"}


def test_two_threads_give_the_same_bits_each_time(tmp_path, monkeypatch) -> None:
    """SFT, sampling and updates, of batches so large that threads share their tensors; rewards of
    reviews differ, so that there is something to learn."""
    # A thread that waits for another one does not keep it from a processor with other work.
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    wide = ["--sft-steps", "2", "--sft-batch-size", "64", "--prompts-per-step", "16",
            "--group-size", "8", "--steps", "2", "--evaluate-every", "0",
            "--threads", "2"]  # fmt: skip
    runs, texts = [], []
    for name in ("first", "second"):
        out = tmp_path / name
        done = command("train", "grpo", "--task", "reviews", "--out", out, *SMALL, *wide)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads((out / "run.json").read_text("utf-8"))["threads"] == 2
        runs.append(read_run(out))
        texts.append((out / "model" / "model.safetensors").read_bytes())
    assert min(runs[0].curve("grad_norm")[1]) > 0
    assert runs[0].metrics == runs[1].metrics
    assert texts[0] == texts[1]


def test_start_resume_and_evaluate(tmp_path, capsys) -> None:
    """--start gives the same bits as the command's own SFT; --resume does nothing twice."""
    whole, start, parts = tmp_path / "whole", tmp_path / "start", tmp_path / "parts"
    small = [*SMALL]
    policy = small[4:10] + small[12:]
    common = ["--task", "robot", "--seed", "2"]
    assert main(["train", "rloo", *common, "--out", str(whole), *small]) == 0
    sft = [*small[:4], *small[10:12], *small[14:]]
    assert main(["train", "sft", *common, "--out", str(start), *sft]) == 0
    own = ["--start", str(start / "model"), "--out", str(parts)]
    assert main(["train", "rloo", *common, *own, *policy]) == 0
    texts = [(path / "model" / "model.safetensors").read_bytes() for path in (whole, parts)]
    assert texts[0] == texts[1]

    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*.jsonl")}
    capsys.readouterr()
    assert main(["train", "rloo", *common, "--out", str(whole), *small, "--resume"]) == 0
    assert "finished after 3 steps" in capsys.readouterr().out
    assert read_run(whole).metrics == read_run(parts).metrics
    assert before.keys() == {path: 0 for path in whole.rglob("*.jsonl")}.keys()

    assert main(["evaluate", *common, "--model", str(whole / "model"), "--n", "16"]) == 0
    assert "held-out accuracy: greedy 0." in capsys.readouterr().out


def test_an_interrupt_at_any_moment_is_130(monkeypatch) -> None:
    """Also while the imports run, which take longer than many a command."""

    usual = builtins.__import__

    def interrupted(name: str, *rest: object, **more: object) -> object:
        if name == "rlcore.training":
            raise KeyboardInterrupt
        return usual(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", interrupted)
    status = main(["tasks"])
    monkeypatch.undo()
    assert status == 130


def test_a_damaged_model_is_one_line_and_status_2(tmp_path) -> None:
    tokenizer = models.build_tokenizer("ab")
    models.save(models.build_model("nano", tokenizer, seed=0), tokenizer, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"")
    done = command("evaluate", "--task", "sort", "--model", tmp_path / "m")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot be read" in done.stderr


def test_lists(capsys) -> None:
    assert main(["tasks"]) == 0
    out = capsys.readouterr().out
    for name in ("sort\n", "sort-unseen\n", "robot\n", "Good for: "):
        assert name in out
    assert main(["algorithms"]) == 0
    out = capsys.readouterr().out
    for name in ("grpo: GRPO.", "rloo:", "reinforce:", "dr-grpo:", "Worth more than what?"):
        assert name in out
    assert out.count("What does `train` need? any task\n") == 16
    assert out.count("--reward-model, or the reward is the task's verifier; a critic") == 1
    assert out.count("any task; a critic, made from the start") == 1
    assert out.count("a task with several rewards, such as sort-box") == 1
    assert out.count("such as reviews: pairs are sampled there") == len(OVER_PAIRS)
    assert "simpo: SimPO" in out


GOOD = ["train", "grpo", "--task", "sort", "--out", "OUT", *SMALL]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train", "ppo2", "--task", "sort", "--out", "OUT"],
            "algorithm: found 'ppo2'; wanted one of sft, .*grpo, .*reward-model, dpo, .*, "
            "perhaps ppo$",
        ),
        (["train", "reward_model", *GOOD[2:]], "wanted one of .*, perhaps reward-model$"),
        (["train", "chess", *GOOD[2:]], "algorithm: found 'chess'; wanted one of .*, kto$"),
        (
            ["train", "gdpo", "--task", "sort", "--out", "OUT"],
            "task: 'sort' has one reward, gdpo takes several; wanted .* such as sort-box",
        ),
        ([*GOOD, "--reward-model", "no"], "error: --reward-model: 'no' is not a model folder"),
        ([*GOOD, "--score-normalization", "start"], "score_normalization: grpo has no score"),
        ([*GOOD, "--score-normalization", "all"], "score_normalization: found 'all'; wanted one"),
        ([*GOOD, "--critic-learning-rate", "1"], "critic_learning_rate: grpo has no critic"),
        ([*GOOD, "--bootstrap-truncated"], "bootstrap_truncated: grpo has no critic"),
        ([*GOOD, "--value-pretraining-steps", "1"], "value_pretraining_steps: grpo has no critic"),
        (
            [
                "train",
                "ppo",
                "--task",
                "sort",
                "--out",
                "OUT",
                *SMALL,
                "--value-pretraining-steps",
                "3",
            ],
            "value_pretraining_steps: found 3; wanted fewer than steps, 3",
        ),
        (
            [
                "train",
                "ppo",
                "--task",
                "sort",
                "--out",
                "OUT",
                *SMALL,
                "--critic-learning-rate",
                "0",
            ],
            "critic_learning_rate: found 0.0; wanted a finite number above 0",
        ),
        (
            ["train", "grpo", "--task", "chess", "--out", "OUT"],
            "task: found 'chess'; wanted one of",
        ),
        (["train", "grpo", "--out", "OUT"], "required: --task"),
        (["train", "grpo", "--task", "sort"], "required: --out"),
        ([*GOOD, "--size", "7B"], "size: found '7B'; wanted one of nano"),
        ([*GOOD, "--steps", "0"], "steps: found 0"),
        ([*GOOD, "--steps", "many"], "--steps: invalid int value: 'many'"),
        ([*GOOD, "--learning-rate", "-1"], "learning_rate: found -1.0"),
        ([*GOOD, "--learning-rate", "nan"], "learning_rate: found nan"),
        ([*GOOD, "--group-size", "1"], "group_size: found 1; wanted .* at least 2"),
        ([*GOOD, "--seed", "-1"], "seed: found -1"),
        ([*GOOD, "--beta", "-1"], "beta"),
        ([*GOOD, "--length-alpha", "0.5"], "--length-alpha has no meaning with grpo"),
        (
            ["train", "gdpo", "--task", "sort-box", "--out", "OUT", "--reward-model", "no"],
            "not a model folder",
        ),
        ([*GOOD, "--pairs", "8"], "--pairs has no meaning with grpo"),
        ([*GOOD, "--batch-size", "8"], "--batch-size has no meaning with grpo"),
        (
            ["train", "reward-model", "--task", "reviews", "--out", "OUT", "--batch-size", "0"],
            "preference_batch_size: found 0",
        ),
        (
            ["train", "dpo", "--task", "reviews", "--out", "OUT", "--group-size", "4"],
            "--group-size has no meaning with dpo",
        ),
        (
            ["train", "dpo", "--task", "reviews", "--out", "OUT", "--steps", "0"],
            "preference_steps: found 0",
        ),
        (
            ["train", "dpo", "--task", "reviews", "--out", "OUT", "--pairs-file", "nowhere"],
            "--pairs-file: found 'nowhere'; wanted a file that exists",
        ),
        ([*GOOD, "--beta", "x"], "--beta: found 'x'; wanted a number or 'paper'"),
        ([*GOOD, "--updates-per-batch", "0"], "updates_per_batch: found 0"),
        ([*GOOD, "--max-sampling-rounds", "0"], "max_sampling_rounds: found 0"),
        ([*GOOD, "--evaluate-every", "-1"], "evaluate_every: found -1"),
        ([*GOOD, "--out", ""], "out: found ''"),
        ([*GOOD, "--out", __file__], "out: .*test_command.py' is a file"),
        *(
            (["train", "sft", "--task", "sort", "--out", "OUT", *words], "has no meaning with sft")
            for words in (
                ["--beta", "0"],
                ["--n", "8"],
                ["--temperature", "1"],
                ["--measure-kl"],
                ["--reward-model", "x"],
                ["--critic-learning-rate", "1"],
            )
        ),
        (
            [*GOOD, "--temperature", "0"],
            "error: --temperature: found 0.0; wanted .* above 0 .each evaluation gives the greedy",
        ),
        (
            ["evaluate", "--task", "sort", "--model", "no", "--temperature", "0"],
            "error: --temperature: found 0.0; wanted a finite number above 0 .each evaluation",
        ),
        ([*GOOD, "--lora", "100000"], "error: --lora: found 100000; wanted at most 32, the"),
        (
            ["train", "reward-model", *GOOD[2:6], "--size", "nano", "--lora", "33"],
            "error: --lora: found 33; wanted at most 32",
        ),
        ([*GOOD, "--reward-model", ""], "error: --reward-model: found ''; wanted the name of a"),
        (
            ["train", "dpo", "--task", "reviews", "--out", "OUT", "--pairs-file", "."],
            "error: --pairs-file: found the folder '.'; wanted a file",
        ),
        (
            ["train", "grpo", "--task", "sort", "--out", "OUT", "--start", ""],
            r"error: --start \(--model\): found ''; wanted the name of a model folder",
        ),
        ([*GOOD, "--threads", "0"], "threads: found 0"),
        ([*GOOD, "--device", "tpu"], "device: "),
        ([*GOOD, "--n", "0"], "n: found 0"),
        ([*GOOD, "--start", "nowhere"], "--size has no meaning with --start"),
        (
            ["train", "grpo", "--task", "sort", "--out", "OUT", "--start", "no"],
            r"error: --start \(--model\): 'no' is not a model folder",
        ),
        (
            ["train", "sft", "--task", "sort", "--out", "OUT", "--steps", "3"],
            "--steps has no meaning",
        ),
        (
            ["evaluate", "--task", "sort", "--model", "no"],
            "--model: 'no' is not a model folder",
        ),
        (["evaluate", "--task", "sort"], "required: --model"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "required"),
    ],
)
def test_bad_values_are_one_line_and_status_2(words, message: str, tmp_path, capsys) -> None:
    words = [str(tmp_path / "run") if word == "OUT" else word for word in words]
    try:
        status = main(words)
    except SystemExit as stopped:  # argparse
        status = stopped.code
    error = capsys.readouterr().err
    assert status == 2
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()  # nothing was trained and nothing written
    import re

    assert re.search(message, error), error


def test_a_folder_in_use_is_refused_before_any_training(tmp_path, capsys) -> None:
    out = ["--out", str(tmp_path)]
    assert main(["train", "grpo", "--task", "sort", *out, *SMALL]) == 0
    assert main(["train", "grpo", "--task", "sort", *out, *SMALL]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_a_resume_of_nothing_starts_and_says_so(tmp_path, capsys) -> None:
    """A job's script passes --resume always; a misspelt folder must not pass for the old one."""
    words = ["train", "grpo", "--task", "sort", "--out", str(tmp_path / "run"), *SMALL, "--resume"]
    assert main(words) == 0
    said = capsys.readouterr().err.splitlines()
    wanted = "resume: {} holds no checkpoint; the run starts anew"
    assert said == [wanted.format(tmp_path / "run" / "start"), wanted.format(tmp_path / "run")]
    assert main(words) == 0
    assert capsys.readouterr().err == ""


def test_a_start_of_another_task_is_an_error(tmp_path, capsys) -> None:
    model = tmp_path / "m"
    tokenizer = models.build_tokenizer("ab")
    models.save(models.build_model("nano", tokenizer, seed=0), tokenizer, model)
    words = ["train", "grpo", "--task", "sort", "--out", str(tmp_path / "r"), "--start", str(model)]
    assert main([*words, "--quiet"]) == 2
    error = capsys.readouterr().err
    found = "error: --start (--model): found a model that cannot read the task sort; wanted"
    assert found in error
    assert "characters without a token" in error
    assert not (tmp_path / "r").exists()  # the right command is not refused afterwards
    assert main(["train", "sft", *words[2:], "--quiet"]) == 2
    assert found in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
    assert main(["evaluate", "--task", "sort", "--model", str(model)]) == 2
    assert found.replace("--start (--model)", "--model") in capsys.readouterr().err


def saved(folder, task: str, *, scalar: bool = False) -> str:
    """A small random model of a task, and the name of its folder."""
    tokenizer = models.build_tokenizer(get_task(task).vocabulary)
    model = models.build_model("nano", tokenizer, seed=0, max_length=64)
    models.save(
        models.build_scalar_model(model, seed=0) if scalar else model, tokenizer, folder / task
    )
    return str(folder / task)


@pytest.mark.parametrize("given", [True, False], ids=["start", "sft"])
def test_a_reward_model_of_another_tokenizer_is_refused(given: bool, tmp_path, capsys) -> None:
    """That of reviews has more tokens than sort: without a look at the names it would train."""
    start = ["--start", saved(tmp_path, "sort"), *SMALL[4:10], *SMALL[12:]] if given else SMALL
    judge = saved(tmp_path, "reviews", scalar=True)
    words = ["train", "ppo", "--task", "sort", *start, "--out", str(tmp_path / "run")]
    assert main([*words, "--reward-model", judge]) == 2
    error = capsys.readouterr().err
    assert "error: --reward-model: found a model of another tokenizer, whose token 2 is " in error
    assert error.endswith("wanted that of the start\n")
    assert not (tmp_path / "run").exists()


def test_a_response_longer_than_the_model_is_said_of_the_option(tmp_path, capsys) -> None:
    """The longest that fits is trained on; sort's prompts have 7 tokens each."""
    model = saved(tmp_path, "sort")
    words = ["--task", "sort", "--max-new-tokens"]
    started = ["--start", model, "--out", str(tmp_path / "run"), *SMALL[4:10], *SMALL[12:]]
    error = "error: --max-new-tokens: found 58; wanted at most 57: the model has 64 positions"
    assert main(["train", "grpo", *words, "58", *started]) == 2
    assert error in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["evaluate", *words, "58", "--model", model]) == 2
    assert error in capsys.readouterr().err
    assert main(["train", "grpo", *words, "57", *started]) == 0


def test_a_pairs_file_without_pairs_is_said_of_the_option(tmp_path, capsys) -> None:
    empty = tmp_path / "pairs.jsonl"
    empty.write_bytes(b"")
    words = ["train", "dpo", "--task", "reviews", "--out", str(tmp_path / "run")]
    assert main([*words, "--pairs-file", str(empty)]) == 2
    assert f"error: --pairs-file: {str(empty)!r} holds no pairs" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["grpo", "reward-model"])
def test_a_rank_above_those_of_the_start_is_said_of_the_option(name, tmp_path, capsys) -> None:
    words = ["--start", saved(tmp_path, "sort"), "--out", str(tmp_path / "run"), "--lora", "33"]
    assert main(["train", name, "--task", "sort", *words]) == 2
    assert "error: --lora: found 33; wanted at most 32" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_recipes_are_complete_and_changes_are_checked() -> None:
    from rlcore.tasks import TASKS

    assert set(training.RECIPES) == set(TASKS)
    changed = recipe("sort", steps=7)
    assert changed.policy_settings()["steps"] == 7
    with pytest.raises(ValueError, match="recipe: no setting stepz; wanted one of task, size"):
        recipe("sort", stepz=7)
    names = {field.name for field in fields(changed)}
    assert {"steps", "learning_rate", "group_size", "prompts_per_step"} <= names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 1}, "group_size: found 1; wanted a whole number of at least 2"),
        ({"steps": 0}, "steps: found 0; wanted a whole number of at least 1"),
        ({"sft_steps": 2.5}, "sft_steps: found 2.5; wanted a whole number"),
        ({"learning_rate": -1.0}, "learning_rate: found -1.0; wanted a finite number above 0"),
    ],
)
def test_a_recipe_is_checked_before_anything_is_trained(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        recipe("sort", **change)


def test_the_command_trains_a_row_that_samples_on(tmp_path) -> None:
    """DAPO with a limit of its own: what the notebook's call does, bit for bit."""
    setup = recipe("sort", size="nano", sft_steps=6, sft_batch_size=8, steps=3, prompts_per_step=4,
                   group_size=4)  # fmt: skip
    model, tokenizer, task, _ = sft_start(setup, seed=1, progress=False, threads=1, device="cpu")
    run = train_policy(
        model, tokenizer, task, row("dapo"), **setup.policy_settings(), seed=1, progress=False,
        threads=1, device="cpu", max_sampling_rounds=2,
    )  # fmt: skip
    words = ["train", "dapo", "--task", "sort", "--seed", "1", "--out", str(tmp_path / "run")]
    assert main([*words, *SMALL, "--max-sampling-rounds", "2"]) == 0
    recorded = read_run(tmp_path / "run")
    assert recorded.metrics == run.metrics
    assert recorded.settings["max_sampling_rounds"] == 2
    assert recorded.metrics[0]["sampling_rounds"] == 2


def test_the_command_trains_ppo_on_a_verifier_and_says_so(tmp_path, capsys) -> None:
    """What the notebook's call does, bit for bit; the record's row has the verifier in it."""
    setup = recipe("sort", size="nano", sft_steps=6, sft_batch_size=8, steps=3, prompts_per_step=4,
                   group_size=4)  # fmt: skip
    model, tokenizer, task, _ = sft_start(setup, seed=1, progress=False, threads=1, device="cpu")
    run = train_policy(
        model, tokenizer, task, row("ppo", reward="verifier"), **setup.policy_settings(), seed=1,
        progress=False, threads=1, device="cpu", critic_learning_rate=3e-3,
        bootstrap_truncated=True, value_pretraining_steps=1,
    )  # fmt: skip
    words = ["train", "ppo", "--task", "sort", "--seed", "1", "--out", str(tmp_path / "run")]
    more = ["--critic-learning-rate", "3e-3", "--bootstrap-truncated",
            "--value-pretraining-steps", "1"]  # fmt: skip
    assert main([*words, *SMALL, *more]) == 0
    assert "without --reward-model the reward is the task's verifier" in capsys.readouterr().out
    recorded = read_run(tmp_path / "run")
    assert recorded.metrics == run.metrics
    assert recorded.settings["algorithm"]["reward"] == "verifier"
    assert recorded.settings["critic_learning_rate"] == 3e-3
    loaded, _ = models.load(tmp_path / "run" / "model", device="cpu")
    for a, b in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_command_trains_on_a_reward_model(algorithm: str, tmp_path) -> None:
    tokenizer = models.build_tokenizer(get_task("sort").vocabulary)
    scorer = models.build_scalar_model(models.build_model("nano", tokenizer, seed=3), seed=3)
    models.save(scorer, tokenizer, tmp_path / "judge")
    words = ["train", algorithm, "--task", "sort", "--out", str(tmp_path / "run"), *SMALL]
    more = ["--reward-model", str(tmp_path / "judge"), "--score-normalization", "start"]
    assert main([*words, *more]) == 0
    run = read_run(tmp_path / "run")
    assert run.settings["algorithm"]["reward"] == "reward_model"
    assert run.settings["score_normalization"] == "start"
    assert 0 <= run.metrics[0]["true_reward"] <= 1
    assert run.metrics[0]["reward"] == pytest.approx(0, abs=1e-6)


def test_the_command_trains_several_rewards_and_vapo(tmp_path) -> None:
    words = ["train", "gdpo", "--task", "sort-box", "--out", str(tmp_path / "gdpo"), *SMALL]
    assert main(words) == 0
    assert "rewards/correct/mean" in read_run(tmp_path / "gdpo").metrics[0]
    words = ["train", "vapo", "--task", "sort", "--out", str(tmp_path / "vapo"), *SMALL]
    assert main([*words, "--length-alpha", "paper"]) == 0
    run = read_run(tmp_path / "vapo")
    assert run.settings["algorithm"]["length_alpha"] == 0.05
    assert run.settings["value_pretraining_steps"] == 1


PAIRED = ["--task", "reviews", "--sft-steps", "20", "--sft-batch-size", "16", "--size", "nano",
          "--steps", "3", "--pairs", "64", "--n", "16", "--threads", "1", "--device", "cpu",
          "--quiet"]  # fmt: skip


def test_the_command_trains_a_reward_model_and_ppo_climbs_it(tmp_path, capsys) -> None:
    """From the same start; the command of the reward model is what the notebook does."""
    judge, out = tmp_path / "judge", tmp_path / "run"
    words = ["train", "reward-model", *PAIRED, "--batch-size", "48", "--out", str(judge)]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "step 3: held-out pairs: loss" in said
    setup = recipe("reviews", size="nano", sft_steps=20, sft_batch_size=16, reward_steps=3,
                   preference_batch_size=48)  # fmt: skip
    quiet = {"progress": False, "threads": 1, "device": "cpu"}
    model, tokenizer, task, _ = sft_start(setup, seed=0, **quiet)
    pairs = load_pairs(judge / "pairs.jsonl")
    assert pairs == sample_pairs(model, tokenizer, task, 64, seed=0)
    scorer = models.build_scalar_model(model, seed=0)
    run = training.train_reward_model(
        scorer, tokenizer, pairs, **setup.reward_settings(), seed=0, **quiet
    )
    recorded = read_run(judge)
    assert recorded.metrics == run.metrics
    loaded, _ = models.load_scalar_model(judge / "model", device="cpu")
    for a, b in zip(scorer.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)

    words = ["--start", str(judge / "start" / "model"), "--reward-model", str(judge / "model")]
    few = ["--steps", "2", "--prompts-per-step", "4", "--group-size", "4", *PAIRED[-7:]]
    assert main(["train", "ppo", "--task", "reviews", *words, *few, "--out", str(out)]) == 0
    assert "held-out true reward: greedy" in capsys.readouterr().out
    assert read_run(out).settings["algorithm"]["reward"] == "reward_model"


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_the_command_trains_on_pairs(name: str, tmp_path, capsys) -> None:
    """Stopped nowhere and gone on: the same run; the pairs of a file are those of the start."""
    out = tmp_path / "run"
    words = ["train", name, *PAIRED, "--learning-rate", "1e-3", "--batch-size", "16"]
    assert main([*words, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "step 3: held-out true reward: greedy" in said
    first = read_run(out)
    assert first.settings["batch_size"] == 16
    assert first.settings["learning_rate"] == 1e-3
    assert main([*words, "--out", str(out), "--resume"]) == 0
    assert read_run(out).metrics == first.metrics
    again = ["train", name, "--task", "reviews", "--start", str(out / "start" / "model"),
             "--pairs-file", str(out / "pairs.jsonl"), "--learning-rate", "1e-3", *PAIRED[8:10],
             *PAIRED[12:], "--batch-size", "16"]  # fmt: skip
    assert main([*again, "--out", str(tmp_path / "again")]) == 0
    assert read_run(tmp_path / "again").metrics == first.metrics


@pytest.mark.parametrize(("algorithm", "says_so"), [("grpo", True), ("vapo", False)])
def test_a_run_without_any_advantage_says_so(algorithm, says_so, tmp_path, capsys) -> None:
    """Every answer of this start is wrong. With a critic something is trained all the same."""
    assert main(["train", algorithm, "--task", "sort", "--out", str(tmp_path / "run"), *SMALL]) == 0
    rows = read_run(tmp_path / "run").metrics
    assert not any(row["reward"] for row in rows)
    assert ("nothing was trained" in capsys.readouterr().out) == says_so


@pytest.mark.parametrize(
    ("words", "kl", "beta"),
    [
        ([], "none", 0.0),
        (["--set", "beta=0.3"], "loss", 0.3),
        (["--set", "kl=loss"], "loss", 0.04),
        (["--set", "kl=none", "--set", "beta=0"], "none", 0.0),
        (["--set", "kl=reward", "--set", "kl_estimator=k1", "--beta", "0.2"], "reward", 0.2),
    ],
)
def test_the_recipe_takes_back_nothing_that_was_set(words, kl, beta, tmp_path) -> None:
    """It leaves the KL term out where nothing is said of it."""
    run = ["train", "grpo", "--task", "sort", "--out", str(tmp_path / "run")]
    assert main([*run, *SMALL, *words]) == 0
    algorithm = read_run(tmp_path / "run").settings["algorithm"]
    assert (algorithm["kl"], algorithm["beta"]) == (kl, beta)


def test_set_changes_choices_of_a_row(tmp_path) -> None:
    """The record says what was run; a row over pairs likewise."""
    common = ["--task", "sort", "--out"]
    chosen = ["--set", "epsilon_high=0.28", "--set", "overlong=penalty", "--set", "ratio_max=None",
              "--set", "dynamic_sampling=True", "--max-sampling-rounds", "1",
              "--samples-per-prompt", "3"]  # fmt: skip
    assert main(["train", "grpo", *common, str(tmp_path / "a"), *SMALL, *chosen]) == 0
    run = read_run(tmp_path / "a")
    changed = {"epsilon_high": 0.28, "overlong": "penalty", "dynamic_sampling": True}
    wanted = row(replace(by_name("grpo"), **changed))
    assert Algorithm(**run.settings["algorithm"]) == replace(wanted, notes=())
    assert "distinct_right" in run.evaluations[0]
    pairs = ["--start", str(tmp_path / "a" / "model"), "--pairs", "64", "--steps", "1", "--quiet"]
    own = [*common[:1], "reviews", *common[2:], str(tmp_path / "b")]
    start = ["--size", "nano", "--sft-steps", "2", "--sft-batch-size", "4"]
    words = ["--n", "8", "--set", "link=hinge", "--set", "beta=0.3", *pairs[2:], *start]
    assert main(["train", "dpo", *own, *words]) == 0
    assert {"link": "hinge", "beta": 0.3}.items() <= read_run(tmp_path / "b").settings[
        "row"
    ].items()


@pytest.mark.parametrize(
    ("algorithm", "words", "message"),
    [
        ("grpo", ["--set", "epsilon=1"], "--set: found 'epsilon=1'; wanted FIELD=VALUE"),
        ("grpo", ["--set", "beta"], "--set: found 'beta'"),
        ("grpo", ["--set", "name=mine"], "--set: found 'name=mine'"),
        ("grpo", ["--set", "overlong=drop"], "overlong"),
        ("grpo", ["--set", "epsilon_high=much"], "epsilon_high"),
        ("dpo", ["--set", "gamma=x"], "gamma"),
        ("sft", ["--set", "beta=1"], "--set has no meaning with sft"),
        ("sft", ["--samples-per-prompt", "2"], "--samples-per-prompt has no meaning with sft"),
        ("grpo", ["--samples-per-prompt", "0"], "samples_per_prompt: found 0"),
    ],
)  # fmt: skip
def test_set_refuses_what_is_no_choice(algorithm, words, message, tmp_path, capsys) -> None:
    out = tmp_path / "run"
    task = "reviews" if algorithm == "dpo" else "sort"
    assert main(["train", algorithm, "--task", task, "--out", str(out), *words]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
