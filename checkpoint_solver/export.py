"""Export plans to plain PyTorch: `torch.utils.checkpoint` around modules, or saved-tensor hooks
(from `scheduler_runtime.export`)."""

from scheduler_runtime.export import (
    Export,
    ExportedCopies,
    ExportedModule,
    ExportError,
    remove_torch_checkpoint,
    to_saved_tensors_hooks,
    to_torch_checkpoint,
)

__all__ = [
    "Export",
    "ExportError",
    "ExportedCopies",
    "ExportedModule",
    "remove_torch_checkpoint",
    "to_saved_tensors_hooks",
    "to_torch_checkpoint",
]
