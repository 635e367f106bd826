"""Scripts with the real session of a client: they run executions, save on the way, and check what they receive."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
from network import Channel, Network
from node_models import MANAGEMENT, Fabric
from tokens_shown import token
from values import (
    EVALUATE,
    NO_INPUT,
    TRAIN,
    States,
    after_step,
    batch,
    loader_of,
    metric,
    names_of,
    number,
    output_of,
    weight,
)
from virtual_time import Process

from cstorch._internal.session import failures
from cstorch._internal.session.execution.stream import CHECK_SECONDS, ExecutionCall
from cstorch._internal.session.job_session import JobSession, create_job
from cstorch.errors import ClusterUnreachableError, CstorchError
from waferbox import deadlines
from waferbox.security.guard import bearer
from waferbox.security.tokens import Kind
from wsc.v1 import coordinator_pb2, management_pb2, management_pb2_grpc, node_pb2

RETRY_SECONDS = 0.2  # of what reads and writes states


class JobEnded(Exception):
    """Raised when the job has ended, with the cause as the client receives it."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One execution of a script.

    Attributes:
        step: TRAIN or EVALUATE.
        num_steps: of the execution.
        activation_steps: the interval of outputs.
        checkpoint_steps: after which the states are saved.
        changes: whether the script has changed the weights before.
        leaves_after: the step after which the script leaves its loop; 0: it does not.
        bad_step: the step whose batch the loader cannot make; 0: none.
    """

    step: str
    num_steps: int
    activation_steps: int
    checkpoint_steps: tuple[int, ...]
    changes: bool
    leaves_after: int
    bad_step: int


def draw_script(random: Random, *, recovers: bool) -> list[Execution]:
    """Draws the executions of a script. recovers: whether the job survives a death."""
    script = []
    for _ in range(random.randint(1, 4)):
        num_steps = random.choice([1, 5, 20, 60])
        saves = sorted(random.sample(range(1, num_steps + 1), min(num_steps, random.choice([0, 0, 1, 2]))))
        leaves = random.random() < (0.2 if recovers else 0.1)
        execution = Execution(
            step=random.choice([TRAIN, TRAIN, EVALUATE]),
            num_steps=num_steps,
            activation_steps=random.choice([1, 1, 4]),
            checkpoint_steps=tuple(saves),
            changes=random.random() < 0.2,
            leaves_after=random.randint(1, num_steps) if leaves else 0,
            bad_step=random.randint(1, num_steps) if random.random() < 0.1 else 0,
        )
        script.append(execution)
        if (leaves or execution.bad_step) and not recovers:
            break  # the states are those of no step: a script goes on in another job
    return script


class ClientModel:
    """A client with its script. It ends with status 0 if it has received all that is due, and all was right."""

    def __init__(
        self, fabric: Fabric, name_number: int, request: management_pb2.CreateJobRequest, random: Random
    ) -> None:
        # A third of the clients have hosts of their own.
        host = random.choice(["host-0", "host-1", f"client-{name_number}"])
        self.process = Process(fabric.world, f"client-{name_number}", host)
        request.host_id, request.process_id = host, self.process.pid
        self.request = request
        self.job = ""
        self.refusal = ""  # why no job was created
        self.cause = ""  # of the end of the job, if it did not succeed
        self.is_cancelled = False
        self._fabric = fabric
        self._network: Network = fabric.network
        self._random = random
        self._script = draw_script(random, recovers=request.max_num_restarts > 0)
        self._cancels_after = random.uniform(0.0, 20.0) if random.random() < 0.1 else None
        self._begins_after = random.uniform(0.0, 5.0)
        self._think_seconds = random.choice([0.0, 0.0, 0.1, 2.0, 8.0])  # between executions
        self._loop_begins_after = random.choice([0.0, 0.0, 0.1, 2.0, 8.0])  # since the input was prepared
        self.session: JobSession
        self._num_shards = 0
        self._states: States = {}  # as they must be on the cluster
        self._held: States = {}  # that the client has, and the cluster does not
        self.process.start(self._run)

    @property
    def may_pass_bad_step(self) -> bool:
        """Whether the script may leave a loop after a step whose batch cannot be made, as it awaits no output there."""
        return any(each.bad_step and each.leaves_after and each.activation_steps > 1 for each in self._script)

    async def _run(self) -> int:
        await asyncio.sleep(self._begins_after)
        try:
            await self._open()
        except CstorchError as error:
            self.refusal = str(error)
            return 1
        work = asyncio.create_task(self._work())
        if self._cancels_after is not None:
            await asyncio.wait([work], timeout=self._cancels_after)
            if not work.done():
                await self._cancel(work)
        try:
            await work
        except JobEnded as error:
            self.cause = str(error)
        except asyncio.CancelledError:
            self.cause = "Ctrl-C"
        await self.session.close()
        return 1 if self.cause else 0

    async def _open(self) -> None:
        """Creates the job. Raises CstorchError."""
        channel = await self._connect(MANAGEMENT, "management service", token(Kind.USER, "ada"))
        self._management = management_pb2_grpc.ManagementStub(channel)
        created = await create_job(self._management, self.request, MANAGEMENT)
        self.job = created.job
        self.session = JobSession(
            created,
            self._management,
            self._connect,
            gateway="",
            may_be_replaced=self.request.max_num_restarts > 0,
            has_cluster_ended=lambda: False,
        )
        await self.session.open()

    async def _connect(self, address: str, what: str, token: str) -> grpc.aio.Channel:
        channel = Channel(self._network, self.process, address, (bearer(token),))
        try:
            async with asyncio.timeout(deadlines.JOB_CREATION.connect):
                await channel.connect(waits=True)
        except (ConnectionError, TimeoutError) as error:
            raise ClusterUnreachableError(f"no {what} answers at {address}") from error
        return channel  # type: ignore[return-value]

    async def _cancel(self, work: "asyncio.Task[None]") -> None:
        """Cancels the job by Ctrl-C, or as a command does."""
        self.is_cancelled = True
        if self._random.random() < 0.5:
            work.cancel()
            await self.session.cancel()
            return
        with contextlib.suppress(grpc.aio.AioRpcError):
            request = management_pb2.CancelJobRequest(job=self.job)
            await self._management.CancelJob(request, timeout=10.0, wait_for_ready=True)

    async def _work(self) -> None:
        """Runs the script. Raises JobEnded."""
        for index, execution in enumerate(self._script):
            await asyncio.sleep(self._think_seconds)
            if self._states and self._random.random() < 0.2:
                await self._read(self._states, 0)
            await self._execute(index, execution)
        if self._states:
            await self._read(self._states, 0)

    async def call(self, call: Callable[[Any], Awaitable[Any]], doing: str) -> Any:
        """Makes a call of the coordinator. Raises JobEnded."""
        await self.session.until_ready()
        try:
            return await self.session.call(call)
        except grpc.RpcError as error:
            raise JobEnded(str(await self.session.reason(error, doing))) from error

    # --- executions ---------------------------------------------------------------------------------------------------

    async def _execute(self, index: int, execution: Execution) -> None:
        loader = loader_of(self.job, index, execution.bad_step)
        prepared = node_pb2.PrepareInput(loader=loader, builder=b"input")
        compile_request = coordinator_pb2.CompileRequest(token=self.session.token, cirh=execution.step)
        compiled = await self.call(lambda stub: stub.Compile(compile_request), "compiling the step")
        self._num_shards = 1 + max(state.shard for state in compiled.states)
        request = coordinator_pb2.PrepareInputRequest(token=self.session.token, input=prepared)
        await self.call(lambda stub: stub.PrepareInput(request), "preparing the input")
        await asyncio.sleep(self._loop_begins_after)
        names = [name for shard in names_of(execution.step, self._num_shards) for name in shard]
        for name in names:
            is_changed = execution.changes and name.startswith("weight")
            if name not in self._states or is_changed:
                self._held[name] = number("initial", self.job, index, name)
        begin = coordinator_pb2.Begin(
            artifact=compiled.artifact,
            loader=loader,
            num_steps=execution.num_steps,
            activation_steps=execution.activation_steps,
            checkpoint_steps=execution.checkpoint_steps,
            wants_input_states=self._random.random() < 0.5,
        )
        run = _Run(self, execution, begin, loader)
        try:
            await run.run()
        finally:
            await run.call.close()
        if run.last is None:
            self._states = {}
            return
        self._states = run.states_at(run.last)
        for name in names:
            self._held.pop(name, None)

    async def write(self, wanted: coordinator_pb2.StateWanted) -> bool:
        """Writes the states that the cluster lacks, and those that the script has changed; False if a shard is lost."""
        assert set(wanted.missing) <= self._held.keys(), f"the cluster has lost {wanted.missing}"
        for shard in wanted.shards:
            await asyncio.sleep(self._network.latency())
            node = self._fabric.at(shard.address)
            own = {name: value for name, value in self._held.items() if name.endswith(f".{shard.shard}")}
            while node is not None and node.process.stalled_until > self._fabric.world.now:
                await asyncio.sleep(RETRY_SECONDS)
            if node is None or not node.process.is_alive:
                return False
            try:
                node.write(self.job, own)
            except KeyError:
                return False
        return True

    async def _read(self, expected: States, step: int) -> None:
        """Reads states, or those of a snapshot, and compares them. Raises JobEnded."""
        for shard in range(self._num_shards):
            own = {name: value for name, value in expected.items() if name in (weight(shard), metric(shard))}
            while True:
                request = coordinator_pb2.ShardsRequest(token=self.session.token, step=step)
                shards = await self.call(lambda stub, request=request: stub.Shards(request), "locating the shards")  # type: ignore[misc]
                address = next(each.address for each in shards.shards if each.shard == shard)
                await asyncio.sleep(self._network.latency())
                node = self._fabric.at(address)
                if node is not None and node.process.stalled_until <= self._fabric.world.now:
                    with contextlib.suppress(KeyError):
                        read = node.read(self.job, list(own), step)
                        assert read == own, f"the states of {address} after step {step} are wrong"
                        break
                await asyncio.sleep(RETRY_SECONDS)
                if not self.session.alive:
                    raise JobEnded(str(self.session.failure))


class _Run:
    """One execution under way."""

    def __init__(self, client: ClientModel, execution: Execution, begin: coordinator_pb2.Begin, loader: str) -> None:
        self._client = client
        self._execution = execution
        self._loader = loader
        self._wants_input_states = begin.wants_input_states
        self._is_started = False
        self.last: int | None = None  # the step with which it ended; None: none that is known
        self._stops_after: int | None = None  # the step after which the script has left its loop
        self._checkpoints: list[int] = []
        self._step = 0  # the last whose output has come
        self._history: list[States] = [{}]  # the states as they must be, by step
        self._responses: asyncio.Queue[coordinator_pb2.ExecuteResponse | Exception | None] = asyncio.Queue()
        self.call = ExecutionCall(client.session, begin, self._responses.put_nowait)

    async def run(self) -> None:
        """Runs the execution to its end. Raises JobEnded."""
        while not await self._take(await self._next()):
            pass

    async def _next(self) -> coordinator_pb2.ExecuteResponse:
        """Waits for the next message, as an ExecutionStream does. Raises JobEnded."""
        session = self._client.session
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    response = await self._responses.get()
                    break
            if session.failure is not None and self._responses.empty():
                raise JobEnded(str(session.failure))
        if response is None:
            raise JobEnded(str(await session.wait_for_failure()))
        if isinstance(response, Exception):
            raise JobEnded(str(await session.reason(response, "running")))
        return response

    async def _take(self, response: coordinator_pb2.ExecuteResponse) -> bool:
        """Takes a message; returns whether it is the last."""
        client = self._client
        match response.WhichOneof("kind"):
            case "state_wanted":
                assert not self._is_started, "states are wanted again after the start"
                wanted = response.state_wanted
                if await client.write(wanted):
                    self._history = [{**client._states, **client._held}]
                    sent = coordinator_pb2.StateSent(attempt=wanted.attempt, wrote=bool(client._held))
                    self._send(state_sent=sent)
            case "started":
                self._is_started = True
            case "outputs" | "checkpoint" if self._stops_after is not None:
                pass  # was on its way
            case "outputs":
                for outputs in response.outputs.steps:
                    self._receive(outputs)
                    if self._execution.leaves_after and self._step >= self._execution.leaves_after:
                        return self._leave()
                await asyncio.sleep(client._random.choice([0.0, 0.0, 0.05]))
                self._send(consumed=coordinator_pb2.Consumed(step=self._step))
            case "checkpoint":
                step = response.checkpoint.step
                self._checkpoints.append(step)
                self._check_input_states(response.checkpoint.input_states, step)
                await client._read(self.states_at(step), step)
                self._send(checkpoint_released=coordinator_pb2.CheckpointReleased(step=step))
            case "input_failed":
                self._end_before(response.input_failed.step)
            case "finished":
                last = self._execution.num_steps if self._stops_after is None else self._stops_after
                assert self._step == last or self._execution.activation_steps > 1, "outputs are missing"
                assert self._checkpoints == [step for step in self._execution.checkpoint_steps if step <= last]
                if self._stops_after is None:  # a loader does not count the steps of a loop that was left
                    self._check_input_states(response.finished.input_states, last)
                self.last = last
                return True
            case "failed":
                if response.failed.message == NO_INPUT and self._stops_after is None:
                    self._check_results(response.failed.step - 1)
                raise JobEnded(str(failures.from_failure(response.failed)))
        return False

    def _end_before(self, step: int) -> None:
        """Leaves the loop before a step without input. Raises JobEnded if the script has done that step."""
        if self._stops_after is None:
            self._check_results(step - 1)
            self._stops_after = step - 1
            self._send(stop_after=coordinator_pb2.StopAfter(step=step - 1))
        elif step <= self._stops_after:
            raise JobEnded(NO_INPUT)

    def _check_results(self, last: int) -> None:
        """Checks that all outputs and checkpoints have come of the steps before the one that has no input."""
        execution = self._execution
        assert last == execution.bad_step - 1, "the input of another step fails"
        assert self._step == last - last % execution.activation_steps, "outputs are missing"
        assert self._checkpoints == [step for step in execution.checkpoint_steps if step <= last]

    def _leave(self) -> bool:
        """Leaves the loop; returns whether the script does not wait for the end of the execution."""
        execution, request = self._execution, self._client.request
        if not request.max_num_restarts:
            return True
        random = self._client._random
        ahead = random.randrange(execution.activation_steps)  # the script counts steps without outputs at once
        self._stops_after = last = min(self._step + ahead, execution.num_steps)
        for step in execution.checkpoint_steps:
            if step <= last and step not in self._checkpoints:
                self._checkpoints.append(step)
                self._send(checkpoint_released=coordinator_pb2.CheckpointReleased(step=step))
        self._send(stop_after=coordinator_pb2.StopAfter(step=last))
        return False

    def _send(self, **kind: object) -> None:
        self.call.send(coordinator_pb2.ExecuteRequest(**kind))  # type: ignore[arg-type]

    def _check_input_states(self, states: Sequence[bytes], step: int) -> None:
        """Checks the states of the loaders of all workers, of which there may be fewer than at first."""
        if self._wants_input_states and step:  # a loader has no state before its first batch
            request = self._client.request
            assert set(states) == {f"{self._loader}:{step}".encode()}
            assert (request.min_num_csx or request.num_csx) <= len(states) <= request.num_csx

    def states_at(self, step: int) -> States:
        """Returns the states as they must be after a step."""
        while len(self._history) <= step:
            states, data = self._history[-1], batch(self._loader, len(self._history))
            changed = after_step(self._execution.step, self._own(states), data)
            self._history.append({**states, **changed})
        return self._history[step]

    def _own(self, states: States) -> States:
        """Returns those of these states that the step has."""
        names = {name for shard in names_of(self._execution.step, self._client._num_shards) for name in shard}
        return {name: value for name, value in states.items() if name in names}

    def _receive(self, outputs: coordinator_pb2.StepOutputs) -> None:
        """Compares an output with what the step must give."""
        assert outputs.step > self._step, f"the output of step {outputs.step} comes after that of {self._step}"
        expected = self._execution.activation_steps
        due = min(self._step + expected, self._execution.num_steps)
        assert outputs.step == due, f"the output of step {outputs.step} comes in place of that of {due}"
        right = output_of(self._own(self.states_at(outputs.step - 1)), batch(self._loader, outputs.step))
        assert outputs.tensors[0] == right, f"the output of step {outputs.step} is wrong"
        self._step = outputs.step
