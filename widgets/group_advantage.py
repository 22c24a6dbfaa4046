"""GroupAdvantage: toggle the rewards of a group, watch every advantage move."""

import math
from typing import Any

import torch
import traitlets

from rlcore.objectives import equal_groups, group_advantages
from widgets.base import TeachingWidget, check_choice, check_numbers, module_text, signed

LEAST, MOST = 2, 64


class GroupAdvantage(TeachingWidget):
    """The advantages A^(g) = (R^(g) - mean) / std of one group of 2 to 64 responses.

    `rewards`: finite numbers, none so large that a sum overflows (a click in the drawing toggles
    between 0 and 1); `ddof`: 0 for the population std (numpy's default, and the book's), 1 for the
    sample std (torch's default; TRL and verl). Raises `ValueError` on anything else.
    """

    parameters = ("rewards", "ddof")
    _esm = module_text("group_advantage")

    rewards = traitlets.Any().tag(sync=True)
    ddof = traitlets.Any(0).tag(sync=True)

    def __init__(self, rewards: Any = (1, 1, 1, 1, 1, 1, 0, 0), ddof: int = 0, **traits: Any):
        super().__init__(rewards=rewards, ddof=ddof, **traits)

    @staticmethod
    def compute(rewards: Any, ddof: int = 0) -> dict[str, Any]:
        """Mean and std of the rewards, the advantages, and the sums of the positive and of the
        negative ones; `equal` says that all rewards are equal, so that nothing is learned."""
        check_choice("ddof", ddof, (0, 1))
        group = torch.tensor(check_numbers("rewards", rewards, LEAST, MOST), dtype=torch.float64)
        one_prompt = torch.zeros(len(group), dtype=torch.long)
        advantages = group_advantages(group, one_prompt, scale="group", ddof=ddof, eps=0.0)
        equal = bool(equal_groups(group, one_prompt).equal.all())
        # Scaled by a power of two, which changes no digit: squares of huge rewards would overflow.
        scale = 2.0 ** (math.frexp(group.abs().max().item())[1] - 1)
        std = 0.0 if equal else (group / scale).std(correction=ddof).item() * scale
        return {
            "mean": group.mean().item(),
            "std": std,
            "advantages": advantages.tolist(),
            "sum_positive": advantages.clamp(min=0).sum().item(),
            "sum_negative": advantages.clamp(max=0).sum().item(),
            "equal": equal,
        }

    @traitlets.validate("rewards", "ddof")
    def _check(self, proposal: Any) -> Any:
        name, value = proposal["trait"].name, proposal["value"]
        self.compute(**{**self.settings(), name: value})
        return check_numbers("rewards", value, LEAST, MOST) if name == "rewards" else value

    def rows(self) -> list[tuple[str, str]]:
        values = self.compute(**self.settings())
        return [
            ("rewards", " ".join(f"{reward:g}" for reward in self.rewards)),
            ("mean", f"{values['mean']:.3f}"),
            (f"std ({'sample' if self.ddof else 'population'})", f"{values['std']:.3f}"),
            ("advantages", " ".join(signed(a) for a in values["advantages"])),
            ("sum of the positive", signed(values["sum_positive"])),
            ("sum of the negative", signed(values["sum_negative"])),
        ]
