"""Draws docs/images/execution_modes.svg: one step of a small network in each execution mode. `python docs/modes.py`.

The times are of two real traces: the script runs itself on a cluster of one wafer in each mode, has a step traced in
the middle of training, and draws what each role did in it. Run it where little else runs.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import cerebras.pytorch as cstorch
from waferbox.rpc.server import make_channel
from wsc.v1 import management_pb2, management_pb2_grpc, observation_pb2, observation_pb2_grpc

FILE: Final = Path(__file__).parent / "images" / "execution_modes.svg"
BATCH, MICRO_BATCHES = 64, 4
FIRST_STEP, NUM_STEPS = 1000, 4000
PANEL, LEFT, GAP, BAR, ROW = 520, 96, 40, 26, 64
TOP, BOTTOM = 92, 70
WIDTH: Final = 2 * (LEFT + PANEL) + GAP + 24

COLOURS: Final = {  # in light and in dark
    "forward": ("#1d5fd1", "#79aeff"),
    "backward": ("#b8480c", "#ff9d5c"),
    "update": ("#1a7f37", "#5fd07a"),
    "send": ("#9a9ea8", "#6b7280"),
    "paper": ("#fbfaf7", "#14171d"),
    "edge": ("#d3d1c9", "#3a404b"),
    "ink": ("#20242c", "#e8eaee"),
    "soft": ("#666b75", "#a2a8b4"),
}
KINDS: Final = {
    "forward": "forward pass",
    "backward": "backward pass",
    "update": "update of weights",
    "send": "sent or added up",
}
STYLE: Final = """
  text { font-family: ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 12px;
         fill: var(--soft); }
  .paper { fill: var(--paper); stroke: var(--edge); }
  .title { font-size: 17px; font-weight: 650; fill: var(--ink); }
  .row { font-size: 13px; font-weight: 600; fill: var(--ink); text-anchor: end; }
  .where { font-size: 11px; }
  .track { stroke: var(--edge); }
  .number { font-size: 10px; fill: var(--paper); text-anchor: middle; }
  .end { text-anchor: end; }
"""


class Bar(NamedTuple):
    """Something that is done in a row; seconds, from the step's begin."""

    row: str
    kind: str
    what: str
    begin: float
    seconds: float


class FullyConnected(nn.Module):
    """784-256-256-10, as in the documents of both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(784, 256), nn.Linear(256, 256), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))
        return result


def input_fn() -> list[tuple[torch.Tensor, torch.Tensor]]:
    images = torch.randn(8, BATCH, 784, generator=torch.Generator().manual_seed(0))
    return list(zip(images, images[:, :, :10].argmax(-1), strict=True))


# --- the script that is traced ----------------------------------------------------------------------------------------


def train(traced: Path) -> None:
    """Trains, and has a step traced; its spans are written to the file."""
    cstorch.backends.csx.performance.micro_batch_size = BATCH // MICRO_BATCHES
    config = cstorch.distributed.ClusterConfig(num_csx=1)
    with tempfile.TemporaryDirectory() as folder:
        backend = cstorch.backend("CSX", artifact_dir=Path(folder), cluster_config=config)
        model = FullyConnected()
        compiled = cstorch.compile(model, backend)
        optimizer = cstorch.optim.AdamW(model.parameters(), lr=1e-3)
        tracing = threading.Thread(target=trace, args=(os.environ["WAFERBOX_MANAGEMENT"], traced))

        @cstorch.trace
        def step(batch: Sequence[torch.Tensor]) -> torch.Tensor:
            loss = F.cross_entropy(compiled(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        for number, batch in enumerate(
            cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=NUM_STEPS)
        ):
            step(batch)
            if number == FIRST_STEP:
                tracing.start()
        tracing.join()


def trace(management: str, file: Path) -> None:
    """Writes the spans of one step of the only job."""
    with make_channel(management) as channel:
        (job,) = management_pb2_grpc.ManagementStub(channel).ListJobs(management_pb2.ListJobsRequest()).jobs
        request = observation_pb2.TraceJobRequest(job=job.job, num_steps=1)
        responses = observation_pb2_grpc.ObservationStub(channel).TraceJob(request, timeout=60)
        spans = [span for response in responses for span in response.spans]
    names = ("node", "region", "what", "detail", "begin", "seconds")
    file.write_text(json.dumps([{name: getattr(span, name) for name in names} for span in spans]))


def spans_of(strategy: str) -> list[Mapping[str, object]]:
    """Of a step in this mode."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spans.json"
        command = [sys.executable, "-m", "waferbox", "run", "--wafers", "1", "--threads", "2", __file__, str(file)]
        subprocess.run(command, check=True, env={**os.environ, "WAFERBOX_EXECUTION_STRATEGY": strategy}, timeout=300)
        found: list[Mapping[str, object]] = json.loads(file.read_text())
        return found


# --- the drawing ------------------------------------------------------------------------------------------------------


