"""Lets device meshes report the device that is traced for.

A mesh says on which device its ranks compute, and DTensor moves its arguments there. When a rank is
planned without the others, its mesh is of CPUs, whatever device the plan is for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def meshes_on(device: torch.device | None) -> Iterator[None]:
    """While inside, every mesh reports this device (None: its own).

    Random operators remain those of the mesh's own device: for another device, DTensor would
    install a tracker of random states, which would stay afterwards.
    """
    if device is None:
        yield
        return
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import _dispatch

    original: Any = _dispatch.is_rng_supported_mesh

    def is_supported(mesh: Any) -> bool:
        return mesh._device_type == device.type and bool(original(mesh))

    with (
        mock.patch.object(DeviceMesh, "device_type", property(lambda _mesh: device.type)),
        mock.patch.object(_dispatch, "is_rng_supported_mesh", is_supported),
    ):
        yield
