"""Meshes of another device than the one that is traced for.

A mesh says on which device its ranks compute, and DTensor moves what it is given there. A mesh of
ranks that are not there, for a card that is not there, is one of CPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch


@contextlib.contextmanager
def meshes_on(device: torch.device | None) -> Iterator[None]:
    """While inside, every mesh says that it is of this device (None: what it is of)."""
    if device is None:
        yield
        return
    from torch.distributed.device_mesh import DeviceMesh

    with mock.patch.object(DeviceMesh, "device_type", property(lambda _mesh: device.type)):
        yield
