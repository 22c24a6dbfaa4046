"""RareSuccess: how far one success in G stands out, and what bounds it."""

import math
from typing import Any

import torch
import traitlets

from rlcore.objectives import group_advantages, largest_group_advantage
from widgets.base import TeachingWidget, check_choice, check_integer, module_text, signed

LEAST, MOST = 2, 256


class RareSuccess(TeachingWidget):
    """A group of `group_size` (2 to 256) responses of which `successes` (1 to G - 1) got reward 1
    and the others 0.

    With the population std a success gets sqrt((G - k) / k), at most sqrt(G - 1); with the sample
    std (`ddof=1`) both shrink by sqrt((G - 1) / G), and one success in G gets (G - 1) / sqrt(G).
    `over`: the curve runs over "group_size" (for this k) or over "successes" (for this G).
    """

    parameters = ("group_size", "successes", "ddof", "over")
    _esm = module_text("rare_success")

    group_size = traitlets.Any(8).tag(sync=True)
    successes = traitlets.Any(1).tag(sync=True)
    ddof = traitlets.Any(0).tag(sync=True)
    over = traitlets.Any("group_size").tag(sync=True)

    def __init__(
        self,
        group_size: int = 8,
        successes: int = 1,
        ddof: int = 0,
        over: str = "group_size",
        **traits: Any,
    ):
        settings = {"group_size": group_size, "successes": successes, "ddof": ddof, "over": over}
        check_settings(**settings)
        super().__init__(**settings, **traits)

    @staticmethod
    def compute(
        group_size: int, successes: int, ddof: int = 0, over: str = "group_size"
    ) -> dict[str, Any]:
        """Advantages of a success and of a failure; `bound`, the largest advantage that any group
        of this size allows; `share` = k / G; `cantelli` = 1 / (1 + A^2), Cantelli's upper bound on
        the share of answers that lie A or more above the mean (equal to `share` if ddof = 0); and
        the curve: `x`, `advantage`, `bound`, and `cantelli` = sqrt(1 / share - 1)."""
        check_settings(group_size, successes, ddof, over)
        if over == "group_size":
            pairs = [(size, successes) for size in steps(successes + 1, MOST)]
        else:
            pairs = [(group_size, count) for count in steps(1, group_size - 1)]
        success, failure = advantages_of(group_size, successes, ddof)
        return {
            "advantage_success": success,
            "advantage_failure": failure,
            "bound": largest_group_advantage(group_size, ddof=ddof),
            "share": successes / group_size,
            "cantelli": 1 / (1 + success**2),
            "curve": {
                "x": [pair[over == "successes"] for pair in pairs],
                "advantage": [advantages_of(*pair, ddof)[0] for pair in pairs],
                "bound": [largest_group_advantage(size, ddof=ddof) for size, _ in pairs],
                "cantelli": [math.sqrt(size / count - 1) for size, count in pairs],
            },
        }

    @traitlets.validate("group_size", "successes", "ddof", "over")
    def _check(self, proposal: Any) -> Any:
        check_settings(**{**self.settings(), proposal["trait"].name: proposal["value"]})
        return proposal["value"]

    def rows(self) -> list[tuple[str, str]]:
        values = self.compute(**self.settings())
        return [
            ("group size G", str(self.group_size)),
            ("successes k", str(self.successes)),
            ("std", "sample" if self.ddof else "population"),
            ("advantage of a success", signed(values["advantage_success"])),
            ("advantage of a failure", signed(values["advantage_failure"])),
            ("largest possible in G", f"{values['bound']:.3f}"),
            ("share of successes k / G", f"{values['share']:.3f}"),
            ("Cantelli's bound on the share", f"{values['cantelli']:.3f}"),
        ]


def advantages_of(group_size: int, successes: int, ddof: int) -> tuple[float, float]:
    """Advantage of a success and of a failure, from rlcore."""
    rewards = torch.zeros(group_size, dtype=torch.float64)
    rewards[:successes] = 1
    one_prompt = torch.zeros(group_size, dtype=torch.long)
    advantages = group_advantages(rewards, one_prompt, scale="group", ddof=ddof, eps=0.0)
    return advantages[0].item(), advantages[-1].item()


def steps(first: int, last: int) -> list[int]:
    """Where the curve is computed: every whole number at first, then ever wider apart, as the curve
    flattens; `last` too."""
    points = []
    x = first
    while x < last:
        points.append(x)
        x += max(1, (x - first) // 8)
    return [*points, last]


def check_settings(group_size: object, successes: object, ddof: object, over: object) -> None:
    size = check_integer("group_size", group_size, LEAST, MOST)
    check_integer("successes", successes, 1, size - 1)
    check_choice("ddof", ddof, (0, 1))
    check_choice("over", over, ("group_size", "successes"))
