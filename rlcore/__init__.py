"""rlcore: the mathematics of reinforcement learning for language models, and the training.

Start at ``rlcore.objectives`` (pure functions, one module per question of the book),
``rlcore.algorithms`` and ``rlcore.preferences`` (a method is one row of choices).
``rlcore.to_trl(row)`` gives the same row as a config of TRL, and with a task all that TRL's trainer
needs but the model.  Importing ``rlcore`` itself loads neither torch nor transformers nor TRL.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.trl_export import to_trl

__version__ = "0.1.0"
__all__ = ["__version__", "to_trl"]


def __getattr__(name: str) -> Any:
    if name == "to_trl":
        from rlcore.trl_export import to_trl

        return to_trl
    raise AttributeError(f"module 'rlcore' has no attribute {name!r}")
