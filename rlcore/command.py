"""What `python -m rlcore train` does: SFT, and from there RL or a method over preference pairs."""

from __future__ import annotations

import ast
import difflib
import inspect
import random
import re
import runpy
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from rlcore import algorithms, models, preferences, training
from rlcore.checks import (
    check_folder,
    check_seed,
    check_temperature,
    check_threads,
    check_whole,
    shown,
)
from rlcore.devices import using_threads
from rlcore.lora import Lora, add_lora, check_rank
from rlcore.pretrained import is_known, load_pretrained
from rlcore.tasks import (
    PreferencePairs,
    Task,
    adds_first,
    chat_task,
    get_task,
    load_pairs,
    sample_pairs,
    text_task,
)
from rlcore.training.critic import critic_settings
from rlcore.training.judge import ABSTAINED, reward_settings
from rlcore.training.processes import Processes, processes
from rlcore.training.tracking import check_trackers

# The options that only some methods have, by who has them.
OF_SFT = ("size", "sft_steps", "sft_learning_rate", "sft_batch_size")
OF_ALL_BUT_SFT = (
    *("steps", "learning_rate", "micro_batch_size"),
    *("evaluate_every", "n", "temperature"),
)
OF_PRETRAINED = ("revision", "chat", "max_new_tokens")  # of --start
OF_PAIRS = ("pairs", "pairs_file", "batch_size")
OF_POLICY = (
    *("prompts_per_step", "group_size", "updates_per_batch", "max_sampling_rounds"),
    "samples_per_prompt",
    *("cuda_graph", "advantages", "beta", "length_alpha", "measure_kl"),
    *("reward_model", "score_normalization"),
    *("critic_learning_rate", "bootstrap_truncated", "value_pretraining_steps"),
)
READ = 32  # problems that a model is tried on before a run
METHODS = {row.name: row for row in preferences.ROWS}
ONLINE = tuple(row.name for row in (*algorithms.ROWS, algorithms.GRPO_MEAN_ONLY))
NAMES = ("sft", *ONLINE, *METHODS)
TEXTS = ("name", "title", "source", "notes")  # of a row: what it is called, no choice of it
AnyRow = TypeVar("AnyRow", bound=algorithms.Algorithm | preferences.Method)


def train(options: Namespace) -> int:
    """The status of the command, see `main`."""
    name = options.algorithm
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        meant = f", perhaps {near[0]}" if near else ""
        raise ValueError(f"algorithm: found {shown(name)}; wanted one of {', '.join(NAMES)}{meant}")
    if name == "sft":
        _refuse(options, name, *OF_ALL_BUT_SFT, *OF_PAIRS, *OF_POLICY, "set")
    elif name in METHODS:
        scalar = isinstance(METHODS[name], preferences.RewardModelMethod)
        _refuse(options, name, *OF_POLICY, *(("shard",) if scalar else ()))
    else:
        _refuse(options, name, *OF_PAIRS)
    if options.start is None:
        alone = ("lora", "shard") if name == "sft" else ()
        _refuse(options, f"{name} without --start", *OF_PRETRAINED, *alone)
    elif name == "sft":
        _refuse(options, "--start", "size")
    else:
        _refuse(options, "--start", *OF_SFT)
    check_seed(options.seed)
    check_whole(1, n=_n(options))
    check_threads(options.threads)
    if options.evaluate_every is not None:
        check_whole(0, evaluate_every=options.evaluate_every)
    temperature(options)
    if options.micro_batch_size is not None:
        check_whole(1, micro_batch_size=options.micro_batch_size)
    world = processes(options.device)  # before any model: it sets each process's device
    check_trackers(options.tracker, options.out)
    if name == "sft":
        return _sft(options, world)
    if name in METHODS:
        return _on_pairs(options, _changed(METHODS[name], options), world)
    return _online(options, world)


