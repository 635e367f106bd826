"""`python -m memoryx --management host:port`: a shard of MemoryX."""

import os
import sys
from collections.abc import Sequence

from waferbox import roles
from waferbox.launch.installation import begin_process


def main(argv: Sequence[str] | None = None) -> int:
    # An OpenMP thread must not spin beside other processes. The variable is read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from memoryx.memoryx_program import MemoryXJob
    from memoryx.settings import parse_arguments
    from waferbox.host.folders import recovery_root
    from waferbox.runtime.node import run_node
    from waferbox.states.point_folders import remove_job, sweep
    from waferbox.states.state_service import StateService

    settings, state_settings = parse_arguments(argv)
    torch.set_num_threads(settings.threads)
    sweep(recovery_root())
    service = StateService()

    return run_node(
        roles.MEMORYX,
        settings,
        lambda context: MemoryXJob(context, service, state_settings),
        add_services=service.add_to,
        on_job_ended=lambda job: remove_job(recovery_root(), job),
    )


if __name__ == "__main__":
    begin_process()
    sys.exit(main())
