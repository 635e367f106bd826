"""The option --machine: the machine that a step is planned for."""

import enum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from waferbox.host.folders import cache_root

if TYPE_CHECKING:
    from waferbox.prediction.machines import Machine


class MachineName(enum.StrEnum):
    """A machine that a step can be planned for."""

    CS2 = "cs2"
    CS3 = "cs3"
    THIS = "this"


MachineOption: TypeAlias = Annotated[
    MachineName, typer.Option("--machine", help="The machine that the step is planned for; this: this computer.")
]


def find_machine(name: MachineName) -> "Machine":
    """Returns the machine of a name. The rates of this computer are measured, if they are not known yet."""
    from appliance.compiler.cost.machine_model import machine_model
    from waferbox.prediction.machines import CS2, CS3, this_machine

    match name:
        case MachineName.CS2:
            return CS2
        case MachineName.CS3:
            return CS3
        case MachineName.THIS:
            return this_machine(machine_model(cache_root()))
