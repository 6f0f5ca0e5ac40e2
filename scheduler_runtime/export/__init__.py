"""Export a plan to PyTorch's own tools: checkpoints of a model's modules, or saved-tensor hooks.

exported = to_torch_checkpoint(model, solution)
print(exported)      # which modules are checkpointed, how, and what that costs
...                  # train as before: torch.compile, PEFT, DDP and FSDP2 work on top
exported.remove()
"""

from scheduler_runtime.execute import remove_torch_checkpoint
from scheduler_runtime.export.exportable import ExportError, module_tree
from scheduler_runtime.export.saved_tensors_hooks import ExportedCopies, to_saved_tensors_hooks
from scheduler_runtime.export.stock_checkpoints import Export, ExportedModule, to_torch_checkpoint
