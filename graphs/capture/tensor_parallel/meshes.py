"""Meshes of another device than the one that is traced for.

A mesh says on which device its ranks compute, and DTensor moves what it is given there. A mesh of
ranks that are not there is one of CPUs, whatever is planned for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def meshes_on(device: torch.device | None) -> Iterator[None]:
    """While inside, every mesh says that it is of this device (None: what it is of).

    Random operators stay those of the mesh's own device: for another one DTensor would put a
    tracker of random states in place, which outlives this.
    """
    if device is None:
        yield
        return
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import _dispatch

    supported: Any = _dispatch.is_rng_supported_mesh

    def is_own(mesh: Any) -> bool:
        return mesh._device_type == device.type and bool(supported(mesh))

    with (
        mock.patch.object(DeviceMesh, "device_type", property(lambda _mesh: device.type)),
        mock.patch.object(_dispatch, "is_rng_supported_mesh", is_own),
    ):
        yield
