"""A plan in PyTorch's own means: `torch.utils.checkpoint` around modules, of
`scheduler_runtime.export`; hooks of saved tensors, of `scheduler_runtime.export_copies`."""

from scheduler_runtime.export import (
    Export,
    ExportedModule,
    ExportError,
    remove_torch_checkpoint,
    to_torch_checkpoint,
)
from scheduler_runtime.export_copies import ExportedCopies, to_saved_tensors_hooks

__all__ = [
    "Export",
    "ExportError",
    "ExportedCopies",
    "ExportedModule",
    "remove_torch_checkpoint",
    "to_saved_tensors_hooks",
    "to_torch_checkpoint",
]
