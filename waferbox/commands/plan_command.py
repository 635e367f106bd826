"""`waferbox plan`: predicts a step on clusters of any size."""

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from waferbox.commands.connection import ManagementOption
from waferbox.commands.html_option import HtmlOption, is_printed, refuse_json_with, write_page
from waferbox.commands.machine_option import MachineName, MachineOption, find_machine
from waferbox.commands.step_source import SOURCE_HELP, ExecutionOption, StepSource, find_source
from waferbox.output.console import Status, fail, output, print_text
from waferbox.output.working import Working, working

if TYPE_CHECKING:
    from waferbox.prediction.machines import Machine
    from waferbox.prediction.prediction import CompiledFor
    from wsc.v1 import plan_pb2

_RATES: Final = "Rates and sizes in place of the machine's"
_COMPILE: Final = "How the step is compiled, in place of how the script did"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """The options of how the step is compiled. None: not given."""

    divided_over: int | None
    memoryx: int | None
    half: str | None
    optimization_level: int | None
    half_gradients: bool


def plan(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)],
    execution: ExecutionOption = None,
    machine: MachineOption = MachineName.CS3,
    wafers: Annotated[
        str, typer.Option(metavar="N,N", help="Numbers of wafers. One alone is shown in detail.")
    ] = "1,16,1024",
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the prediction as JSON.")] = False,
    html: HtmlOption = None,
    management: ManagementOption = None,
    wafer_rate: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Arithmetic of a wafer, such as 312Tflop/s.", rich_help_panel=_RATES),
    ] = None,
    wafer_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a wafer, such as 40GB.", rich_help_panel=_RATES)
    ] = None,
    wafer_memory_rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="Reads and writes of a wafer in element-wise kernels.", rich_help_panel=_RATES
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Network of each role's host, in each direction: 100Gb/s, or 10GB/s.",
            rich_help_panel=_RATES,
        ),
    ] = None,
    memoryx_rate: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Reads and writes of a MemoryX shard in updates.", rich_help_panel=_RATES),
    ] = None,
    swarmx_rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Sums of a SwarmX node.", rich_help_panel=_RATES)
    ] = None,
    latency: Annotated[
        str | None, typer.Option(metavar="TIME", help="Of a frame from thread to thread.", rich_help_panel=_RATES)
    ] = None,
    frame_time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Of a thread, for each frame that it sends or receives.", rich_help_panel=_RATES
        ),
    ] = None,
    memoryx: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Shards of MemoryX.", rich_help_panel=_COMPILE)
    ] = None,
    divided_over: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Wafers among which the step's batch is divided; each wafer has such a part.",
            rich_help_panel=_COMPILE,
        ),
    ] = None,
    half: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE", help="Mixed precision in float16, bfloat16 or cbfloat16.", rich_help_panel=_COMPILE
        ),
    ] = None,
    optimization_level: Annotated[
        int | None,
        typer.Option(min=0, max=2, help="How much is computed in half precision.", rich_help_panel=_COMPILE),
    ] = None,
    half_gradients: Annotated[
        bool,
        typer.Option(
            "--half-gradients",
            metavar="",
            help="Send gradients of weights in half precision too.",
            rich_help_panel=_COMPILE,
        ),
    ] = False,
) -> None:
    """Predict a step on clusters of any size: its time, its bottleneck, the best SwarmX tree."""
    if as_json:
        refuse_json_with(html)
    with working("loading the compiler"):
        from appliance.compiler.core.progress import progress_shown
        from waferbox.prediction.page import prediction_page
        from waferbox.prediction.prediction import PredictionError, predict_scaled, predict_scales
        from waferbox.prediction.quantities import QuantityError
        from waferbox.prediction.tables import prediction_data, prediction_tables, scales_data, scales_table

    counts = _counts(wafers)
    try:
        planned = _with_rates(
            find_machine(machine),
            wafer_rate=wafer_rate,
            wafer_memory=wafer_memory,
            wafer_memory_rate=wafer_memory_rate,
            link=link,
            memoryx_rate=memoryx_rate,
            swarmx_rate=swarmx_rate,
            latency=latency,
            frame_time=frame_time,
        )
        found = find_source(source, execution, management)
        given = _Given(
            divided_over=divided_over,
            memoryx=memoryx,
            half=half,
            optimization_level=optimization_level,
            half_gradients=half_gradients,
        )
        with working("reading the step") as work, progress_shown(work.at):
            step = _plan_of(found, planned, given, work)
            work.now("predicting the step")
            if len(counts) == 1:
                scaled = predict_scaled(step, counts[0], planned.rates)
            else:
                scales = predict_scales(step, counts, planned.rates)
    except QuantityError as error:
        fail(str(error), Status.USAGE)
    except (PredictionError, OSError) as error:
        fail(str(error))
    figures = prediction_data(scaled) if len(counts) == 1 else scales_data(scales)
    data = {"step": found.name, "machine": planned.name, **figures}
    rows = step.batch_rows // step.num_csx
    about = (
        f"{planned.name} ({planned.source}). Each wafer has {rows:,} row{'' if rows == 1 else 's'}, in {_parts(step)}."
    )
    if html is not None:
        write_page(html, prediction_page(scaled if len(counts) == 1 else scales, data, about))
    if as_json:
        print_text(json.dumps(data, indent=1))
    elif html is None:
        print_text(f"{about}\n")
        output.print(prediction_tables(scaled) if len(counts) == 1 else scales_table(scales))
    elif not is_printed(html):
        print_text(f"The prediction is in {html}")


