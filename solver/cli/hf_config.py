"""A Hugging Face configuration (config.json) as the problem: `solve hf:config.json`.

The model is the class that `architectures` names, of the transformers library, with random weights
on the meta device: nothing is downloaded and nothing allocated. Which batch it takes follows from
the library's own tables (`MODEL_FOR_..._MAPPING_NAMES`) that say what each class is for. What is
assumed about the step is told in `notes`, for the report.

Sources: https://huggingface.co/docs/transformers/main_classes/configuration and
https://huggingface.co/docs/transformers/model_doc/auto.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from graphs.files import FormatError, read_json

FILE_NAME = "config.json"
IMAGE_SIZE, N_CHANNELS = 224, 3
"""Of an image, where the configuration does not say."""


class ConfigurationError(ValueError):
    """The configuration cannot be made into a step; the message says what would be right."""


@dataclass(frozen=True)
class Task:
    """What a model is trained for. table: the library's name of its classes. title: for a person.

    batch: (configuration, batch size, length, dtype) -> the keyword arguments of the model.
    """

    table: str
    title: str
    is_text: bool
    batch: Callable[[Any, int, int, Any], dict[str, Any]]


@dataclass(frozen=True)
class Loaded:
    """A configuration as the module that a model file would be, and what was assumed."""

    module: ModuleType
    title: str
    notes: tuple[str, ...]


def load(path: Path) -> Loaded:
    """Read config.json, or the directory that holds it. Imports transformers.

    Raises ConfigurationError: no such file, no transformers, an unknown or untrainable model.
    """
    path = path / FILE_NAME if path.is_dir() else path
    if not path.exists():
        raise ConfigurationError(
            f"hf:{path}: no such file; give the config.json of a model on this disk "
            f"(`hf download OWNER/NAME {FILE_NAME}` fetches one)"
        )
    transformers = _library(path)
    configuration = _read(transformers, path)
    class_name, task, why = _chosen(transformers, configuration, path)
    model_class = getattr(transformers, class_name)
    dtype, dtype_words = _dtype(configuration)
    configuration.use_cache = False

    def get_model() -> Any:
        from graphs.training_step import LossOnly

        model = model_class._from_config(configuration, dtype=dtype)
        return LossOnly(model).train()

    def get_optimizer(model: Any) -> Any:
        import torch

        return torch.optim.AdamW(model.parameters(), fused=True)

    module = ModuleType(f"hugging_face_{path.stem}")
    module.get_model = get_model  # type: ignore[attr-defined]
    module.get_batch = _batch_function(task, configuration, dtype, path)  # type: ignore[attr-defined]
    module.get_optimizer = get_optimizer  # type: ignore[attr-defined]
    for function in (get_model, module.get_batch, get_optimizer):
        function.__module__ = module.__name__
    return Loaded(module, class_name, _notes(task, configuration, dtype_words, why))


def is_configuration(path: Path) -> bool:
    """Whether the JSON file looks like a configuration of the transformers library."""
    try:
        value = read_json(path)
    except (OSError, FormatError):
        return False
    return isinstance(value, dict) and "model_type" in value


def _library(path: Path) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigurationError(
            f"hf:{path} needs the transformers library: pip install transformers ({error})"
        ) from error


def _read(transformers: Any, path: Path) -> Any:
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of token numbers
    try:
        return transformers.AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        first = str(error).strip().splitlines()
        reason = first[0] if first else type(error).__name__
        raise ConfigurationError(
            f"hf:{path}: the transformers library {transformers.__version__} cannot read it: "
            f"{reason}"
        ) from error


def _chosen(transformers: Any, configuration: Any, path: Path) -> tuple[str, Task, str]:
    """The class to build, what it is for, and why that one where the file does not say."""
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    asked = [str(name) for name in getattr(configuration, "architectures", None) or ()]
    for name in asked:
        for task in TASKS:
            if name in _flat(getattr(tables, task.table).values()):
                return name, task, ""
    heads = {name for task in TASKS for name in _flat([_of(tables, task, configuration)])}
    base = _flat([tables.MODEL_MAPPING_NAMES.get(configuration.model_type)])
    if not asked or set(asked) <= set(base):
        for task in TASKS:
            for name in _flat([_of(tables, task, configuration)]):
                said = (
                    f"its architectures say {asked[0]}, which has no loss"
                    if asked
                    else ("its architectures say nothing")
                )
                return name, task, f"{said}; {name} was taken"
    known = f"; of {configuration.model_type!r} these can be: {', '.join(sorted(heads))}"
    raise ConfigurationError(
        f"hf:{path}: no batch is known for {', '.join(asked) or configuration.model_type}"
        f"{known if heads else ''}; write a model file with get_model() and get_batch() instead"
    )


def _of(tables: Any, task: Task, configuration: Any) -> Any:
    return getattr(tables, task.table).get(configuration.model_type)


def _flat(values: Any) -> list[str]:
    """The names of a table's entries, some of which are tuples of names, some None."""
    return [
        name
        for value in values
        if value is not None
        for name in ((value,) if isinstance(value, str) else value)
    ]


