"""The command: `python -m rlcore train grpo --task sort --seed 0 --out runs/x`, and a few more.

`train` does what the chapters' notebooks do, from the same recipes: with the same seed and the
same number of threads the weights come out the same, bit for bit.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

EXAMPLES = """examples:
  python -m rlcore train grpo --task sort --seed 0 --out runs/sort-grpo-0
  python -m rlcore train sft --task robot --seed 0 --out runs/robot-start-0
  python -m rlcore train rloo --task robot --seed 0 --start runs/robot-start-0/model --out runs/x
  python -m rlcore evaluate --task sort --model runs/sort-grpo-0/model
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 when done, 2 for bad arguments, 1 for a failed run, 130 for an interrupt."""
    options = _parser().parse_args(arguments)
    try:
        from rlcore.training import NonFiniteError

        try:
            code: int = options.command(options)
            return code
        except ValueError as error:
            print(f"rlcore: error: {error}", file=sys.stderr)
            return 2
        except (OSError, NonFiniteError) as error:
            print(f"rlcore: error: {error}", file=sys.stderr)
            return 1
    except KeyboardInterrupt:  # also in the seconds that the imports take
        return 130


def train(options: argparse.Namespace) -> int:
    """SFT, and unless `sft` was asked for, the policy loop from there (or from --start)."""
    from rlcore import models, training
    from rlcore.checks import check_folder, check_seed, check_temperature, check_whole
    from rlcore.devices import choose_device
    from rlcore.tasks import get_task
    from rlcore.training.critic import critic_settings
    from rlcore.training.judge import reward_settings

    policy_names = ("steps", "learning_rate", "prompts_per_step", "group_size")
    sft_names = ("size", "sft_steps", "sft_learning_rate", "sft_batch_size")
    if options.algorithm == "sft":
        _refuse(
            options,
            "sft",
            *policy_names,
            "start",
            "updates_per_batch",
            "max_sampling_rounds",
            "evaluate_every",
            "advantages",
            "beta",
            "length_alpha",
            "temperature",
            "measure_kl",
            "n",
            "reward_model",
            "score_normalization",
            "critic_learning_rate",
            "bootstrap_truncated",
            "value_pretraining_steps",
        )
    if options.start is not None:
        _refuse(options, "--start", *sft_names)
    names = (*sft_names, *policy_names)
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    recipe = training.recipe(options.task, **given)
    shared = {
        "resume": options.resume,
        "progress": not options.quiet,
        "threads": options.threads,
        "device": options.device,
    }
    updates = 1 if options.updates_per_batch is None else options.updates_per_batch
    rounds = 10 if options.max_sampling_rounds is None else options.max_sampling_rounds
    every = recipe.steps if options.evaluate_every is None else options.evaluate_every
    n, temperature = _evaluated(options)
    check_seed(options.seed)
    threads = 1 if options.threads is None else options.threads
    check_whole(1, updates_per_batch=updates, max_sampling_rounds=rounds, n=n, threads=threads)
    check_whole(0, evaluate_every=every)
    check_temperature(temperature)
    choose_device(options.device)
    check_folder(options.out, options.resume)
    if options.algorithm == "sft":
        return _report(training.sft_start(recipe, seed=options.seed, out=options.out, **shared)[3])

    task = get_task(options.task)
    function = _function(options.advantages)
    reward_model = None
    if options.reward_model is not None:
        reward_model, _ = models.load_scalar_model(options.reward_model, device=options.device)
    row = _row(options, judged=reward_model is not None)
    training.check_trainable(row, task, reward_model=reward_model, advantage_function=function)
    loop = {
        "score_normalization": options.score_normalization or "none",
        "critic_learning_rate": options.critic_learning_rate,
        "bootstrap_truncated": bool(options.bootstrap_truncated),
        "value_pretraining_steps": options.value_pretraining_steps,
    }
    of_critic = {name: value for name, value in loop.items() if name != "score_normalization"}
    critic_settings(row, recipe.steps, recipe.learning_rate, **of_critic)
    reward_settings(row, reward_model, None, loop["score_normalization"])
    if options.start is not None:
        model, tokenizer = models.load(options.start, device=options.device)
    else:
        start = Path(options.out) / "start"
        model, tokenizer, task, run = training.sft_start(
            recipe, seed=options.seed, out=start, **shared
        )
        if run.interrupted:
            return _report(run)
    run = training.train_policy(
        model,
        tokenizer,
        task,
        row,
        **recipe.policy_settings(),
        seed=options.seed,
        updates_per_batch=updates,
        max_sampling_rounds=rounds,
        temperature=temperature,
        measure_kl=bool(options.measure_kl),
        advantage_function=function,
        reward_model=reward_model,
        **loop,
        evaluate_every=every,
        evaluate_n=n,
        out=options.out,
        **shared,
    )
    return _report(run)


def evaluate(options: argparse.Namespace) -> int:
    """Held-out accuracy of a saved model."""
    from rlcore import evaluation, models
    from rlcore.devices import using_threads
    from rlcore.tasks import get_task

    task = get_task(options.task)
    n, temperature = _evaluated(options)
    model, tokenizer = models.load(options.model, device=options.device)
    with using_threads(options.threads):
        result = evaluation.evaluate(
            model, tokenizer, task, n=n, seed=options.seed, temperature=temperature
        )
    print(_accuracy(result))
    return 0


def tasks(options: argparse.Namespace) -> int:
    """The tasks there are."""
    from rlcore.tasks import TASKS

    for task in TASKS.values():
        print(f"{task.name}\n    {task.description}\n    {task.note}")
    return 0


def algorithms(options: argparse.Namespace) -> int:
    """The rows of five answers, and what `train` needs for them."""
    from rlcore.algorithms import GRPO_MEAN_ONLY, ROWS

    for row in (*ROWS, GRPO_MEAN_ONLY):
        print(f"{row.name}: {row.title}. {row.source}")
        for question, answer in row.five_answers().items():
            print(f"    {question} {answer}")
        needs = {
            "verifier": "any task",
            "reward_model": "any task; --reward-model, or the reward is the task's verifier",
            "several": "a task with several rewards, such as sort-box",
        }[row.reward]
        critic = "; a critic, made from the start" if row.advantage == "gae" else ""
        print(f"    What does `train` need? {needs}{critic}")
    return 0


def _row(options: argparse.Namespace, judged: bool) -> Any:
    """The row to train: with a reward model where one is given, else with the task's verifier."""
    from rlcore import training
    from rlcore.algorithms import by_name

    own, reward = by_name(options.algorithm), None
    if own.length_alpha is None:
        _refuse(options, options.algorithm, "length_alpha")
    if judged and own.reward == "verifier":
        reward = "reward_model"
    elif own.reward == "reward_model" and not judged:
        print(f"{options.algorithm}: without --reward-model the reward is the task's verifier")
        reward = "verifier"
    settings = {"beta": options.beta, "length_alpha": options.length_alpha}
    given = {
        name: None if value == "paper" else value
        for name, value in settings.items()
        if value is not None
    }
    return training.row(options.algorithm, reward=reward, **given)


