"""Models of clients: they create a job, run executions, save on the way, and check every number that they receive."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
from network import Channel, Network
from node_models import MANAGEMENT, Fabric
from tokens_shown import shown
from values import EVALUATE, TRAIN, States, after_step, batch, metric, names_of, number, output_of, weight
from virtual_time import Process

from waferbox import deadlines
from waferbox.security.tokens import Kind
from wsc.v1 import coordinator_pb2, coordinator_pb2_grpc, management_pb2, management_pb2_grpc, node_pb2

RETRY_SECONDS = 0.2


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
        leaves_after: the step after which the script leaves it; 0: it does not.
    """

    step: str
    num_steps: int
    activation_steps: int
    checkpoint_steps: tuple[int, ...]
    changes: bool
    leaves_after: int


def draw_script(random: Random) -> list[Execution]:
    """Draws the executions of a script."""
    script = []
    for _ in range(random.randint(1, 4)):
        num_steps = random.choice([1, 5, 20, 60])
        saves = sorted(random.sample(range(1, num_steps + 1), min(num_steps, random.choice([0, 0, 1, 2]))))
        leaves = random.random() < 0.1
        execution = Execution(
            step=random.choice([TRAIN, TRAIN, EVALUATE]),
            num_steps=num_steps,
            activation_steps=random.choice([1, 1, 4]),
            checkpoint_steps=tuple(saves),
            changes=random.random() < 0.2,
            leaves_after=random.randint(1, num_steps) if leaves else 0,
        )
        script.append(execution)
        if leaves:
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
        self._script = draw_script(random)
        self._cancels_after = random.uniform(0.0, 20.0) if random.random() < 0.1 else None
        self._begins_after = random.uniform(0.0, 5.0)
        self._think_seconds = random.choice([0.0, 0.0, 0.1, 2.0])  # between executions
        self._coordinator = ""
        self._token = ""
        self._incarnation = 0
        self._stub: Any = None
        self._channel: Channel | None = None
        self._changed = asyncio.Event()
        self._failure: str | None = None  # as the session has reported it
        self._is_ready = self._is_over = False  # the job has its nodes; the session has ended
        self._num_shards = 0
        self._states: States = {}  # as they must be on the cluster
        self._held: States = {}  # that the client has, and the cluster does not
        self.process.start(self._run)

    async def _run(self) -> int:
        await asyncio.sleep(self._begins_after)
        channel = Channel(self._network, self.process, MANAGEMENT, shown(Kind.USER, "ada"))
        self._management: Any = management_pb2_grpc.ManagementStub(channel)  # type: ignore[arg-type]
        waits = self._random.choice([True, True, False])
        try:
            created = await self._management.CreateJob(self.request, timeout=120.0, wait_for_ready=waits)
        except grpc.aio.AioRpcError as error:
            self.refusal = f"{error.code().name}: {error.details()}"
            return 1
        self.job, self._coordinator, self._token = created.job, created.coordinator, created.token
        self._connect()
        session = asyncio.create_task(self._keep_session())
        work = asyncio.create_task(self._work())
        if self._cancels_after is not None:
            await asyncio.wait([work], timeout=self._cancels_after)
            if not work.done():
                self.is_cancelled = True
                with contextlib.suppress(grpc.aio.AioRpcError):
                    request = management_pb2.CancelJobRequest(job=self.job)
                    await self._management.CancelJob(request, timeout=10.0, wait_for_ready=True)
        try:
            await work
        except JobEnded as error:
            self.cause = str(error)
        session.cancel()
        assert self._channel is not None
        await self._channel.close()
        await channel.close()
        return 1 if self.cause else 0

    async def _work(self) -> None:
        """Runs the script. Raises JobEnded."""
        await self._until(lambda: self._is_ready)
        for index, execution in enumerate(self._script):
            await asyncio.sleep(self._think_seconds)
            await self._execute(index, execution)
        if self._states:
            await self._read(self._states, 0)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._stub.Finish(coordinator_pb2.FinishRequest(token=self._token), timeout=deadlines.END.finish)

    # --- the session, and the coordinators ----------------------------------------------------------------------------

    def _connect(self) -> None:
        self._channel = Channel(self._network, self.process, self._coordinator)
        self._stub = coordinator_pb2_grpc.CoordinatorStub(self._channel)  # type: ignore[arg-type]

    async def _keep_session(self) -> None:
        while True:
            try:
                # A coordinator sends its address before it serves.
                request = coordinator_pb2.SessionRequest(token=self._token)
                async for response in self._stub.Session(request, wait_for_ready=True):
                    match response.WhichOneof("kind"):
                        case "failure":
                            self._failure = response.failure.message
                        case "ready":
                            self._is_ready = True
                        case "opened":
                            self._incarnation += 1
                    self._changed.set()
                break
            except grpc.aio.AioRpcError as error:
                if not _is_unanswered(error) or not self.request.max_num_restarts or not await self._find_successor():
                    self._failure = self._failure or f"the coordinator died: {error.code().name} {error.details()}"
                    break
        self._is_over = True
        self._changed.set()

    async def _find_successor(self) -> bool:
        """Connects to the coordinator that takes over; False if there will be none."""
        loop, lost = asyncio.get_running_loop(), self._coordinator
        deadline, away_since = loop.time() + deadlines.COORDINATION.another, None
        while loop.time() < deadline:
            wait, answer = deadlines.COORDINATION.another_wait, deadlines.COORDINATION.another_answer
            request = management_pb2.GetJobRequest(job=self.job, wait_seconds=wait, lost_coordinator=lost)
            try:
                job = (await self._management.GetJob(request, timeout=wait + answer)).job
            except grpc.aio.AioRpcError as error:
                late = error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.NOT_FOUND)
                away_since = loop.time() if late or away_since is None else away_since
                is_away = loop.time() - away_since > deadlines.COORDINATION.script_away
                if not (late or _is_unanswered(error)) or is_away:
                    return False
                await asyncio.sleep(RETRY_SECONDS)
                continue
            away_since = None
            if job.ended:
                return False
            if job.coordinator == lost:
                cut_off = coordinator_pb2.SessionRequest(token=self._token, cut_off=True)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for _ in self._stub.Session(cut_off, timeout=deadlines.COORDINATION.another_answer):
                        break
            if job.coordinator in ("", lost):
                continue
            self._coordinator = job.coordinator
            self._connect()
            return True
        return False

    async def _until(self, ready: Callable[[], object]) -> None:
        """Waits for a condition that the session changes. Raises JobEnded."""
        while not ready():
            if self._is_over:
                raise JobEnded(self._failure or "the session has ended")
            self._changed.clear()
            await self._changed.wait()

    async def _call(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Makes a call of the coordinator, and of its successor if it dies meanwhile. Raises JobEnded."""
        while True:
            incarnation = self._incarnation
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if not _is_unanswered(error):
                    await self._until(lambda: False)  # the session reports the cause soon
            await self._until(lambda incarnation=incarnation: self._incarnation > incarnation)  # type: ignore[misc]

    # --- executions ---------------------------------------------------------------------------------------------------

    async def _execute(self, index: int, execution: Execution) -> None:
        loader = f"{self.job}-loader-{index}"
        prepared = node_pb2.PrepareInput(loader=loader, builder=b"input")
        compile_request = coordinator_pb2.CompileRequest(token=self._token, cirh=execution.step)
        compiled = await self._call(lambda: self._stub.Compile(compile_request))
        self._num_shards = 1 + max(state.shard for state in compiled.states)
        request = coordinator_pb2.PrepareInputRequest(token=self._token, input=prepared)
        await self._call(lambda: self._stub.PrepareInput(request))
        names = [name for shard in names_of(execution.step, self._num_shards) for name in shard]
        for name in names:
            is_changed = execution.changes and name.startswith("weight")
            if name not in self._states or is_changed:
                self._held[name] = number("initial", self.job, index, name)
        begin = coordinator_pb2.Begin(
            token=self._token,
            artifact=compiled.artifact,
            loader=loader,
            num_steps=execution.num_steps,
            activation_steps=execution.activation_steps,
            checkpoint_steps=execution.checkpoint_steps,
            wants_input_states=self._random.random() < 0.5,
            id=f"{self.job}-{index}",
        )
        run = _Run(self, execution, begin, loader)
        try:
            await run.run()
        finally:
            run.end()
        if execution.leaves_after:
            self._states = {}
            return
        self._states = run.states_at(execution.num_steps)
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
                request = coordinator_pb2.ShardsRequest(token=self._token, step=step)
                shards = await self._call(lambda request=request: self._stub.Shards(request))  # type: ignore[misc]
                address = next(each.address for each in shards.shards if each.shard == shard)
                await asyncio.sleep(self._network.latency())
                node = self._fabric.at(address)
                if node is not None and node.process.stalled_until <= self._fabric.world.now:
                    with contextlib.suppress(KeyError):
                        read = node.read(self.job, list(own), step)
                        assert read == own, f"the states of {address} after step {step} are wrong"
                        break
                await asyncio.sleep(RETRY_SECONDS)
                if self._is_over:
                    raise JobEnded(self._failure or "the session has ended")


class _Run:
    """One execution under way, continued with the successor of a coordinator that has died."""

    def __init__(self, client: ClientModel, execution: Execution, begin: coordinator_pb2.Begin, loader: str) -> None:
        self._client = client
        self._execution = execution
        self._begin = begin
        self._loader = loader
        self._resumption = coordinator_pb2.Resumption()
        self._requests: asyncio.Queue[coordinator_pb2.ExecuteRequest | None] = asyncio.Queue()
        self._step = 0  # the last whose output has come
        self._history: list[States] = [{}]  # the states as they must be, by step
        self._call: Any = None
        self._responses: asyncio.Queue[coordinator_pb2.ExecuteResponse] = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None

    def end(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._requests.put_nowait(None)
        if self._call is not None:
            self._call.cancel()

    async def run(self) -> None:
        """Runs the execution to its end. Raises JobEnded."""
        reading = self._reading = asyncio.create_task(self._read())
        while True:
            taking = asyncio.create_task(self._responses.get())
            await asyncio.wait([taking, reading], return_when=asyncio.FIRST_COMPLETED)
            if taking.done() and await self._take(taking.result()):
                return
            if not taking.done():
                taking.cancel()
                reading.result()  # raises

    async def _read(self) -> None:
        """Reads the responses, and continues with the successor of a coordinator that has died. Raises JobEnded."""
        client = self._client
        while True:
            incarnation = client._incarnation
            try:
                async for response in self._open():
                    self._record(response)
                    self._responses.put_nowait(response)
            except grpc.aio.AioRpcError as error:
                if not _is_unanswered(error):
                    raise AssertionError(f"{error.code()}: {error.details()}") from error
            await client._until(lambda incarnation=incarnation: client._incarnation > incarnation)  # type: ignore[misc]
            self._requests.put_nowait(None)
            self._begin.resumption.CopyFrom(self._resumption)

    def _record(self, response: coordinator_pb2.ExecuteResponse) -> None:
        """Records the progress, for a successor of the coordinator."""
        match response.WhichOneof("kind"):
            case "started":
                self._resumption.started = True
            case "outputs":
                self._resumption.shown_step = response.outputs.steps[-1].step
            case "checkpoint":
                self._resumption.announced_checkpoints.append(response.checkpoint.step)

    def _open(self) -> AsyncIterator[coordinator_pb2.ExecuteResponse]:
        requests = self._requests = asyncio.Queue()
        requests.put_nowait(coordinator_pb2.ExecuteRequest(begin=self._begin))

        async def sent() -> AsyncIterator[coordinator_pb2.ExecuteRequest]:
            while (request := await requests.get()) is not None:
                yield request

        self._call = self._client._stub.Execute(sent())
        responses: AsyncIterator[coordinator_pb2.ExecuteResponse] = aiter(self._call)
        return responses

    async def _take(self, response: coordinator_pb2.ExecuteResponse) -> bool:
        """Takes a message; returns whether it is the last."""
        client = self._client
        match response.WhichOneof("kind"):
            case "state_wanted":
                assert not self._resumption.started, "states are wanted again after the start"
                wanted = response.state_wanted
                if await client.write(wanted):
                    self._history = [{**client._states, **client._held}]
                    sent = coordinator_pb2.StateSent(attempt=wanted.attempt, wrote=bool(client._held))
                    self._send(state_sent=sent)
            case "outputs":
                for outputs in response.outputs.steps:
                    self._receive(outputs)
                    if self._execution.leaves_after and self._step >= self._execution.leaves_after:
                        return True
                await asyncio.sleep(client._random.choice([0.0, 0.0, 0.05]))
                self._resumption.consumed_step = self._step
                self._send(consumed=coordinator_pb2.Consumed(step=self._step))
            case "checkpoint":
                step = response.checkpoint.step
                self._check_input_states(response.checkpoint.input_states, step)
                await client._read(self.states_at(step), step)
                self._resumption.released_checkpoints.append(step)
                self._send(checkpoint_released=coordinator_pb2.CheckpointReleased(step=step))
            case "finished":
                last = self._execution.num_steps
                assert self._step == last or self._execution.activation_steps > 1, "outputs are missing"
                assert set(self._resumption.announced_checkpoints) == set(self._execution.checkpoint_steps)
                self._check_input_states(response.finished.input_states, last)
                return True
            case "failed":
                await client._until(lambda: False)
        return False

    def _send(self, **kind: object) -> None:
        self._requests.put_nowait(coordinator_pb2.ExecuteRequest(**kind))  # type: ignore[arg-type]

    def _check_input_states(self, states: Sequence[bytes], step: int) -> None:
        """Checks the states of the loaders of all workers, of which there may be fewer than at first."""
        if self._begin.wants_input_states:
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


def _is_unanswered(error: grpc.aio.AioRpcError) -> bool:
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
