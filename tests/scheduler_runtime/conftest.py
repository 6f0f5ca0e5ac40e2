"""What a test leaves on PyTorch's stacks is taken off before the next."""

import gc
from collections.abc import Iterator

import pytest
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from scheduler_runtime.fitting.loss_watch import LossWatch


@pytest.fixture(autouse=True)
def _watches_end() -> Iterator[None]:
    """A watched loss waits while its output is there, which the frames of a test may keep."""
    yield
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, LossWatch):
            mode.end()


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """As in a training that does not call `gc.freeze`, which the tests do (`tests/conftest.py`)."""
    gc.unfreeze()
    yield
    gc.freeze()