def _report(run: Any) -> int:
    state = "finished" if run.finished else "interrupted"
    print(f"{state} after {len(run.metrics)} steps, {run.seconds:.1f} s, in {run.out}")
    for row in run.evaluations:
        print(f"step {row['step']}: {_accuracy(row)}")
    if run.errors:
        first = run.errors[0]
        print(f"the verifier raised {len(run.errors)} times; first: {first['error']}")
    return 0 if run.finished else 130


def _accuracy(result: dict[str, Any]) -> str:
    if None in (result["greedy"], result["sampled"]):
        return f"the verifier left {result['missing']:.0f} responses without a reward"
    return (
        f"held-out accuracy: greedy {result['greedy']:.3f} ± {result['greedy_se']:.3f}, "
        f"sampled {result['sampled']:.3f} ± {result['sampled_se']:.3f} (± one standard error, "
        f"{result['n']:.0f} problems); {result['mean_length']:.2f} tokens a response"
    )


def _evaluated(options: argparse.Namespace) -> tuple[int, float]:
    """n and temperature, or what they are where not given: None, so that SFT can refuse them."""
    n = 512 if options.n is None else options.n
    return n, 1.0 if options.temperature is None else options.temperature


def _refuse(options: argparse.Namespace, what: str, *names: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no meaning with {what}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rlcore", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="train|evaluate|tasks|algorithms")
    common = _Parser(add_help=False)
    common.add_argument("--task", required=True, help="see `rlcore tasks`")
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--device", help="cpu or cuda (default: cuda when there is one)")
    common.add_argument("--threads", type=int, help="torch threads (default: torch's)")
    common.add_argument("--temperature", type=float, help="of sampling (default: 1)")
    common.add_argument("--n", type=int, help="held-out problems to evaluate on (default: 512)")

    run = commands.add_parser("train", parents=[common], help="SFT, then RL")
    run.add_argument("algorithm", help="sft, or a row of `rlcore algorithms`")
    run.add_argument("--out", required=True, help="the run folder to write")
    run.add_argument("--start", help="model folder to start RL from (default: SFT first)")
    run.add_argument("--resume", action="store_true", help="go on where --out stopped")
    run.add_argument("--quiet", action="store_true", help="no progress bar")
    run.add_argument(
        "--measure-kl", action="store_true", default=None, help="record the KL to the start"
    )
    run.add_argument(
        "--evaluate-every", type=int, help="steps (0: never; default: at start and end)"
    )
    run.add_argument("--updates-per-batch", type=int)
    run.add_argument(
        "--max-sampling-rounds", type=int, help="of a step that samples dynamically (default: 10)"
    )
    run.add_argument(
        "--advantages",
        metavar="FILE:FUNCTION",
        help="experiment: advantages from this Python function of (rewards, group_ids)",
    )
    run.add_argument(
        "--reward-model", metavar="FOLDER", help="its score is the reward, not the verifier's"
    )
    run.add_argument("--score-normalization", help="of the reward model: none or start")
    run.add_argument("--critic-learning-rate", type=float, help="(default: twice the policy's)")
    run.add_argument(
        "--bootstrap-truncated", action="store_true", default=None,
        help="a response that was cut goes on with the critic's value",
    )  # fmt: skip
    run.add_argument(
        "--value-pretraining-steps",
        type=int,
        help="of the steps, those that train the critic alone",
    )
    run.add_argument("--beta", type=_weight, help="KL weight, or 'paper' (default: 0)")
    run.add_argument(
        "--length-alpha", type=_weight, help="of VAPO's lambda, or 'paper' (default: 0.5)"
    )
    recipe = run.add_argument_group("instead of the recipe's")
    recipe.add_argument("--size", help="nano, tiny, small or medium")
    whole = ("sft-steps", "sft-batch-size", "steps", "prompts-per-step", "group-size")
    for name, kind in (
        *((name, int) for name in whole),
        ("sft-learning-rate", float),
        ("learning-rate", float),
    ):
        recipe.add_argument(f"--{name}", type=kind)
    run.set_defaults(command=train)

    rate = commands.add_parser("evaluate", parents=[common], help="held-out accuracy of a model")
    rate.add_argument("--model", required=True, help="a model folder")
    rate.set_defaults(command=evaluate)
    commands.add_parser("tasks", help="list the tasks").set_defaults(command=tasks)
    listed = commands.add_parser("algorithms", help="list the algorithms, row by row")
    listed.set_defaults(command=algorithms)
    return parser


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
    return cast("Callable[..., Any]", found)


def _weight(text: str) -> float | str:
    return text if text == "paper" else float(text)


if __name__ == "__main__":
    sys.exit(main())
