"""Failures of operations of kernels for the values of their operands, with the user's lines."""

import logging
from collections.abc import Iterable
from typing import Final

from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from waferbox.cirh.execution.kernel import OperationFailed
from waferbox.cirh.modules.sources import OperationSource, source_text
from waferbox.host.memory import is_refused_memory
from waferbox.runtime.node_job import JobFailure
from wsc.v1 import node_pb2, plan_pb2

logger: Final = logging.getLogger(__name__)

_RANGE: Final = (
    "look for data that is out of range, such as a token that the vocabulary or a label that the classes do not have"
)
_MATRIX: Final = "keep the matrix away from such values, for instance by adding a small multiple of the identity"


class KernelFailures:
    """The failures of a plan's kernels, explained by the sources of their operations. Stateless.

    Args:
        sources: those of the plan.
    """

    def __init__(self, sources: Iterable[plan_pb2.KernelSources]) -> None:
        self._sources = {
            (each.kernel, each.layer): [OperationSource(operation=op.name, source=op.source) for op in each.operations]
            for each in sources
        }

    def failure(self, run: plan_pb2.Run, step: int, error: OperationFailed) -> Exception:
        """Returns the failure of the job for one of a run in a step, which the user's data has caused."""
        if is_refused_memory(error):
            return error
        logger.info("an operation failed in step %d", step, exc_info=error)
        sources = self._sources.get((run.kernel, run.layer)) or self._sources.get((run.kernel, ""), [])
        where = source_text(sources, error.operation, error.number, error.count)
        is_matrix = isinstance(error.__cause__, LinAlgError)
        text = f"step {step}, {where}: {str(error).removesuffix('.')}. Its operands are {error.operands}: "
        return JobFailure(node_pb2.Failure.KIND_INPUT, text + (_MATRIX if is_matrix else _RANGE))
