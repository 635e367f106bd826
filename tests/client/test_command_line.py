"""The command line that a job shows: whole where it can be, and without secrets."""

import os

import pytest

from appliance.management import requests
from cstorch._internal.session.command_line import CUT, MAX_ARGUMENTS, MAX_CHARACTERS, command_line


@pytest.mark.parametrize("argv", [[], [""], ["-c", "x"], ["/somewhere/ipykernel_launcher.py", "-f", "kernel.json"]])
def test_a_process_without_a_script_has_none(argv: list[str]) -> None:
    assert command_line(argv) == ()


def test_the_script_is_absolute_and_its_arguments_are_as_they_were() -> None:
    arguments = [
        "--lr",
        "1e-3",
        "--tokenizer",
        "gpt2",
        "--max_tokens=7",
        "--token-file",
        "t",
        "a b",
        "http://host:80/x",
    ]
    assert command_line(["train.py", *arguments]) == (os.path.abspath("train.py"), *arguments)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--token", "hidden", "x"], ["--token", "***", "x"]),
        (["--hf_token=hidden"], ["--hf_token=***"]),
        (["db.PASSWORD=hidden"], ["db.PASSWORD=***"]),
        (["--api-key", "hidden"], ["--api-key", "***"]),
        (["--secret", "--lr", "1"], ["--secret", "--lr", "1"]),
        (["--store", "https://ada:hidden@host/x"], ["--store", "https://ada:***@host/x"]),
        (["--store=https://ada:hidden@host/x"], ["--store=https://ada:***@host/x"]),
    ],
)
def test_values_of_secrets_are_replaced(arguments: list[str], shown: list[str]) -> None:
    assert command_line(["/train.py", *arguments]) == ("/train.py", *shown)


@pytest.mark.parametrize("arguments", [["x"] * 1000, ["x" * 100] * 100, ["x" * MAX_CHARACTERS, "y"]])
def test_a_long_command_line_is_cut_to_what_management_takes(arguments: list[str]) -> None:
    shown = command_line(["/" + "s" * 5000, *arguments])
    assert shown[-1] == CUT
    assert len(shown) <= MAX_ARGUMENTS + 1 <= requests.MAX_ARGUMENTS
    assert sum(map(len, shown)) <= 2 * MAX_CHARACTERS + len(CUT) <= requests.MAX_COMMAND


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert command_line(["/train.py", os.fsdecode(b"\xff")]) == ("/train.py", "?")
