"""What the client pulls, beside what comes in order."""

import threading

import pytest
import torch

from cstorch.errors import NodeLostError
from vendor_gateway.vendor_execution import CallEndedError, Outputs


def wanted() -> bool:
    return True


def test_outputs_are_there_until_the_client_has_passed_them() -> None:
    outputs = Outputs()
    for step in (1, 2, 3):
        outputs.put(step, {"loss": torch.tensor(float(step))})
    assert outputs.get("loss", 2, wanted) == 2
    assert outputs.get("loss", 1, wanted) == 1
    outputs.put_checkpoint(2, ["80"])
    assert outputs.wait_checkpoint(2, wanted) == ["80"]
    assert outputs.take_passed(2) == (2, [2])
    assert outputs.take_passed(2) == (0, [])
    assert outputs.take_passed(1) == (0, [])
    with pytest.raises(KeyError):
        outputs.get("loss", 2, wanted)
    with pytest.raises(KeyError):
        outputs.wait_checkpoint(2, wanted)
    with pytest.raises(KeyError):
        outputs.get("accuracy", 3, wanted)


def test_who_waits_gets_what_comes() -> None:
    outputs = Outputs()
    got: list[torch.Tensor] = []
    waiter = threading.Thread(target=lambda: got.append(outputs.get("loss", 1, wanted)))
    waiter.start()
    outputs.put(1, {"loss": torch.tensor(7.0)})
    waiter.join(10)
    assert got == [torch.tensor(7.0)]


def test_who_waits_hears_of_a_failure_and_what_has_come_can_be_had() -> None:
    outputs = Outputs()
    outputs.put(1, {"loss": torch.tensor(7.0)})
    outputs.fail(NodeLostError("wafer-0 died"))
    outputs.fail(NodeLostError("and so did others"))
    assert outputs.get("loss", 1, wanted) == 7
    with pytest.raises(NodeLostError, match="wafer-0 died"):
        outputs.get("loss", 2, wanted)
    with pytest.raises(NodeLostError):
        outputs.wait_finished(wanted)


def test_a_call_that_nobody_waits_for_ends() -> None:
    with pytest.raises(CallEndedError):
        Outputs().get("loss", 1, lambda: False)
