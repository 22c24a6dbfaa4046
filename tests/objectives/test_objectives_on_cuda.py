"""On a GPU: the same numbers as on the CPU, and the same bits twice, in torch's strict mode."""

from collections.abc import Iterator

import pytest
import torch
from every_row import TOLERANCES, step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_cuda_agrees_with_the_cpu_and_with_itself(dtype: torch.dtype) -> None:
    on_cpu, once, again = step("cpu", dtype), step("cuda", dtype), step("cuda", dtype)
    tolerance = TOLERANCES[dtype]
    for key, value in once.items():
        assert value.device.type == "cuda"
        assert torch.equal(value, again[key]), key
        torch.testing.assert_close(
            value.cpu(),
            on_cpu[key],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda message, key=key: f"{key}: {message}",
        )
