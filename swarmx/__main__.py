"""`python -m swarmx --management host:port`: a SwarmX node, which broadcasts and reduces."""

import os
import sys
from collections.abc import Sequence

from waferbox import roles
from waferbox.launch.installation import begin_process


def main(argv: Sequence[str] | None = None) -> int:
    # An OpenMP thread must never spin beside other processes; read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from swarmx.swarmx_program import SwarmXJob
    from waferbox.runtime.node import parse_arguments, run_node

    settings = parse_arguments(roles.SWARMX, argv)
    torch.set_num_threads(settings.threads)
    return run_node(roles.SWARMX, settings, SwarmXJob)


if __name__ == "__main__":
    begin_process()
    sys.exit(main())