def _sft(options: Namespace, world: Processes) -> int:
    """SFT alone, of a compact model or of --start."""
    recipe = training.recipe(options.task, **_changes(options, *OF_SFT))
    world.from_main(lambda: check_folder(options.out, options.resume))
    task, rest = get_task(options.task), {"seed": options.seed, "out": options.out}
    if options.start is None:
        run = training.sft_start(recipe, **rest, **_shared(options))[3]
        return _report(run, task, world)
    model, tokenizer = _load(options)
    task = framed(options, task, model, tokenizer)
    run = training.train_sft(
        model,
        tokenizer,
        task,
        **recipe.sft_settings(),
        shard=bool(options.shard),
        **rest,
        **_shared(options),
    )
    return _report(run, task, world)


def _online(options: Namespace, world: Processes) -> int:
    """A row of `rlcore.algorithms`."""
    changes = _changes(options, *OF_SFT, "steps", "learning_rate", "prompts_per_step", "group_size")
    recipe = training.recipe(options.task, **changes)
    updates = 1 if options.updates_per_batch is None else options.updates_per_batch
    rounds = 10 if options.max_sampling_rounds is None else options.max_sampling_rounds
    copies = 1 if options.samples_per_prompt is None else options.samples_per_prompt
    check_whole(1, updates_per_batch=updates, max_sampling_rounds=rounds, samples_per_prompt=copies)
    world.from_main(lambda: check_folder(options.out, options.resume))
    task, function = get_task(options.task), _function(options.advantages)
    reward_model = judge_tokenizer = None
    if options.reward_model is not None:
        with naming("--reward-model"):
            reward_model, judge_tokenizer = models.load_scalar_model(
                options.reward_model, device=options.device
            )
        if options.start is None:  # the start's, known before it is trained
            _check_judge(judge_tokenizer, models.build_tokenizer(task.vocabulary))
    row = _row(options, reward_model is not None, world)
    training.check_trainable(row, task, reward_model=reward_model, advantage_function=function)
    of_critic = {
        "critic_learning_rate": options.critic_learning_rate,
        "bootstrap_truncated": bool(options.bootstrap_truncated),
        "value_pretraining_steps": options.value_pretraining_steps,
    }
    critic_settings(row, recipe.steps, recipe.learning_rate, **of_critic)
    normalization = options.score_normalization or "none"
    reward_settings(row, reward_model, None, normalization)
    started = _start(options, recipe)
    if isinstance(started, training.Run):
        return _report(started, task, world)
    model, tokenizer = started
    if judge_tokenizer is not None:
        _check_judge(judge_tokenizer, tokenizer)
    task = framed(options, task, model, tokenizer)
    run = training.train_policy(
        model,
        tokenizer,
        task,
        row,
        **recipe.policy_settings(),
        seed=options.seed,
        updates_per_batch=updates,
        micro_batch_size=options.micro_batch_size,
        max_sampling_rounds=rounds,
        temperature=temperature(options),
        measure_kl=bool(options.measure_kl),
        advantage_function=function,
        reward_model=reward_model,
        score_normalization=normalization,
        **of_critic,
        shard=bool(options.shard),
        cuda_graph=bool(options.cuda_graph),
        evaluate_every=_every(options, recipe.steps),
        evaluate_n=_n(options),
        evaluate_samples=copies,
        out=options.out,
        **_shared(options),
    )
    return _report(run, task, world)


