"""Prediction: steps of 1 to 8 wafers that sleep their predicted time, measured and predicted, with what limits them.

On one host over shared memory, and with each role on a host of its own, over gRPC with links of 1 Gbit/s (network
namespaces; needs root):

    python -m benchmarks.prediction --place shared_memory|hosts --model fc|gpt|wide
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from appliance.compiler.artifacts import read_plan
from appliance.compiler.cost.machine_model import machine_model
from benchmarks.by_hand import ROOT, cluster_by_hand
from benchmarks.emulated_wafer import VARIABLE, emulate
from benchmarks.network import NoNetwork, hosts
from benchmarks.process_hooks import hook_variables
from benchmarks.runs import ENVIRONMENT, run_for_result
from waferbox.host.folders import cache_root
from waferbox.prediction.prediction import Prediction, predict
from waferbox.prediction.simulation import Compute, Rates
from waferbox.runtime.swarmx_trees import FAN_IN
from wsc.v1 import plan_pb2

RUN_SECONDS: Final = 300.0
# A wafer of each model computes for about a tenth of a second in a step.
WAFERS: Final = {"fc": 1.5e9, "gpt": 40e9, "wide": 16e9}
COUNTS: Final = {"shared_memory": (1, 2, 4, 8), "hosts": (1, 2, 4)}
LINK: Final = 125e6
# Of a hop between two processes (docs/design_notes.md), half of it on threads; of a gRPC message of at most 1 MiB.
SHARED_MEMORY_HOP: Final = 16e-6
GRPC_MESSAGE: Final = 250e-6


def emulated(model: str) -> Compute:
    """The wafer of a model."""
    return Compute(flops_per_second=WAFERS[model])


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run."""

    step_seconds: float
    plan: plan_pb2.Plan


def rates(place: str, model: str) -> Rates:
    """Of this machine, as the compiler's model of it has them."""
    machine = machine_model(cache_root())
    hop = SHARED_MEMORY_HOP if place == "shared_memory" else GRPC_MESSAGE
    found = Rates(
        wafer=emulated(model),
        memoryx=Compute(
            flops_per_second=machine.float32_flops_per_second,
            bytes_per_second=machine.bytes_per_second,
            call_seconds=machine.operation_seconds,
        ),
        swarmx_bytes_per_second=machine.bytes_per_second,
        latency_seconds=hop / 2,
        frame_seconds=hop / 4,
    )
    return found if place == "shared_memory" else replace(found, link_bytes_per_second=LINK)


def measure(place: str, model: str, wafers: int, compute: Compute) -> Run:
    """One run of so many wafers, which compute at these rates. Raises NoNetwork where there can be no hosts."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            **os.environ,
            **ENVIRONMENT,
            "WAFERBOX_CACHE": f"{folder}/cache",
            VARIABLE: emulate(compute),
        }
        script = ["-m", "benchmarks.prediction_training", "--model", model, "--wafers", str(wafers), "--folder", folder]
        if place == "shared_memory":
            variables |= hook_variables(ROOT / "benchmarks" / "emulated_wafer.py")
            seconds = _run([sys.executable, *script], variables)
        else:
            seconds = _run_on_hosts(script, wafers, variables, Path(folder))
        (path,) = Path(folder).rglob("*.plan")
        plan = read_plan(path)
        assert plan is not None
        return Run(step_seconds=seconds, plan=plan)


def _run_on_hosts(script: Sequence[str], wafers: int, variables: Mapping[str, str], folder: Path) -> float:
    """MemoryX, SwarmX and each wafer on a host of its own."""
    with hosts(wafers + 3, "1gbit") as (first, second, third, *others):
        places = [("memoryx", second), ("swarmx", third)]
        places += [(module, host) for host in others for module in ("benchmarks.emulated_wafer", "workers")]
        with cluster_by_hand(first, places, variables, folder / "roles.log") as management:
            return _run(first.command(sys.executable, *script), {**variables, "WAFERBOX_MANAGEMENT": management})


def _run(command: Sequence[str], variables: Mapping[str, str]) -> float:
    return float(run_for_result(command, variables, RUN_SECONDS)["step_seconds"])


def predicted(place: str, model: str, wafers: int, plan: plan_pb2.Plan) -> Prediction:
    """Of the cluster that was measured: on hosts there is one SwarmX node."""
    return predict(plan, wafers, FAN_IN if place == "shared_memory" else max(2, wafers), rates(place, model))


def bench(repeats: int) -> None:
    """Both places, all models."""
    print("prediction: wafers that sleep their predicted time; as many rows for each, whatever their number")
    for place, counts in COUNTS.items():
        for model in WAFERS:
            print(f"  {model}, {place}", flush=True)
            try:
                _bench(place, model, counts, repeats)
            except NoNetwork as error:
                print(f"    not measured: {error}")


def _bench(place: str, model: str, counts: Iterable[int], repeats: int) -> None:
    first = 0.0
    for wafers in counts:
        runs = [measure(place, model, wafers, emulated(model)) for _ in range(repeats)]
        seconds = statistics.median(run.step_seconds for run in runs)
        first = first or seconds
        foreseen = predicted(place, model, wafers, runs[0].plan)
        print(
            f"    {wafers} wafers: {1e3 * seconds:.1f} ms a step, {first / seconds:.3f} of linear; predicted "
            f"{1e3 * foreseen.step_seconds:.1f} ms ({foreseen.step_seconds / seconds - 1:+.1%}); "
            f"limited by {foreseen.limit}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", choices=[*COUNTS], default="shared_memory")
    parser.add_argument("--model", choices=[*WAFERS], default="fc")
    parser.add_argument("--wafers", type=int, default=0, help="0: all numbers")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    counts = [options.wafers] if options.wafers else COUNTS[options.place]
    _bench(options.place, options.model, counts, options.repeats)


if __name__ == "__main__":
    main()
