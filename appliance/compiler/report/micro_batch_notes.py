"""What a user is told of a plan's micro-batches."""

from appliance.drawing.quantities import bytes_text
from wsc.v1 import plan_pb2


def micro_batch_notes(plan: plan_pb2.Plan) -> list[str]:
    """In lines; none where a wafer computes all its rows at once because nobody asked for less."""
    count, at_once = plan.worker.micro_batches, plan.wafer.micro_batches_at_once
    rows = plan.worker.local_rows // count
    notes = [
        f"micro_batch_size={each.size}: {each.refusal or f'{each.rows_per_second:,.0f} rows/s predicted'}"
        + ("" if each.refusal else f", {bytes_text(each.wafer_bytes)} of a wafer's memory")
        for each in plan.explored
    ]
    if plan.HasField("pipeline"):
        names = ", ".join(region.name for region in plan.pipeline.regions)
        notes.append(
            f"Layer pipelined mode: all weights are on the wafer, in {len(plan.pipeline.regions)} region(s): {names}; "
            f"{plan.batch_rows} rows in {count} micro-batch(es) of {rows}"
            + (f", over {replicas} replicas" if (replicas := plan.pipeline.num_replicas) > 1 else "")
            + ("; weights are updated for each of them" if plan.pipeline.asynchronous_updates else "")
        )
    elif count > 1:
        if at_once == count:
            how = "layer by layer: each layer's weights are streamed once for all of them"
        else:
            how = (
                f"{at_once} at a time, as the activations of more do not fit its memory: weights are streamed "
                f"{count // at_once} times"
            )
        notes.append(f"Each wafer computes its {plan.worker.local_rows} rows in {count} micro-batches of {rows}, {how}")
    return notes