def _on_pairs(options: Namespace, method: preferences.Method, world: Processes) -> int:
    """A reward model, or a row over preference pairs; the pairs are sampled from the start."""
    scalar = isinstance(method, preferences.RewardModelMethod)
    kind = "reward" if scalar else "preference"
    own = {f"{kind}_{name}": v for name, v in _given(options, "steps", "learning_rate").items()}
    if options.batch_size is not None:
        own["preference_batch_size"] = options.batch_size
    recipe = training.recipe(options.task, **{**_changes(options, *OF_SFT, "pairs"), **own})
    settings = recipe.reward_settings() if scalar else recipe.preference_settings()
    world.from_main(lambda: check_folder(options.out, options.resume))
    task = get_task(options.task)
    given = None if options.pairs_file is None else _given_pairs(options.pairs_file)
    started = _start(options, recipe, scalar=scalar)
    if isinstance(started, training.Run):
        return _report(started, task, world)
    model, tokenizer = started
    task = framed(options, task, model, tokenizer)
    with using_threads(options.threads):
        # The main process's for all: on a GPU two processes may sample a token otherwise.
        sampled = partial(_pairs, options, model, tokenizer, task)
        pairs = world.from_main(lambda: sampled(recipe.pairs)) if given is None else given
        held_out = world.from_main(lambda: sampled(_n(options), split="held-out"))
    rest = {
        **settings,
        "micro_batch_size": options.micro_batch_size,
        "held_out": held_out,
        "seed": options.seed,
        "evaluate_every": _every(options, settings["steps"]),
        "out": options.out,
        **_shared(options),
    }
    if isinstance(method, preferences.RewardModelMethod):
        model = models.build_scalar_model(model, seed=options.seed)
        if options.lora is not None:
            add_lora(model, Lora(options.lora), seed=options.seed)
        run = training.train_reward_model(model, tokenizer, pairs, method=method, **rest)
    else:
        n = _n(options)
        run = training.train_preference(
            model,
            tokenizer,
            pairs,
            method,
            task=task,
            evaluate_n=n,
            shard=bool(options.shard),
            **rest,
        )
    if given is None and world.is_main:
        pairs.save(Path(options.out) / "pairs.jsonl")
    return _report(run, task, world)


def _given_pairs(file: str) -> PreferencePairs:
    """Those of --pairs-file."""
    if Path(file).is_dir():
        raise ValueError(f"--pairs-file: found the folder {file!r}; wanted a file")
    if not Path(file).is_file():
        raise ValueError(f"--pairs-file: found {file!r}; wanted a file that exists")
    with naming("--pairs-file"):
        return load_pairs(file)


def _start(
    options: Namespace, recipe: training.Recipe, scalar: bool = False
) -> tuple[Any, Any] | training.Run:
    """Model and tokenizer to start from; the SFT run itself where it was interrupted.

    scalar: the model is to get a scalar head, and its LoRA matrices after that.
    """
    if options.start is not None:
        return _load(options, scalar)
    if options.lora is not None:  # before SFT, which takes longer than such a model
        symbols = models.build_tokenizer(get_task(recipe.task).vocabulary)
        _lora(options, models.build_model(recipe.size, symbols, seed=0, device="cpu"))
    model, tokenizer, _, run = training.sft_start(
        recipe, seed=options.seed, out=Path(options.out) / "start", **_shared(options)
    )
    if run.interrupted:
        return run
    if options.lora is not None and not scalar:
        add_lora(model, Lora(options.lora), seed=options.seed)
    return model, tokenizer


def _load(options: Namespace, scalar: bool = False) -> tuple[Any, Any]:
    """The model of --start."""
    with naming(_option(options)):
        model, tokenizer = load_pretrained(
            options.start, revision=options.revision, device=options.device
        )
    if options.lora is not None:
        lora = _lora(options, model)
        if not scalar:
            add_lora(model, lora, seed=options.seed)
    return model, tokenizer


def _option(options: Namespace) -> str:
    """The option that names the model: of `train`, or of `evaluate`."""
    return "--start (--model)" if hasattr(options, "start") else "--model"


def _lora(options: Namespace, model: Any) -> Lora:
    """What --lora asks for; ValueError where it is none, or none of this model."""
    with naming("--lora", "rank"):
        lora = Lora(options.lora)
        check_rank(model, lora)
    return lora


