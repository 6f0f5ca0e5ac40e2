"""Where a model comes from (a file, a module, a configuration), and errors in its code."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

CONFIGURATION = "hf:"
"""The prefix of the path of a Hugging Face configuration."""
CONFIGURATION_FILE = "config.json"
_NAME = r"[A-Za-z_]\w*"
_PLACE_AND_FACTORY = re.compile(rf"(.*\.py|{_NAME}(?:\.{_NAME})*)(?::({_NAME}))?", re.DOTALL)


class LoadError(ValueError):
    """The model file, or a function in it, fails; the message names file and line."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    place: a file (Path), or the name of an importable module.
    factory: the function that creates the model.
    is_configuration: whether the file is a Hugging Face configuration.
    """

    place: Path | str
    factory: str = "get_model"
    is_configuration: bool = False

    def __str__(self) -> str:
        return f"{CONFIGURATION}{self.place}" if self.is_configuration else str(self.place)


def parse_source(text: str) -> ModelSource | None:
    """Parse `model.py[:name]`, `package.module[:name]` or `hf:config.json`; None for others.

    Raises LoadError for a file that does not exist, before PyTorch is loaded for it.
    """
    if text.startswith(CONFIGURATION):
        path = Path(text.removeprefix(CONFIGURATION))
        path = path / CONFIGURATION_FILE if path.is_dir() else path
        if not path.exists():
            raise LoadError(
                f"{CONFIGURATION}{path}: no such file; give a local config.json "
                f"(`hf download OWNER/NAME {CONFIGURATION_FILE}` downloads one)"
            )
        return ModelSource(path, is_configuration=True)
    match = _PLACE_AND_FACTORY.fullmatch(text)
    if match is None:
        return None
    place, factory = match.groups(default="")
    is_file = place.endswith(".py")
    if is_file and Path(place).is_dir():
        raise LoadError(f"{place}: is a directory; give a model file (model.py)")
    if is_file and not Path(place).exists():
        raise LoadError(f"{place}: no such file; give a model file (model.py) or graph.json")
    if not is_file and not factory and ("." not in place or Path(place).exists()):
        return None
    return ModelSource(Path(place) if is_file else place, factory or "get_model")


def error_text(error: BaseException, source: ModelSource) -> str:
    """File, line and reason of an error in the user's code, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if isinstance(error, SyntaxError):
        place = f"{_label(error.filename, source)}, line {error.lineno}" if error.lineno else source
        return f"{place}: SyntaxError: {error.msg}"
    if isinstance(error, SystemExit):
        reason = f"called sys.exit({error.code!r})"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if _is_user_code(frame.filename, source)]
    if not user_frames:
        return f"{source}: {reason}"
    return f"{_label(user_frames[-1].filename, source)}, line {user_frames[-1].lineno}: {reason}"


def _label(filename: str | None, source: ModelSource) -> str:
    """The file's name for errors; the model file is named as on the command line."""
    if filename is None or isinstance(source.place, str):
        return filename or str(source)
    return str(source) if Path(filename).resolve() == source.place.resolve() else filename


def _is_user_code(filename: str, source: ModelSource) -> bool:
    """Whether code in this file is the user's: beside the model file or in its package, and neither
    in an installed library nor in this project."""
    if filename.startswith("<"):  # generated code, or Python's own
        return False
    file = Path(filename).resolve()
    libraries = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")]
    libraries += [root for module in ("solver", "graphs") for root in sys.modules[module].__path__]
    if any(file.is_relative_to(Path(directory).resolve()) for directory in libraries):
        return False
    if isinstance(source.place, Path):
        return file.is_relative_to(source.place.resolve().parent)
    module = sys.modules.get(source.place.partition(".")[0])
    roots = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
    return any(root is not None and file.is_relative_to(Path(root).resolve()) for root in roots)
