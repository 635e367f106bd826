"""A prediction as a page: one file of HTML that needs no script, font or network."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from appliance.drawing.pages import template_environment
from waferbox.prediction.prediction import Prediction, ScalePrediction

_TEMPLATES: Final = template_environment(Path(__file__).with_name("templates"))


def prediction_page(prediction: ScalePrediction | Sequence[Prediction], data: Mapping[str, Any], about: str) -> str:
    """The page of a prediction for one number of wafers, or of those for several.

    Args:
        prediction: what was predicted.
        data: the same for `--json`, with the name of the step; the element with the id "prediction" contains it.
        about: the machine, and the rows of each wafer.
    """
    # Nothing in the data can end its element.
    common = {"step": data["step"], "about": about, "data": json.dumps(data, indent=1).replace("<", "\\u003c")}
    if isinstance(prediction, ScalePrediction):
        return _TEMPLATES.get_template("one_scale.html").render(prediction=prediction, **common)
    best_rate = max(each.rows_per_second / each.wafers for each in prediction)
    return _TEMPLATES.get_template("scales.html").render(predictions=prediction, best_rate=best_rate, **common)
