"""The command line of a shard of MemoryX."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from waferbox.host.memory import parse_size
from waferbox.links.shared_memory import SharedMemory
from waferbox.roles import MEMORYX
from waferbox.runtime.node import NodeSettings, node_parser, node_settings
from waferbox.states.state_memory import StateSettings


def parse_arguments(argv: Sequence[str] | None) -> tuple[NodeSettings, StateSettings]:
    """Returns the settings of a node, and of its states. Exits if an argument, or the folder, cannot be used."""
    parser = node_parser(MEMORYX)
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="keep weights and optimizer state in files of this folder"
    )
    parser.add_argument(
        "--memory-limit", type=_size, metavar="SIZE", help="of this process, such as 8g; the rest is in --state-dir"
    )
    arguments = parser.parse_args(argv)
    if arguments.memory_limit is not None and arguments.state_dir is None:
        parser.error("--memory-limit needs a --state-dir: a folder on a disk, for what has no room in memory")
    if arguments.state_dir is not None:
        try:
            SharedMemory.create_in(arguments.state_dir, 1).close()
        except (OSError, ValueError) as error:
            parser.error(f"--state-dir must be a folder on a disk that can be written: {error}")
    settings = StateSettings(folder=arguments.state_dir, limit_bytes=arguments.memory_limit)
    in_files = arguments.state_dir is not None
    return replace(node_settings(parser, arguments), states_in_files=in_files), settings


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
