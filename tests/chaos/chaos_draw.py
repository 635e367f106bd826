"""Which faults, of which kinds and moments: drawn from a seed."""

import random
from collections.abc import Iterator, Sequence

from chaos_hook import COORDINATORS_MOMENTS, KEEPERS_MOMENTS, MOMENTS
from chaos_trial import SIZES, Size
from injected_faults import Fault

SERVICES = ("management", "child", "coordinator", "coordinator", "fork server")
RANDOM_SECONDS = 6.5  # from the first output: about as long as a script runs


def draw(seed: int) -> Iterator[tuple[Size, Sequence[Fault]]]:
    """Trials without end: about half of them at a random time, one in five with two faults."""
    generator = random.Random(seed)
    while True:
        size = generator.choice(SIZES)
        faults = [_fault(generator, size)]
        if faults[0].moment.endswith("again") or faults[0].moment == "put back":
            # It comes in a recovery only: of another's death.
            others = [member for member in size.members if member != faults[0].victim]
            faults.insert(0, Fault(victim=generator.choice(others), moment="step", at=generator.randrange(2, 120)))
        elif generator.random() < 0.2:
            faults.append(_fault(generator, size))
        yield size, faults


def _fault(generator: random.Random, size: Size) -> Fault:
    if generator.random() < 0.5:
        victim = generator.choice([*size.members, *SERVICES])
        action = "stop" if victim in size.members and generator.random() < 0.2 else "kill"
        return Fault(victim=victim, moment="random", action=action, at=round(generator.uniform(0, RANDOM_SECONDS), 2))
    if generator.random() < 0.15:
        moment = generator.choice(COORDINATORS_MOMENTS)
        return Fault(victim="coordinator", moment=moment, at=generator.randrange(1, 4))
    victim = generator.choice(size.members)
    moment = generator.choice([*MOMENTS, *(KEEPERS_MOMENTS if victim in size.keepers else ())])
    action = "kill"
    if moment == "open point" and generator.random() < 0.5:
        action = "full"
    elif generator.random() < 0.1:
        action = "stop"
    elif "step" in moment and generator.random() < 0.3:
        action = generator.choice(("hang", "freeze", "memory"))
    at = generator.randrange(1, 140) if "step" in moment else 0
    if action == "full":
        at = 2  # without a first point there is nothing to go on from
    return Fault(victim=victim, moment=moment, action=action, at=at)
