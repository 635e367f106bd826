"""The prediction of a step's time on a cluster of any size (`waferbox plan`), by simulating the plan's programs."""
