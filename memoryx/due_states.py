"""What is kept of the states at the end of a step: the recovery point and the snapshot that are due then."""

from memoryx.recovery_points import RecoveryPoints
from memoryx.snapshots import Snapshots
from nodes.steps.schedule import StepSchedule
from nodes.telemetry.progress import Progress


def keep_due_states(
    recovery_points: RecoveryPoints, snapshots: Snapshots, schedule: StepSchedule, progress: Progress, step: int
) -> None:
    """In the thread of the steps. step: of the epoch. Stopped when the execution is interrupted meanwhile."""
    global_step = schedule.global_step(step)
    if recovery_points.due_step == global_step:
        recovery_points.keep_due(global_step)
    if schedule.keeps_snapshot(step):
        progress.waits = True  # for a client that has not done with the snapshot before
        snapshots.take(global_step)
        progress.waits = False