def bars(spans: Iterable[Mapping[str, object]]) -> Iterator[Bar]:
    """What is drawn of a step: all but waiting, and all but input, from the first of it."""
    shown = [bar for span in spans if (bar := _bar(span)) is not None]
    begin = min(bar.begin for bar in shown)
    return (bar._replace(begin=bar.begin - begin) for bar in shown)


def _bar(span: Mapping[str, object]) -> Bar | None:
    node, region, what, detail = (str(span[name]) for name in ("node", "region", "what", "detail"))
    row = region or node.rpartition("-")[0]
    if what == "wait" or row == "worker" or "batch" in detail.split(",")[0]:
        return None
    if what in ("send", "reduce"):
        kind = "send"
    elif "update" in (what, *detail.split(",")[0].split()):
        kind = "update"
    else:
        kind = "backward" if "backward" in detail else "forward"
    begin, seconds = span["begin"], span["seconds"]
    assert isinstance(begin, float) and isinstance(seconds, float)
    return Bar(row, kind, f"{what} {detail}", begin, seconds)


def panel(x: float, title: str, rows: Mapping[str, tuple[str, str]], drawn: Sequence[Bar]) -> Iterator[str]:
    """A mode. rows: what each is called, and what lies there."""
    length = max(bar.begin + bar.seconds for bar in drawn)
    left = x + LEFT
    yield f'<text class="title" x="{left}" y="40">{escape(title)}</text>'
    yield f'<text x="{left}" y="60">one step of {BATCH} samples in {MICRO_BATCHES} micro-batches</text>'
    for number, (row, (name, where)) in enumerate(rows.items()):
        y = TOP + number * ROW
        yield f'<text class="row" x="{left - 10}" y="{y + 17}">{escape(name)}</text>'
        yield f'<line class="track" x1="{left}" x2="{left + PANEL}" y1="{y + BAR}" y2="{y + BAR}"/>'
        yield f'<text class="where" x="{left}" y="{y + BAR + 15}">{escape(where)}</text>'
        for bar in (bar for bar in drawn if bar.row == row):
            begin, width = left + PANEL * bar.begin / length, max(PANEL * bar.seconds / length, 1.0)
            yield (
                f'<rect x="{begin:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="var(--{bar.kind})">'
                f"<title>{escape(bar.what)}: {bar.seconds * 1e6:.0f} us</title></rect>"
            )
            micro_batch = bar.what.rpartition("micro-batch ")[2]
            if width > 9 and bar.kind in ("forward", "backward") and micro_batch != bar.what:
                yield f'<text class="number" x="{begin + width / 2:.1f}" y="{y + 17}">{micro_batch}</text>'
    bottom = TOP + len(rows) * ROW
    yield f'<text x="{left}" y="{bottom}">0</text>'
    yield f'<text class="end" x="{left + PANEL}" y="{bottom}">{length * 1e3:.2f} ms</text>'


def picture(streaming: Sequence[Bar], pipelined: Sequence[Bar]) -> str:
    ordered = sorted(pipelined, key=lambda bar: bar.begin)
    regions = [row for row in dict.fromkeys(bar.row for bar in ordered if bar.kind == "forward") if row != "wafer"]
    places = {region: (region, "its weights and optimizer state live here, and are updated here") for region in regions}
    places["wafer"] = ("wafer", "sends losses to the user; nothing else leaves it in a step")
    roles = {
        "memoryx": ("MemoryX", "all weights and optimizer state live here, and are updated here"),
        "swarmx": ("SwarmX", "broadcasts weights, and adds up gradients, losses and counts"),
        "wafer": ("wafer", "one layer at a time: its weights, and the activations"),
    }
    height = TOP + max(len(roles), len(places)) * ROW + BOTTOM
    legend, x = [], float(LEFT)
    for kind, name in KINDS.items():
        legend.append(f'<rect x="{x}" y="{height - 34}" width="14" height="14" fill="var(--{kind})"/>')
        legend.append(f'<text x="{x + 20}" y="{height - 22}">{name}</text>')
        x += 40 + 7 * len(name)
    legend.append(f'<text x="{x}" y="{height - 22}">numbers are micro-batches; what is left out is waiting</text>')
    themes = [
        "svg { " + " ".join(f"--{name}: {pair[theme]};" for name, pair in COLOURS.items()) + " }" for theme in (0, 1)
    ]
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img">',
            "<title>A step in weight streaming, and in layer pipelined mode</title>",
            f"<style>{themes[0]} @media (prefers-color-scheme: dark) {{ {themes[1]} }}{STYLE}</style>",
            f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>',
            *panel(0, "Weight streaming", roles, streaming),
            *panel(LEFT + PANEL + GAP, "Layer pipelined", places, pipelined),
            *legend,
            "</svg>\n",
        )
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]))
    else:
        both = [list(bars(spans_of(strategy))) for strategy in ("weight_streaming", "pipeline")]
        FILE.write_text(picture(*both))
