"""What is wrong with a plan."""


class PlanError(ValueError):
    """The plan does not hold together; the message says where."""


def require(holds: object, problem: str) -> None:
    """Raises PlanError unless it holds."""
    if not holds:
        raise PlanError(problem)
