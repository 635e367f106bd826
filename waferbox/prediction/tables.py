"""A prediction as tables for a terminal, and as data for `--json`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from appliance.drawing.number_text import count_text, seconds_text
from waferbox.output.tables import empty_table
from waferbox.prediction.prediction import Prediction, ScalePrediction


def prediction_data(prediction: ScalePrediction) -> dict[str, Any]:
    """The prediction for `--json`: seconds, rows per second, and shares of a step."""
    return {
        "efficiency": prediction.efficiency,
        "best": _data(prediction.best),
        "single": _data(prediction.single),
        "tried": [_data(each) for each in prediction.tried],
    }


def scales_data(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The predictions for several numbers of wafers, for `--json`."""
    return {"predictions": [_data(each) for each in predictions]}


def _data(prediction: Prediction) -> dict[str, Any]:
    return {**dataclasses.asdict(prediction), "limit": prediction.limit}


def prediction_tables(prediction: ScalePrediction) -> Group:
    """The trees that were tried, how busy each part of the cluster is with the best tree, and what limits the step."""
    best, single = prediction.best, prediction.single
    numbers = ("fan-out", "levels", "SwarmX nodes", "step", "rows/s", "of linear")
    trees = empty_table(*numbers, "limited by", right=numbers, whole=numbers)
    for each in prediction.tried:
        share = each.rows_per_second / (each.wafers * single.rows_per_second)
        trees.add_row(
            f"[bold]{each.fan_out}" if each is best else str(each.fan_out),
            str(each.depth),
            str(each.swarmx_nodes),
            seconds_text(each.step_seconds),
            count_text(each.rows_per_second),
            f"{share:.3f}",
            each.limit,
        )
    loads = empty_table(
        "busy in a step", "one wafer", f"{best.wafers} wafers", right=("one wafer", f"{best.wafers} wafers")
    )
    for alone, load in zip(single.loads, best.loads, strict=True):
        loads.add_row(load.name, f"{alone.share:.1%}", f"{load.share:.1%}")
    tree = f"With a fan-out of {best.fan_out}" if best.depth else "Without SwarmX"
    lines = (
        f"{tree}: {seconds_text(best.step_seconds)} a step, "
        f"{count_text(best.rows_per_second)} rows/s, {prediction.efficiency:.3f} of {best.wafers} times one wafer, "
        f"which takes {seconds_text(single.step_seconds)} for its rows.",
        f"Limited by: {best.limit}.",
    )
    return Group(trees, Text(), loads, Text(), *(Text(line) for line in lines))


def scales_table(predictions: Sequence[Prediction]) -> Table:
    """The step for several numbers of wafers, each with its best SwarmX tree, and what limits it."""
    numbers = ("wafers", "step", "rows/s", "fan-out")
    table = empty_table(*numbers, "limited by", right=numbers, whole=numbers)
    for each in predictions:
        table.add_row(
            f"{each.wafers:,}",
            seconds_text(each.step_seconds),
            count_text(each.rows_per_second),
            str(each.fan_out),
            each.limit,
        )
    return table