def _dtype(configuration: Any) -> tuple[Any, str]:
    import torch

    dtype = getattr(configuration, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    if not isinstance(dtype, torch.dtype):
        return torch.float32, "float32, since the file names no dtype"
    return dtype, f"{str(dtype).removeprefix('torch.')}, the file's dtype"


def _batch_function(
    task: Task, configuration: Any, dtype: Any, path: Path
) -> Callable[..., dict[str, Any]]:
    longest = getattr(configuration.get_text_config(), "max_position_embeddings", None)

    def text(batch_size: int, seq_length: int) -> dict[str, Any]:
        if isinstance(longest, int) and 0 < longest < seq_length:
            raise ConfigurationError(
                f"--seq-length {seq_length} is more than the max_position_embeddings of {longest} "
                f"in {path}"
            )
        return task.batch(configuration, batch_size, seq_length, dtype)

    def image(batch_size: int) -> dict[str, Any]:
        return task.batch(configuration, batch_size, 0, dtype)

    return text if task.is_text else image


def _tokens(configuration: Any, batch_size: int, length: int) -> Any:
    import torch

    return torch.randint(configuration.get_text_config().vocab_size, (batch_size, length))


def _language(configuration: Any, batch_size: int, length: int, dtype: Any) -> dict[str, Any]:
    tokens = _tokens(configuration, batch_size, length)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _classes(configuration: Any, shape: tuple[int, ...]) -> Any:
    """Labels: numbers of classes; one class alone is a regression, as the library has it."""
    import torch

    n_labels = configuration.num_labels
    return torch.rand(shape) if n_labels == 1 else torch.randint(n_labels, shape)


def _sequence(configuration: Any, batch_size: int, length: int, dtype: Any) -> dict[str, Any]:
    tokens = _tokens(configuration, batch_size, length)
    return {
        "input_ids": tokens,
        "labels": _classes(configuration, (batch_size,)).to(
            dtype if configuration.num_labels == 1 else None
        ),
    }


def _token_classes(configuration: Any, batch_size: int, length: int, dtype: Any) -> dict[str, Any]:
    tokens = _tokens(configuration, batch_size, length)
    return {"input_ids": tokens, "labels": _classes(configuration, (batch_size, length))}


def _answers(configuration: Any, batch_size: int, length: int, dtype: Any) -> dict[str, Any]:
    import torch

    return {
        "input_ids": _tokens(configuration, batch_size, length),
        "start_positions": torch.randint(length, (batch_size,)),
        "end_positions": torch.randint(length, (batch_size,)),
    }


def _images(configuration: Any, batch_size: int, length: int, dtype: Any) -> dict[str, Any]:
    import torch

    height, width = image_size(configuration)
    n_channels = getattr(configuration, "num_channels", N_CHANNELS)
    pixels = torch.rand(batch_size, n_channels, height, width, dtype=dtype)
    return {"pixel_values": pixels, "labels": _classes(configuration, (batch_size,))}


def image_size(configuration: Any) -> tuple[int, int]:
    """Height and width in pixels."""
    size = getattr(configuration, "image_size", None) or IMAGE_SIZE
    if isinstance(size, int):
        return size, size
    height, width = size
    return int(height), int(width)


TASKS = (
    Task("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "a causal language model", True, _language),
    Task("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "a masked language model", True, _language),
    Task(
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        "a sequence-to-sequence model, sources as long as targets",
        True,
        _language,
    ),
    Task(
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "classes of sequences", True, _sequence
    ),
    Task("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", "classes of tokens", True, _token_classes),
    Task("MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES", "spans that answer", True, _answers),
    Task("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "classes of images", False, _images),
)


def _notes(task: Task, configuration: Any, dtype_words: str, why: str) -> tuple[str, ...]:
    if task.is_text:
        batch = "random tokens, all sequences of full length, no padding mask"
    else:
        height, width = image_size(configuration)
        said = "" if getattr(configuration, "image_size", None) else ", the size not being in it"
        batch = f"random images of {height} x {width} pixels{said}"
    assumed = (
        f"Assumed of the configuration: {task.title}; parameters in {dtype_words}; all of them "
        f"trained, by torch.optim.AdamW(fused=True); train mode; {batch}; labels given and the "
        "loss alone returned. A model file says anything else."
    )
    return (f"{why[:1].upper()}{why[1:]}.", assumed) if why else (assumed,)
