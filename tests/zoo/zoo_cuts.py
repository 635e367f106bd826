"""Cuts a configuration of the public Model Zoo down: small sizes, three steps.

Sizes are cut by what their names say, in any section: a release may have names that no rule is for, and then its model
is as large as before.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEPS = 3
BATCH = 4
SEQUENCE = 32
VOCABULARY = 128
PREDICTIONS = 8
SIDE = 64  # of an image, if the model has no patches
RARE = 1e-9  # the probability of dropout, which some data processors need to have

# The largest number of each name; the first pattern that fits the whole name counts.
_LARGEST = [
    (re.compile(pattern), largest)
    for pattern, largest in (
        (r"(.*_)?vocab_size", VOCABULARY),
        (r"(.*_)?num_(hidden_)?layers|depth", 2),
        (r"(.*_)?num_heads", 4),
        (r"(.*_)?num_kv_groups", 2),
        (r"d_kv|rotary_dim", 8),
        (r"(.*_)?(hidden_size|embedding_size|hidden_dim|inner_dim|layer_dim)|d_model|input_unit|layers_units", 32),
        (r"(input|output)_size", 32),
        (r"local_patch_dims", 2),
        (r"(.*_)?(filter_size|intermediate_size)|d_ff", 64),
        (r"(encoder|decoder)_filters", 16),
        (r"(.*_)?(max_sequence_length|max_position_embeddings)", SEQUENCE),
        (r"max_predictions_per_seq|max_cls_tokens", PREDICTIONS),
        (r".*sliding_window_length", SEQUENCE // 2),
        (r"latent_size", 8),
        (r"batch_size", BATCH),
        (r"num_workers(_per_csx)?|num_csx|num_(act|wgt)_servers", 1),
        (r"prefetch_factor", 2),
        (r"total_iters|(warmup_|decay_)?steps", 2),
    )
]
_IMAGE_SIZES = ("image_shape", "image_size", "global_image_size", "local_image_size", "image_data_size", "size")
_MOST_CHANNELS = 4  # of an image: larger numbers of its shape are sides
# Lengths in steps, which the cut sets, and what a small model on one computer does not need.
_LEFT_OUT = re.compile(
    r"num_epochs|num_steps|steps_per_epoch|eval_frequency|(.*[_.])?micro_batch_size|.*_memory_gi|ckpt_paths?"
)


def cut(configuration: dict[str, Any], model_folder: Path, device: str) -> dict[str, Any]:
    """Returns the configuration, small.

    Dropout is rare, and values and shuffles have a seed: otherwise no two runs have the same losses, on any device.
    """
    patches = next(values(configuration, "patch_size"), None)
    small: dict[str, Any] = _small(configuration, 2 * patches[0] if isinstance(patches, list) else SIDE)
    if "trainer" in small:
        _shorten_trainer(small["trainer"], model_folder, device)
    else:
        small["runconfig"] = (
            {"seed": 1}
            | small.get("runconfig", {})
            | {
                "max_steps": STEPS,
                "log_steps": 1,
                "checkpoint_steps": STEPS,
                "eval_steps": 1,
                "model_dir": str(model_folder),
            }
        )
    for _, section in inputs(small):
        if "shuffle" in section and "MNIST" not in section.get("data_processor", ""):  # which has the seed of torch
            section.setdefault("shuffle_seed", 1)
    return small


def inputs(configuration: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The sections that describe training data, by name: of the configuration of a run, or of a trainer."""
    for name, section in configuration.get("trainer", configuration).items():
        for data in [section, *section.values()] if isinstance(section, dict) else []:
            if isinstance(data, dict) and "batch_size" in data:
                yield name, data


def values(value: Any, name: str) -> Iterator[Any]:
    """All values of a name, or of one that ends with it, in any section."""
    if isinstance(value, dict):
        for key, part in value.items():
            if str(key).endswith(name):
                yield part
            yield from values(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from values(part, name)


def _small(value: Any, side: int, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _small(part, side, str(key)) for key, part in value.items() if not _LEFT_OUT.fullmatch(str(key))}
    if isinstance(value, list):
        return [_small(part, side, name) for part in value]
    if "dropout" in name and isinstance(value, float):
        return min(value, RARE)
    if isinstance(value, int) and not isinstance(value, bool):
        if name in _IMAGE_SIZES:
            return value if value <= _MOST_CHANNELS else side
        return min(value, next((largest for pattern, largest in _LARGEST if pattern.fullmatch(name)), value))
    return value


def _shorten_trainer(trainer: dict[str, Any], model_folder: Path, device: str) -> None:
    trainer["init"] |= {
        "model_dir": str(model_folder),
        "backend": {"backend_type": device},
        "loop": {"max_steps": STEPS},
        "checkpoint": {"steps": STEPS},
        "logging": {"log_steps": 1},
        "seed": 1,
    }
    for name in [name for name in trainer if name not in ("init", "fit")]:
        del trainer[name]
    trainer["fit"].pop("val_dataloader", None)
