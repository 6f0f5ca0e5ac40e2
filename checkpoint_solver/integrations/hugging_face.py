"""A callback for the Trainer of transformers (from `scheduler_runtime.integrations`)."""

from scheduler_runtime.integrations.hugging_face import FitCallback

__all__ = ["FitCallback"]
