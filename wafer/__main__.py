"""`python -m wafer --management host:port`: a wafer."""

import os
import sys
from collections.abc import Sequence

from waferbox import roles
from waferbox.launch.installation import begin_process


def main(argv: Sequence[str] | None = None) -> int:
    # An OpenMP thread must not spin beside other processes. The variable is read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from wafer.wafer_job import WaferJob
    from waferbox.host.folders import recovery_root
    from waferbox.host.memory import keep_freed_memory
    from waferbox.runtime.node import parse_arguments, run_node
    from waferbox.states.point_folders import remove_job, sweep
    from waferbox.states.state_service import StateService

    keep_freed_memory()
    settings = parse_arguments(roles.WAFER, argv)
    sweep(recovery_root())
    service = StateService()

    return run_node(
        roles.WAFER,
        settings,
        lambda context: WaferJob(context, settings.threads, service),
        add_services=service.add_to,
        on_job_ended=lambda job: remove_job(recovery_root(), job),
    )


if __name__ == "__main__":
    begin_process()
    sys.exit(main())
