"""Who copies whose recovery points, and when a point of which there are copies is complete."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import cast

import pytest

from appliance.coordinator.execution.recovery_points import ExecutionPoints, NoRecoveryPoint, RecoveryPoints
from appliance.coordinator.nodes.job_nodes import JobMembers
from appliance.coordinator.points import ShareHolder, choose_copiers
from waferbox.host.clock import SystemClock
from wsc.v1 import node_pb2


def keepers(*places: str) -> list[ShareHolder]:
    """Of each its host and its folder: "A1" is folder 1 on host A, "A" one that is not known."""
    return [
        ShareHolder(name=str(n), host=place[0], folder=place if place[1:] else "") for n, place in enumerate(places)
    ]


def test_who_share_a_folder_copy_nothing() -> None:
    assert choose_copiers(keepers("A1")) == {}
    assert choose_copiers(keepers("A1", "A1", "A1")) == {}
    one_volume = [ShareHolder(name=str(n), host=str(n), folder="the same") for n in range(3)]
    assert choose_copiers(one_volume) == {}


def test_what_is_not_known_is_not_copied() -> None:
    assert choose_copiers(keepers("A", "B", "C1")) == {}
    assert choose_copiers(keepers("A", "B1", "C1")) == {"1": "2", "2": "1"}


def test_the_next_copies() -> None:
    assert choose_copiers(keepers("A1", "B1", "C1")) == {"0": "1", "1": "2", "2": "0"}
    assert choose_copiers(keepers("A1", "A2")) == {"0": "1", "1": "0"}  # two disks of one host


def test_another_host_comes_before_another_disk() -> None:
    assert choose_copiers(keepers("A1", "A2", "B1")) == {"0": "2", "1": "2", "2": "0"}


@pytest.mark.parametrize(
    "places", [["A1"] * 4 + ["B1"] * 4, ["A1", "B1"] * 3, ["A1", "A1", "B1", "B1", "C1", "C1"], ["A1", "A1", "B1"]]
)
def test_copies_are_spread(places: list[str]) -> None:
    chosen = choose_copiers(keepers(*places))
    assert len(chosen) == len(places)
    assert all(places[int(owner)] != places[int(copier)] for owner, copier in chosen.items())
    most = max(Counter(chosen.values()).values())
    assert most == (2 if len(set(Counter(places).values())) > 1 else 1)


class Points:
    """Two members keep points, of whom the copies named are made."""

    def __init__(self, copies: Collection[str]) -> None:
        self.asked: list[dict[str, str]] = []  # folders
        self._copies = copies
        self.completed: list[int] = []
        self.points = RecoveryPoints(None, self._copy, lambda point: self.completed.append(point.number), print)

    def _copy(self, kept: Mapping[str, node_pb2.RecoveryPointKept]) -> Collection[str]:
        self.asked.append({member: each.folder for member, each in kept.items()})
        return self._copies

    def make(self, number: int) -> None:
        self.points.make(number, execution=1, step=number, keepers=["a", "b"], workers=())

    def kept(self, member: str, number: int) -> None:
        kept = node_pb2.RecoveryPointKept(recovery_point=number, folder=f"disk of {member}")
        self.points.kept(member, f"host of {member}", kept)

    def settle(self) -> list[int]:
        self.points.settle(1, lambda step: True)
        return self.completed


def test_a_point_is_complete_when_all_copies_are() -> None:
    points = Points(["a", "b"])
    points.make(1)
    points.kept("a", 1)
    assert not points.asked
    points.kept("b", 1)
    assert points.asked == [{"a": "disk of a", "b": "disk of b"}]
    assert points.settle() == []
    points.points.copied("a", 1, "host of b")
    points.points.copied("a", 1, "host of b")
    points.points.copied("b", 7, "host of a")
    assert points.settle() == []
    points.points.copied("b", 1, "host of a")
    assert points.settle() == [1]
    assert points.points.is_over(1)


def test_the_hosts_of_a_share_are_those_that_have_it_now() -> None:
    points = Points(["a", "b"])

    def both_cover(host: str, other: str) -> bool:
        return len(points.points.covering({"one": host, "other": other})) == 2

    points.make(1)
    points.kept("a", 1)
    points.kept("b", 1)
    points.points.copied("a", 1, "host of b")
    points.points.copied("b", 1, "")  # it cannot be copied
    assert points.settle() == [1]
    assert both_cover("host of a", "host of b")  # the first alone has the share of a
    restored = node_pb2.RecoveryPointKept(recovery_point=1)
    points.points.kept("b", "another", restored)
    assert both_cover("host of a", "another")
    points.points.copied("b", 1, "host of a")
    assert not both_cover("host of a", "host of b")
    points.make(2)
    points.kept("b", 2)
    assert both_cover("another", "host of a")  # as before the point that is not complete


def test_members_are_chosen_on_whose_hosts_all_shares_are() -> None:
    points = Points(["a", "b"])
    assert points.points.covering({"a": "host of a"}) == []  # while no point is complete
    points.make(1)
    points.kept("a", 1)
    points.kept("b", 1)
    points.points.copied("a", 1, "host of b")
    points.points.copied("b", 1, "host of a")
    points.settle()
    assert points.points.covering({"a": "host of a", "b": "host of b"}) == ["a"]
    assert points.points.covering({"b": "host of b", "a": "host of a"}) == ["b"]
    # The node that took the place of a has no share yet, and b is dead: only the host of b has the shares of both.
    assert points.points.covering({"a": "another", "b": "host of b"}) == ["b"]
    assert points.points.covering({"a": "another", "b": "a third"}) == []


def test_each_member_is_chosen_whose_host_alone_has_a_share() -> None:
    points = Points([])
    points.make(1)
    points.kept("a", 1)
    points.kept("b", 1)
    points.settle()
    assert points.points.covering({"b": "host of b", "a": "host of a"}) == ["b", "a"]


def test_without_copies_a_point_is_complete_when_all_have_kept_it() -> None:
    points = Points([])
    points.make(1)
    points.kept("a", 1)
    points.kept("b", 1)
    assert points.settle() == [1]


def test_a_later_point_takes_the_place_of_one_that_waits_for_a_copy() -> None:
    points = Points(["a"])
    for number in (1, 2):
        points.make(number)
        points.kept("a", number)
        points.kept("b", number)
    points.points.copied("a", 2, "host of b")
    assert points.settle() == [2]
    points.points.copied("a", 1, "host of b")
    points.kept("b", 1)
    assert points.settle() == [2]
    assert len(points.asked) == 2


def test_copies_of_the_point_that_the_job_has_gone_back_to_are_made_again() -> None:
    """Nothing waits for them."""
    points = Points([])
    points.make(1)
    points.kept("a", 1)
    points.kept("b", 1)
    assert points.settle() == [1]
    points.points.give_up()
    points.asked.clear()
    points.kept("b", 1)
    points.points.give_up()  # another has died meanwhile
    points.kept("a", 1)
    points.kept("b", 1)
    assert points.asked[1:] == [{"a": "disk of a"}, {"a": "disk of a", "b": "disk of b"}]
    assert points.settle() == [1]


def test_a_point_after_the_last_step_waits_for_the_states_of_all_loaders() -> None:
    """Whoever goes on from it supplies no batch, and could not say any more where the loaders stood."""
    points = Points([])
    points.points.make(
        1, execution=1, step=4, keepers=["a", "b"], workers=("worker-0", "worker-1"), waits_for_inputs=True
    )
    for member in ("a", "b"):
        points.kept(member, 1)
    points.points.input_state("worker-1", 1, 4, b"one")
    points.points.input_state("worker-0", 1, 3, b"of another step")
    assert points.settle() == []
    points.points.input_state("worker-0", 1, 4, b"nought")
    assert points.settle() == [1]
    assert points.points.complete is not None
    assert points.points.complete.input_states == [b"nought", b"one"]


def test_a_job_without_a_point_says_that_the_last_could_not_be_written() -> None:
    points = RecoveryPoints(None, lambda kept: (), lambda point: None, lambda number: None)
    own = ExecutionPoints(
        points,
        cast(JobMembers, None),
        execution=1,
        follows_left=False,
        num_steps=5,
        wants_input_states=False,
        is_received=lambda step: True,
        clock=SystemClock(),
    )
    points.make(1, execution=1, step=0, keepers=["a"], workers=())
    with pytest.raises(NoRecoveryPoint, match=r"would resume from$"):
        own.usable()
    points.given_up(1)
    with pytest.raises(
        NoRecoveryPoint, match="would resume from: the last could not be written, as a warning has said"
    ):
        own.usable()
