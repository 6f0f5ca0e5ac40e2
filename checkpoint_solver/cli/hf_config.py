"""A Hugging Face configuration (config.json) as the problem: `solve hf:config.json`.

The model is the class of the transformers library named in `architectures`; it is built on the meta
device, so nothing is downloaded or allocated. The class's task, found in the library's tables
(`MODEL_FOR_..._MAPPING_NAMES`), determines what the random batch contains. Assumptions about the
step are listed in `notes`, for the report.

Sources: https://huggingface.co/docs/transformers/main_classes/configuration and
https://huggingface.co/docs/transformers/model_doc/auto.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from graphs.files import FormatError, read_json

IMAGE_SIZE, N_CHANNELS = 224, 3
"""Side in pixels and number of channels of images, if the configuration does not give them."""


class ConfigurationError(ValueError):
    """No training step can be built from the configuration; the message says what would work."""


TASKS = {
    "CAUSAL_LM": "causal language modeling",
    "MASKED_LM": "masked language modeling",
    "SEQ_TO_SEQ_CAUSAL_LM": "sequence-to-sequence, sources as long as targets",
    "SEQUENCE_CLASSIFICATION": "sequence classification",
    "TOKEN_CLASSIFICATION": "token classification",
    "QUESTION_ANSWERING": "question answering",
    "IMAGE_CLASSIFICATION": "image classification",
}
"""The task in the name of a table MODEL_FOR_..._MAPPING_NAMES -> its name in the report."""
ON_IMAGES = "IMAGE_CLASSIFICATION"


class Loaded(NamedTuple):
    """A configuration as a model file.

    module: defines get_model, get_batch and get_optimizer, as a model file does.
    title: the name of the model class.
    notes: the assumptions made, as sentences for the report.
    """

    module: ModuleType
    title: str
    notes: tuple[str, ...]


def load(path: Path) -> Loaded:
    """Read config.json. Imports transformers.

    Raises ConfigurationError if transformers is missing, or if the model is unknown or cannot be
    trained.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigurationError(
            f"hf:{path} requires the transformers library: pip install transformers ({error})"
        ) from error
    configuration = _read_configuration(transformers, path)
    class_name, task, why = _choose_class(transformers, configuration, path)
    model_class = getattr(transformers, class_name)
    dtype, dtype_text = _dtype(configuration)
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
    takes_mask = "attention_mask" in inspect.signature(model_class.forward).parameters
    module.get_batch = _batch_function(  # type: ignore[attr-defined]
        task, configuration, dtype, path, with_mask=takes_mask
    )
    module.get_optimizer = get_optimizer  # type: ignore[attr-defined]
    for function in (get_model, module.get_batch, get_optimizer):
        function.__module__ = module.__name__
    return Loaded(module, class_name, _notes(task, configuration, dtype_text, why))


def is_configuration(path: Path) -> bool:
    """Whether a JSON file is a configuration of the transformers library."""
    try:
        value = read_json(path)
    except (OSError, FormatError):
        return False
    return isinstance(value, dict) and "model_type" in value


def _read_configuration(transformers: Any, path: Path) -> Any:
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns about token ids
    try:
        return transformers.AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ConfigurationError(
            f"hf:{path}: transformers {transformers.__version__} cannot read it: {reason}"
        ) from error


