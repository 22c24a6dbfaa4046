"""Agreement with other code, and the largest difference seen, printed at the end of a run."""

from collections.abc import Callable

import pytest
from torch import Tensor

Results = dict[str, Tensor]
SEEN = pytest.StashKey[dict[str, dict[str, float]]]()


@pytest.fixture
def agree(request: pytest.FixtureRequest) -> Callable[..., None]:
    """agree(family, ours, theirs, tolerance, where): the same keys, shapes and numbers.

    The largest absolute difference of each family is remembered, values and gradients apart.
    """
    seen = request.config.stash.setdefault(SEEN, {})

    def check(family: str, ours: Results, theirs: Results, tolerance: float, where: str) -> None:
        assert ours.keys() == theirs.keys()
        for key, wanted in theirs.items():
            found = ours[key]
            assert found.shape == wanted.shape, f"{family}, {where}, {key}"
            difference = (found.double() - wanted.double()).abs().max().item()
            kind = "gradient" if key.startswith("gradient") else "value"
            largest = seen.setdefault(family, {})
            largest[kind] = max(largest.get(kind, 0.0), difference)
            assert difference <= tolerance, (
                f"{family}, {where}: {key} differs by {difference:.3g}, allowed {tolerance:.0e}\n"
                f"rlcore: {found}\nthe other: {wanted}"
            )

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seen = terminalreporter.config.stash.get(SEEN, {})
    if not seen:
        return
    terminalreporter.section("largest differences from TRL")
    for family in sorted(seen):
        numbers = [f"{kind} {size:.1e}" for kind, size in sorted(seen[family].items())[::-1]]
        terminalreporter.write_line(f"{family:<44} {', '.join(numbers)}")
