"""Long runs leave nothing behind, and state stays what it has to be."""

import pytest
import torch
from torch import Tensor

from benchmarks.soak import Health, live_tensors, network, optimizer_of, soak


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def lines(request: pytest.FixtureRequest) -> list[Health]:
    return list(soak(600, 200, request.param))


def test_memory_does_not_grow(lines: list[Health]) -> None:
    """As many tensors and bytes late as early, through 60 swaps and 6 files."""
    assert len({(of.tensors, of.live_bytes, of.state_bytes) for of in lines}) == 1


def test_factors_stay_symmetric_and_positive(lines: list[Health]) -> None:
    """To rounding in fp32, and the bases stay orthogonal."""
    for of in lines:
        assert of.finite
        assert of.asymmetry < 1e-6
        assert of.smallest > -1e-6
        assert of.orthogonality < 1e-5


def test_averages_stay_near_the_weights(lines: list[Health]) -> None:
    """The averages are finite and about one horizon of steps behind; the network learns."""
    for of in lines:
        assert 0 < of.distance < 0.2
        assert of.distance < of.drift
    assert lines[-1].loss < lines[0].loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapping_leaves_no_tensor_behind(dtype: torch.dtype) -> None:
    """After 200 evaluations there are as many tensors and bytes as after the first, none of them in a graph."""
    model = network(dtype, torch.Generator().manual_seed(0))
    optimizer = optimizer_of(model)
    model(torch.ones(4, 2, 4, 4, dtype=dtype)).float().square().mean().backward()
    optimizer.step()
    counts = []
    for evaluation in range(200):
        for mode in (False, True):
            optimizer.train(mode)
            values = [value for state in optimizer.state.values() for value in state.values()]
            assert not any(value.requires_grad or value.grad_fn for value in values if isinstance(value, Tensor))
            del values
        if evaluation in (0, 199):
            counts.append(live_tensors())
    assert counts[0] == counts[1]
