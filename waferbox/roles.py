"""The roles of a cluster's processes, in one table for all that start, count, name or show them.

A new role needs a row here, a number in proto/wsc/v1/node.proto, a package with a `main`, its part of the plan, and its
part of a Load (appliance/coordinator).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from wsc.v1 import node_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One kind of process. Importable without protobuf, because every process reads the table before it starts.

    name: in the names of members ("wafer-0"), in docker-compose.yml, on Kubernetes, in commands and metrics.
    module: the module that is started, as in `python -m MODULE`.
    noun: names one process, in messages; with an "s" for several.
    heading: names all processes of the role, on the page.
    is_leased: whether jobs lease nodes of the role.
    has_own_name: whether other processes reach it by the name of its service, and not by its address.
    count_option: the option of `waferbox up` with the number of processes, without dashes; empty: there is none.
    default_cpus: the processors that Ray reserves for one process.
    """

    name: str
    module: str
    noun: str
    heading: str
    is_leased: bool = False
    has_own_name: bool = False
    count_option: str = ""
    default_cpus: float = 0.0

    @property
    def number(self) -> "node_pb2.Role.ValueType":
        """The number of the role in the protocol. Raises ValueError: the role does not register with management."""
        from wsc.v1 import node_pb2

        return node_pb2.Role.Value(f"ROLE_{self.name.upper()}")

    def counted(self, count: int) -> str:
        """Returns the number with the noun, such as "2 input workers"."""
        return f"{count} {self.noun}{'' if count == 1 else 's'}"

    def member_name(self, index: int) -> str:
        """Returns the name of a member of a job by its index among those of the role, such as "wafer-0"."""
        return f"{self.name}-{index}"


WAFER: Final = Role(
    name="wafer",
    module="wafer",
    noun="wafer",
    heading="Wafers",
    is_leased=True,
    count_option="wafers",
    default_cpus=1.0,
)
MEMORYX: Final = Role(
    name="memoryx",
    module="memoryx",
    noun="MemoryX node",
    heading="MemoryX",
    is_leased=True,
    count_option="memoryx",
    default_cpus=0.5,
)
SWARMX: Final = Role(
    name="swarmx",
    module="swarmx",
    noun="SwarmX node",
    heading="SwarmX",
    is_leased=True,
    count_option="swarmx",
    default_cpus=0.25,
)
WORKER: Final = Role(
    name="worker",
    module="workers",
    noun="input worker",
    heading="Input workers",
    is_leased=True,
    count_option="workers",
    default_cpus=0.25,
)
INGRESS: Final = Role(name="ingress", module="appliance.ingress", noun="ingress", heading="Ingress", has_own_name=True)
MANAGEMENT: Final = Role(
    name="management", module="appliance", noun="management service", heading="Management", has_own_name=True
)
COORDINATOR: Final = Role(
    name="coordinator", module="appliance.coordinator", noun="coordinator", heading="Coordinators"
)
VENDOR_GATEWAY: Final = Role(
    name="vendor_gateway",
    module="vendor_gateway",
    noun="gateway for the vendor's client",
    heading="Gateway for the vendor's client",
)

# Tables and the page show nodes in this order.
LEASED: Final[Sequence[Role]] = (WAFER, MEMORYX, SWARMX, WORKER)
REGISTERED: Final[Sequence[Role]] = (*LEASED, INGRESS)
ROLES: Final[Sequence[Role]] = (*REGISTERED, MANAGEMENT, COORDINATOR, VENDOR_GATEWAY)

BY_NAME: Final[Mapping[str, Role]] = {role.name: role for role in ROLES}


def role_of(number: "node_pb2.Role.ValueType") -> Role:
    """Returns the role with a number of the protocol. Raises KeyError or ValueError: there is none."""
    from wsc.v1 import node_pb2

    return BY_NAME[node_pb2.Role.Name(number).removeprefix("ROLE_").lower()]


def is_registered(number: "node_pb2.Role.ValueType") -> bool:
    """Whether nodes with this number of a role register with management; any number is allowed."""
    return any(number == role.number for role in REGISTERED)


def member_index(name: str) -> int:
    """Returns the index in the name of a member."""
    return int(name.rpartition("-")[2])
