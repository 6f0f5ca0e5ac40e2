"""A callback for the Trainer of Lightning (from `scheduler_runtime.integrations`)."""

from scheduler_runtime.integrations.lightning import FitCallback

__all__ = ["FitCallback"]
