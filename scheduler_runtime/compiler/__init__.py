"""torch.compile within a budget in bytes."""

from scheduler_runtime.compiler.compile_model import (
    CompileReport,
    compile,
    compile_reports,
    uncompile,
)
from scheduler_runtime.compiler.loop import GraphBreakError