@contextmanager
def naming(option: str, *arguments: str) -> Iterator[None]:
    """What is wrong with an argument, or the model or file of that path, is said of the option."""
    names = "|".join(arguments or ("path", "name"))
    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(f"^({names}):", f"{option}:", str(error))) from error


def _check_judge(found: Any, wanted: Any) -> None:
    """ValueError unless a reward model reads each token of the policy as what it is. It may have
    more of them."""
    known = found.get_vocab()
    for token, number in sorted(wanted.get_vocab().items(), key=lambda item: item[1]):
        if known.get(token) != number:
            raise ValueError(
                f"--reward-model: found a model of another tokenizer, whose token {number} is not "
                f"{token!r}; wanted that of the start"
            )


def framed(options: Namespace, task: Task, model: Any, tokenizer: Any) -> Task:
    """The task as the model of --start or --model reads it.

    ValueError where it cannot read some of its problems, or has no room for the response: said
    here, before the run's folder is made.
    """
    task = _framed(options, task, tokenizer)
    rng = random.Random(f"framed {task.name}")
    problems = [task.problem(rng) for _ in range(READ)]
    try:
        width = max(len(ids) for ids in models.encode(tokenizer, problems))
    except ValueError as error:
        raise ValueError(
            f"{_option(options)}: found a model that cannot read the task {task.name}; wanted one "
            f"that can ({error})"
        ) from error
    positions = getattr(model.config, "max_position_embeddings", None)
    if options.max_new_tokens is not None and positions is not None:
        room = positions - width
        if options.max_new_tokens > room:
            raise ValueError(
                f"--max-new-tokens: found {options.max_new_tokens}; wanted at most {room}: the "
                f"model has {positions} positions, and a prompt takes {width}"
            )
    return task


def _framed(options: Namespace, task: Task, tokenizer: Any) -> Task:
    longest = options.max_new_tokens
    if options.chat is not None:
        return chat_task(task, tokenizer, instruction=options.chat, max_new_tokens=longest)
    if adds_first(tokenizer):
        return text_task(task, tokenizer, max_new_tokens=longest)
    if longest is None:
        return task
    check_whole(1, max_new_tokens=longest)
    return replace(task, max_new_tokens=longest)


def _pairs(
    options: Namespace, model: Any, tokenizer: Any, task: Task, n: int, split: str = "train"
) -> PreferencePairs:
    settings = {"seed": options.seed, "temperature": temperature(options)}
    return sample_pairs(model, tokenizer, task, n, split=split, **settings)


def _row(options: Namespace, judged: bool, world: Processes) -> algorithms.Algorithm:
    """The row to train: with a reward model where one is given, else with the task's verifier."""
    own, reward = _changed(algorithms.by_name(options.algorithm), options), None
    if own.length_alpha is None:
        _refuse(options, options.algorithm, "length_alpha")
    if judged and own.reward == "verifier":
        reward = "reward_model"
    elif own.reward == "reward_model" and not judged:
        if world.is_main:
            print(f"{options.algorithm}: without --reward-model the reward is the task's verifier")
        reward = "verifier"
    weights = _given(options, "beta", "length_alpha")
    weights = {name: None if value == "paper" else value for name, value in weights.items()}
    named = {change.partition("=")[0] for change in options.set or ()}
    if named & {"beta", "kl"}:  # what --set says is not the recipe's to change
        weights.setdefault("beta", None)
    if "length_alpha" in named:
        weights.setdefault("length_alpha", None)
    return training.row(own, reward=reward, **weights)


def _changed(row: AnyRow, options: Namespace) -> AnyRow:
    """The row with its choices of `--set FIELD=VALUE`; ValueError for a field that it lacks."""
    changes: dict[str, Any] = {}
    choices = {field.name: field for field in fields(row) if field.name not in TEXTS}
    for change in options.set or ():
        name, given, text = change.partition("=")
        if not given or name not in choices:
            wanted = ", ".join(choices)
            raise ValueError(f"--set: found {change!r}; wanted FIELD=VALUE, a field of {wanted}")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        changes[name] = value
    return replace(row, **changes)


