"""A plan as `torch.utils.checkpoint` around modules, of `scheduler_runtime.export`."""

from scheduler_runtime.export import (
    Export,
    ExportedModule,
    ExportError,
    remove_torch_checkpoint,
    to_torch_checkpoint,
)

__all__ = [
    "Export",
    "ExportError",
    "ExportedModule",
    "remove_torch_checkpoint",
    "to_torch_checkpoint",
]
