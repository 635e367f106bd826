"""The event loop of a client, and its thread: how it ends."""

import asyncio
import concurrent.futures
import os

import pytest

from waferbox.rpc.loop_thread import LoopThread


def loop_thread() -> LoopThread:
    return LoopThread(name="a loop", on_defect=lambda defect: pytest.fail(str(defect)))


async def value(number: int) -> int:
    return number


@pytest.mark.parametrize("is_started", [True, False])
def test_it_ends_once_with_its_tasks(is_started: bool) -> None:
    thread, ended = loop_thread(), []

    async def task() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def begin() -> asyncio.Task[None]:
        made = asyncio.create_task(task())
        await asyncio.sleep(0)
        return made

    if is_started:
        thread.start()
    kept = thread.run(begin())
    thread.stop()
    thread.stop()
    assert ended == [True]
    assert kept.cancelled()
    assert not thread.is_running
    thread.call_soon(lambda: pytest.fail("the loop has ended"))


def test_a_thread_with_an_event_loop_of_its_own_can_end_it() -> None:
    """As a notebook's: its kernel runs cells within an event loop."""

    async def cell() -> int:
        thread = loop_thread()
        thread.start()
        result = thread.run(value(3))
        thread.stop()
        assert not thread.is_running
        return result

    assert asyncio.run(cell()) == 3


@pytest.mark.filterwarnings("ignore:coroutine 'value' was never awaited")
def test_what_comes_too_late_is_cancelled() -> None:
    """Whether the loop has ended, or is about to and takes nothing more."""
    thread = loop_thread()
    thread.start()
    late: list[concurrent.futures.Future[int]] = []
    close = thread._loop.close

    def submit_and_close() -> None:
        late.append(thread.submit(value(1)))
        close()

    thread._loop.close = submit_and_close  # type: ignore[method-assign]  # of this loop alone
    thread.stop()
    late.append(thread.submit(value(2)))
    assert len(late) == 2
    for future in late:
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(10)


def test_a_forked_process_leaves_the_loop_of_its_parent_alone() -> None:
    loop = loop_thread()
    loop.start()
    child = os.fork()
    if child == 0:
        try:
            is_left = loop.is_parents and not loop.is_running
            loop.stop()
            os._exit(0 if is_left else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert not loop.is_parents
    assert loop.is_running
    loop.stop()
