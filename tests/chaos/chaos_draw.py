"""Faults of random kinds and moments, drawn from a seed."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from chaos_hook import COORDINATORS_MOMENTS, KEEPERS_MOMENTS, MOMENTS
from chaos_trial import EXECUTIONS, EXECUTIONS_SIZES, SIZES, STEPS, Size
from injected_faults import Fault

# A killed launcher ends its cluster, so it is only stopped.
KILLED_SERVICES = ("management", "child", "coordinator", "coordinator", "fork server")
STOPPED_SERVICES = (*KILLED_SERVICES, "launcher")
STOPPED_SECONDS = (5.0, 20.0)  # from about as long as a lease lasts
RANDOM_SECONDS = 6.5  # from the first output: about as long as a script runs
LINES = 4 * STEPS  # of the output of the script with executions
EXECUTIONS_SECONDS = 10.0  # likewise, from its first to its last
SECOND_DEATH = 0.5  # of its trials with two faults these have the second one soon after the first


def draw(seed: int, script: str = "", *, ingress: bool = False) -> Iterator[tuple[Size, Sequence[Fault]]]:
    """Trials without end: about half of them at a random time, one in five with two faults.

    Args:
        seed: of the faults and sizes.
        script: with this one alone; empty: with both in turn.
        ingress: with scripts that reach the cluster through an ingress.
    """
    generator = random.Random(seed)
    sizes = [size for size in (*SIZES, *EXECUTIONS_SIZES) if script in ("", size.script.stem)]
    if ingress:
        sizes = [replace(size, name=f"{size.name}, ingress", ingress=True) for size in sizes if not size.embedded]
    while True:
        size = generator.choice(sizes)
        if size.script == EXECUTIONS:
            yield size, _faults_of_executions(generator, size)
            continue
        faults = [_fault(generator, size)]
        if faults[0].moment.endswith("again") or faults[0].moment == "put back":
            # It comes in a recovery only: of another's death.
            others = [member for member in size.members if member != faults[0].victim]
            faults.insert(0, Fault(victim=generator.choice(others), moment="step", at=generator.randrange(2, 120)))
        elif generator.random() < 0.2:
            faults.append(_fault(generator, size))
        yield size, faults


def _faults_of_executions(generator: random.Random, size: Size) -> Sequence[Fault]:
    """One or two: in any execution, or between two."""
    first = _fault_of_executions(generator, size)
    if generator.random() < 0.65:
        return [first]
    second = _fault_of_executions(generator, size)
    if first.moment == "random" and generator.random() < SECOND_DEATH:
        soon = round(first.at + generator.uniform(0, 2), 2)
        second = replace(second, moment="random", at=soon, epoch=0)
    return [first, second]


def _fault_of_executions(generator: random.Random, size: Size) -> Fault:
    chance = generator.random()
    if chance < 0.35:
        return _fault_from_outside(generator, size, "line", generator.randrange(1, LINES))
    if chance < 0.65 or size.embedded:
        return _fault_from_outside(generator, size, "random", round(generator.uniform(0, EXECUTIONS_SECONDS), 2))
    epoch = generator.randrange(1, 6)  # as many as there are executions
    if chance < 0.75:
        moment = generator.choice(COORDINATORS_MOMENTS)
        at = generator.randrange(1, 30) if moment == "record" else 0
        return Fault(victim="coordinator", moment=moment, at=at, epoch=epoch if moment != "record" else 0)
    victim = generator.choice(size.members)
    suffix = "" if epoch == 1 else " again"
    moments = [moment + suffix for moment in MOMENTS if not moment.endswith("again") and moment != "attach"]
    moment = generator.choice([*moments, *(KEEPERS_MOMENTS if victim in size.keepers else ())])
    at = generator.randrange(1, STEPS) if "step" in moment else 0
    return Fault(victim=victim, moment=moment, at=at, epoch=epoch)


def _fault_from_outside(generator: random.Random, size: Size, moment: str, at: float) -> Fault:
    """Kills, terminates or stops a member of the job, or a service."""
    if generator.random() < 0.2:
        victim = generator.choice([*size.members, *STOPPED_SERVICES, *(["ingress"] * 4 if size.ingress else [])])
        seconds = round(generator.uniform(*STOPPED_SECONDS), 1)
        return Fault(victim=victim, moment=moment, action="stop", at=at, seconds=seconds)
    victim = generator.choice([*size.members, *KILLED_SERVICES])
    action = "terminate" if generator.random() < 0.25 else "kill"
    return Fault(victim=victim, moment=moment, action=action, at=at)


def _fault(generator: random.Random, size: Size) -> Fault:
    if generator.random() < 0.5:
        return _fault_from_outside(generator, size, "random", round(generator.uniform(0, RANDOM_SECONDS), 2))
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