def _counts(text: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise typer.BadParameter(f"--wafers: {text!r} is no list of numbers such as 1,2,16") from None
    if counts[0] < 1 or counts[-1] > 1 << 20:
        raise typer.BadParameter("--wafers: each number is from 1 to 1048576")
    return counts


def _parts(step: "plan_pb2.Plan") -> str:
    count = max(1, step.wafer.micro_batches)
    return f"{count} micro-batches" if count > 1 else "one micro-batch"


def _with_rates(machine: "Machine", **given: str | None) -> "Machine":
    """The machine with the figures that are given. Raises QuantityError: one is no quantity of its kind."""
    from waferbox.prediction import quantities

    texts = {name: text for name, text in given.items() if text is not None}
    if not texts:
        return machine
    parsers = {
        "wafer_rate": quantities.flops_per_second,
        "latency": quantities.seconds,
        "frame_time": quantities.seconds,
    }
    values = {
        name: parsers.get(name, quantities.bytes_per_second)(text)
        for name, text in texts.items()
        if name != "wafer_memory"
    }
    rates = machine.rates
    memory = texts.get("wafer_memory")
    return dataclasses.replace(
        machine,
        source=f"{machine.source}; {', '.join(texts).replace('_', ' ')} as given",
        wafer_memory_bytes=machine.wafer_memory_bytes if memory is None else quantities.size_bytes(memory),
        rates=dataclasses.replace(
            rates,
            wafer=dataclasses.replace(
                rates.wafer,
                flops_per_second=values.get("wafer_rate", rates.wafer.flops_per_second),
                bytes_per_second=values.get("wafer_memory_rate", rates.wafer.bytes_per_second),
            ),
            memoryx=dataclasses.replace(
                rates.memoryx, bytes_per_second=values.get("memoryx_rate", rates.memoryx.bytes_per_second)
            ),
            swarmx_bytes_per_second=values.get("swarmx_rate", rates.swarmx_bytes_per_second),
            link_bytes_per_second=values.get("link", rates.link_bytes_per_second),
            latency_seconds=values.get("latency", rates.latency_seconds),
            frame_seconds=values.get("frame_time", rates.frame_seconds),
        ),
    )


def _plan_of(found: StepSource, machine: "Machine", given: _Given, work: Working) -> "plan_pb2.Plan":
    """The plan of a step: the one that there is, unless the machine's memory or the options need another.

    work: shows that the step is compiled.

    Raises:
        PredictionError: the step cannot be compiled so.
        OSError: a file cannot be read.
    """
    from waferbox.prediction.prediction import PredictionError, compile_file, is_plan_for, read_plan_file

    made = None if found.plan is None else read_plan_file(found.plan)
    wanted = _wanted(found, made, machine, given)
    if made is not None and is_plan_for(made, wanted):
        return made
    if found.text is None:
        raise PredictionError(
            f"{found.name} has no step in CIRH here, and its plan is for another memory of a wafer or other options: "
            "name the artifact folder of the script"
        )
    work.now("compiling the step")
    return compile_file(found.text, wanted, machine.rates)


def _wanted(found: StepSource, made: "plan_pb2.Plan | None", machine: "Machine", given: _Given) -> "CompiledFor":
    """How the step is compiled: as given, else as the script did."""
    from waferbox.prediction.prediction import CompiledFor, compiled_for

    if made is not None:
        before = compiled_for(made)
    elif (record := found.record) is not None:
        before = CompiledFor(
            num_csx=record.num_csx,
            half=record.half,
            optimization_level=record.optimization_level,
            half_gradients=record.half_gradients,
        )
    else:
        before = CompiledFor()
    return CompiledFor(
        num_csx=given.divided_over or before.num_csx,
        memoryx=given.memoryx or before.memoryx,
        wafer_memory_bytes=machine.wafer_memory_bytes,
        half=before.half if given.half is None else given.half,
        optimization_level=before.optimization_level if given.optimization_level is None else given.optimization_level,
        half_gradients=given.half_gradients or before.half_gradients,
    )
