"""rlcore: the mathematics of reinforcement learning for language models, and the training.

Start at ``rlcore.objectives`` (pure functions, one module per question of the book) and
``rlcore.algorithms`` (an algorithm is one row of choices).  Importing ``rlcore`` itself loads
neither torch nor transformers.
"""

__version__ = "0.1.0"