def _choose_class(transformers: Any, configuration: Any, path: Path) -> tuple[str, str, str]:
    """Choose a model class: its name, its task, and a sentence why ("" if the file names it).

    Raises ConfigurationError if no class with a known task is found.
    """
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    architectures = [str(name) for name in getattr(configuration, "architectures", None) or ()]
    table_of = {task: getattr(tables, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS}
    for name in architectures:
        for task, table in table_of.items():
            if name in _class_names(table.values()):
                return name, task, ""
    heads = [
        (name, task)
        for task, table in table_of.items()
        for name in _class_names([table.get(configuration.model_type)])
    ]
    base = _class_names([tables.MODEL_MAPPING_NAMES.get(configuration.model_type)])
    if heads and (not architectures or set(architectures) <= set(base)):
        name, task = heads[0]
        reason = (
            f"{architectures[0]} has no loss" if architectures else "the file names no architecture"
        )
        return name, task, f"Using {name}: {reason}."
    names = ", ".join(sorted({name for name, _ in heads}))
    known = f"; supported for {configuration.model_type!r}: {names}" if heads else ""
    raise ConfigurationError(
        f"hf:{path}: no batch is known for {', '.join(architectures) or configuration.model_type}"
        f"{known}; write a model file with get_model() and get_batch() instead"
    )


def _class_names(values: Any) -> list[str]:
    """The class names in entries of a table: names, tuples of names, or None."""
    return [
        name
        for value in values
        if value is not None
        for name in ((value,) if isinstance(value, str) else value)
    ]


def _dtype(configuration: Any) -> tuple[Any, str]:
    import torch

    dtype = getattr(configuration, "dtype", None)
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(dtype, torch.dtype):
        return torch.float32, "float32 (the file names no dtype)"
    return dtype, f"{str(dtype).removeprefix('torch.')}, as in the file"


def _batch_function(
    task: str, configuration: Any, dtype: Any, path: Path, *, with_mask: bool
) -> Callable[..., dict[str, Any]]:
    """Make the function get_batch.

    with_mask: add the attention_mask that tokenizers return, all ones as nothing is padded.
    """
    import torch

    longest = getattr(configuration.get_text_config(), "max_position_embeddings", None)

    def text(batch_size: int, seq_length: int) -> dict[str, Any]:
        if isinstance(longest, int) and 0 < longest < seq_length:
            raise ConfigurationError(
                f"--seq-length {seq_length} exceeds max_position_embeddings={longest} in {path}"
            )
        shape = batch_size, seq_length
        mask = {"attention_mask": torch.ones(shape, dtype=torch.int64)} if with_mask else {}
        return {**_text_batch(task, configuration, shape, dtype), **mask}

    def image(batch_size: int) -> dict[str, Any]:
        return _image_batch(configuration, batch_size, dtype)

    return image if task == ON_IMAGES else text


def _text_batch(
    task: str, configuration: Any, shape: tuple[int, int], dtype: Any
) -> dict[str, Any]:
    """Random tokens, and labels for the task. shape: (number of sequences, their length)."""
    import torch

    batch_size, length = shape
    tokens = torch.randint(configuration.get_text_config().vocab_size, shape)
    if task == "QUESTION_ANSWERING":
        starts, ends = (torch.randint(length, (batch_size,)) for _ in range(2))
        return {"input_ids": tokens, "start_positions": starts, "end_positions": ends}
    if task == "SEQUENCE_CLASSIFICATION":
        labels = _random_labels(configuration, (batch_size,))
        labels = labels.to(dtype if configuration.num_labels == 1 else None)
    elif task == "TOKEN_CLASSIFICATION":
        labels = _random_labels(configuration, shape)
    else:
        labels = tokens.clone()
    return {"input_ids": tokens, "labels": labels}


def _image_batch(configuration: Any, batch_size: int, dtype: Any) -> dict[str, Any]:
    import torch

    n_channels = getattr(configuration, "num_channels", N_CHANNELS)
    pixels = torch.rand(batch_size, n_channels, *image_size(configuration), dtype=dtype)
    return {"pixel_values": pixels, "labels": _random_labels(configuration, (batch_size,))}


def _random_labels(configuration: Any, shape: tuple[int, ...]) -> Any:
    """Random class labels; with one class real numbers, for which the library does regression."""
    import torch

    n_labels = configuration.num_labels
    return torch.rand(shape) if n_labels == 1 else torch.randint(n_labels, shape)


def image_size(configuration: Any) -> tuple[int, int]:
    """Height and width in pixels."""
    size = getattr(configuration, "image_size", None) or IMAGE_SIZE
    if isinstance(size, int):
        return size, size
    height, width = size
    return int(height), int(width)


def _notes(task: str, configuration: Any, dtype_text: str, why: str) -> tuple[str, ...]:
    batch = "random tokens in sequences of full length without padding (attention_mask is all ones)"
    if task == ON_IMAGES:
        height, width = image_size(configuration)
        source = "" if getattr(configuration, "image_size", None) else " (default size)"
        batch = f"random images of {height} x {width} pixels{source}"
    assumed = (
        f"Assumed for this configuration: {TASKS[task]}; parameters in {dtype_text}, all trained "
        f"with torch.optim.AdamW(fused=True); train mode; {batch}; labels are given and only the "
        "loss is returned. Use a model file for anything else."
    )
    return (why, assumed) if why else (assumed,)