def _report(run: training.Run, task: Task, world: Processes) -> int:
    """What came out, in a few lines of the main process; the status of the command."""
    code = 0 if run.finished else 130
    if not world.is_main:
        return code
    state = "finished" if run.finished else "interrupted"
    after = "" if run.finished else " (--resume goes on)"
    print(f"{state} after {len(run.metrics)} steps, {run.seconds:.1f} s, in {run.out}{after}")
    for row in run.evaluations:
        if "greedy" in row:
            print(f"step {row['step']}: {accuracy(row, task)}")
        shown = {name: row[name] for name in row if name.startswith("eval_")}
        if shown:
            told = ", ".join(f"{name[5:]} {value:.3f}" for name, value in shown.items())
            print(f"step {row['step']}: held-out pairs: {told}")
    pushes = [row["rows_used"] for row in run.metrics if "rows_used" in row]
    has_critic = any(name.startswith("val/") for row in run.metrics for name in row)
    if pushes and not any(pushes) and not has_critic:
        print("no response had an advantage in any step: nothing was trained")
    raised = [error["error"] for error in run.errors if error["error"] != ABSTAINED]
    if raised:
        print(f"the verifier failed {len(raised)} times; first: {raised[0]}")
    return code


def accuracy(result: dict[str, Any], task: Task) -> str:
    """What `evaluate` found, in words."""
    if None in (result["greedy"], result["sampled"]):
        return f"the verifier left {result['missing']:.0f} responses without a reward"
    what = "accuracy" if task.preference_scale is None else "true reward"
    return (
        f"held-out {what}: greedy {result['greedy']:.3f} ± {result['greedy_se']:.3f}, "
        f"sampled {result['sampled']:.3f} ± {result['sampled_se']:.3f} (± one standard error, "
        f"{result['n']:.0f} problems); {result['mean_length']:.2f} tokens a response"
    )


def _shared(options: Namespace) -> dict[str, Any]:
    return {
        "resume": options.resume,
        "trackers": tuple(options.tracker),
        "progress": not options.quiet,
        "threads": options.threads,
        "precision": options.precision,
        "device": options.device,
    }


def _changes(options: Namespace, *names: str) -> dict[str, Any]:
    """Of the recipe: those of a pretrained model, and over them what was asked for."""
    pretrained = options.start is not None and is_known(options.start)
    return {**(training.PRETRAINED if pretrained else {}), **_given(options, *names)}


def _given(options: Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _n(options: Namespace) -> int:
    return 512 if options.n is None else options.n


def temperature(options: Namespace) -> float:
    """That of --temperature. The greedy answer, which 0 would ask for, is measured beside it."""
    value: float = 1.0 if options.temperature is None else options.temperature
    check_temperature(value, "--temperature", greedy="each evaluation gives the greedy answer too")
    return value


def _every(options: Namespace, steps: int) -> int:
    return steps if options.evaluate_every is None else options.evaluate_every


def _refuse(options: Namespace, what: str, *names: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no meaning with {what}")


def _function(place: str | None) -> Callable[..., Any] | None:
    """The function that FILE:FUNCTION names; ValueError where there is none."""
    if place is None:
        return None
    file, _, name = place.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"--advantages: found {place!r}; wanted FILE:FUNCTION, a file that exists")
    found = runpy.run_path(file).get(name)
    if not callable(found):
        raise ValueError(f"--advantages: {file} defines no function {name!r}")
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):  # one of C, say, does not tell
        return cast("Callable[..., Any]", found)
    try:
        signature.bind("rewards", "group_ids")
    except TypeError as error:
        raise ValueError(
            f"--advantages: {name}{signature} cannot be called ({error}); wanted a function of "
            "(rewards, group_ids)"
        ) from error
    return cast("Callable[..., Any]", found)
