"""Which rows the policy loop can train, and what it lacks for the others."""

from __future__ import annotations

from rlcore.algorithms import Algorithm


def lacks(algorithm: Algorithm) -> str | None:
    """What a row needs and `train_policy` does not have; None where it can train it."""
    if algorithm.advantage == "gae":
        return "a critic, a value for each token"
    if algorithm.reward == "several":
        return "several rewards for a response: it asks the task's verifier for one"
    if algorithm.reward == "reward_model":
        return "a reward model: it asks the task's verifier"
    return None


def check_trainable(algorithm: Algorithm) -> None:
    """ValueError for what is no row, and for a row that `train_policy` cannot train."""
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"algorithm: found {algorithm!r}; wanted an Algorithm, as row() gives")
    missing = lacks(algorithm)
    if missing is not None:
        raise ValueError(f"algorithm: {algorithm.name} needs what this loop lacks: {missing}")
