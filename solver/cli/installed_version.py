"""The installed version. Imports nothing of ours, nor anything slow."""

from importlib import metadata


def version() -> str:
    """The installed version, or "0 (not installed)" in a source tree."""
    try:
        return metadata.version("checkpoint-solver")
    except metadata.PackageNotFoundError:
        return "0 (not installed)"
