"""The run: execute a Schedule inside a PyTorch module."""
