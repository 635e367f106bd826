"""Writes the training step of a large GPT as CIRH, for `waferbox plan`; its weights are never made.

    python -m benchmarks.large_gpt 13b|175b --rows N --out step.mlir

AdamW, sequences of 2,048 tokens, a vocabulary of 50,257. Prints seconds and the peak of memory.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Final

import torch

from benchmarks.gpt import GPT, GPTSettings, token_loss
from benchmarks.traced import TracedStep, trace_training

SEQUENCE: Final = 2048
SIZES: Final = {
    "13b": GPTSettings(vocabulary=50257, width=5120, layers=40, heads=40, sequence=SEQUENCE),
    "175b": GPTSettings(vocabulary=50257, width=12288, layers=96, heads=96, sequence=SEQUENCE),
}


def trace_without_weights(settings: GPTSettings, rows: int) -> tuple[int, TracedStep]:
    """A step of a GPT whose weights are never made, and the number of its parameters."""
    import cerebras.pytorch as cstorch

    with tempfile.TemporaryDirectory() as folder:
        # Within backend.device parameters are only described; nothing here asks for their values.
        backend = cstorch.backend("CSX", artifact_dir=Path(folder), validate_only=True)
        with backend.device:
            model = GPT(settings)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = torch.zeros((rows, settings.sequence), dtype=torch.int64)
    made = trace_training(model, lambda net, batch: token_loss(net(batch[0]), batch[1]), (tokens, tokens), lr=1e-4)
    return parameters, made


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=[*SIZES])
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    begin = time.perf_counter()
    parameters, made = trace_without_weights(SIZES[options.size], options.rows)
    options.out.write_text(made.text)
    seconds = time.perf_counter() - begin
    told = {"parameters": parameters, "seconds": seconds, "peak_bytes": peak_bytes(), "text_bytes": len(made.text)}
    print(json.dumps({**told, **made.seconds}))


if __name__ == "__main__":
    main()
