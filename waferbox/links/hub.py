"""The hub, in which a thread waits for all of its links at once."""

import os
import select
import threading
from typing import Final

from waferbox.links.link import Link, LinkLost, Message, Window
from waferbox.links.shared_memory import Slice

ANY_PEER: Final = "its peers"


class Stopped(Exception):
    """Raised where `Hub.stop` has ended a wait."""


class Hub:
    """The links of one thread, and all waiting on them. Used by that thread; `stop` is for any.

    While a send waits for its window, or a receive for its frame, the hub takes in and keeps whatever else arrives. So
    a process never blocks a peer on whose message its own wait depends.
    """

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._watched: dict[int, Link] = {}  # by descriptor; without links that have ended
        self._waiting_to_send: set[int] = set()
        self._stop_lock = threading.Lock()  # the number of a closed descriptor may be another's at once
        self.waits_for = ""  # the peer that is waited for now, ANY_PEER, or none; read from any thread
        self._stop_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.epoll()
        self._poll.register(self._stop_event, select.EPOLLIN)

    def add(self, link: Link) -> None:
        """Makes the link this hub's."""
        self._links.append(link)
        self._watched[link.fileno()] = link
        self._poll.register(link.fileno(), select.EPOLLIN)

    def stop(self) -> None:
        """Makes every wait raise Stopped, now and from now on. From any thread."""
        with self._stop_lock:
            if self._stop_event >= 0:
                os.eventfd_write(self._stop_event, 1)

    def close(self) -> None:
        """Closes the hub's own descriptors; the links stay open. No thread may be waiting."""
        with self._stop_lock:
            if self._stop_event < 0:
                return
            self._poll.close()
            os.close(self._stop_event)
            self._stop_event = -1

    def receive(self, link: Link, group: int, step: int | None = None) -> Message:
        """Waits for the message of this group and step; keeps the messages that come before it.

        step: None takes the next message of the group, of whatever step.

        Raises:
            Stopped: `stop` was called.
            LinkLost: a peer has died, or the link's peer has ended the link without sending the message.
        """
        inbox = link.inbox
        while True:
            for index, message in enumerate(inbox):
                if message.group == group and (message.step == step or step is None):
                    return link.take(index)
            # Often the frame is here already: one call of the kernel instead of two.
            if not link.poll():
                if link.ended:
                    raise LinkLost(link.name, f"it ended before it sent group {group} of step {step}")
                self._wait(link.name)

    def wait(self) -> Message:
        """Waits for the next message of any link; those of one link come in order.

        Raises:
            Stopped: `stop` was called.
            LinkLost: a peer has died, or a link has ended.
        """
        while True:
            for link in self._links:
                if link.inbox:
                    return link.take()
            for link in self._links:
                if link.ended:
                    raise LinkLost(link.name, "it ended")
            self._wait(ANY_PEER)

    def send(
        self,
        link: Link,
        group: int,
        step: int,
        payload: Slice,
        *,
        window: Window | None = None,
        as_bytes: bool = False,
    ) -> None:
        """Sends a group, by reference where the lane has shared memory, else as bytes.

        Waits while the window is closed, and until the lane has taken the bytes. Raises as `receive`.

        Args:
            link: where to.
            group: number of the group.
            step: step that the group belongs to, from 1.
            payload: the bytes of the group.
            window: the bound of the send; None: there is none.
            as_bytes: whether to send bytes on every lane, so that the caller may overwrite the payload afterwards.
        """
        while not link.may_send(step, window):
            self._wait_on(link)
        link.post(group, step, payload, window=window, as_bytes=as_bytes)
        while not link.flush():
            self._wait_on(link)

    def send_part(self, link: Link, group: int, step: int, payload: Slice, begin: int, end: int) -> None:
        """Sends a part of a group before the rest of it is there; as `Link.post_part`. Raises as `receive`."""
        link.post_part(group, step, payload, begin, end)
        while not link.flush():
            self._wait_on(link)

    def forward(self, link: Link, message: Message, *, window: Window | None = None) -> None:
        """Sends a message of another link; a reference stays one where the lane has shared memory. Raises as `send`."""
        while not link.may_send(message.step, window):
            self._wait_on(link)
        link.post_message(message, window=window)
        while not link.flush():
            self._wait_on(link)

    def wait_acked(self, link: Link, step: int) -> None:
        """Waits until the peer has acknowledged the step. Raises as `receive`."""
        while link.acked_step < step:
            self._wait_on(link)

    def _wait_on(self, link: Link) -> None:
        if link.poll():
            return
        if link.ended:
            raise LinkLost(link.name, "it ended before it took what was sent")
        self._wait(link.name)

    def _wait(self, peer: str) -> None:
        """Waits until something happens on any link, and takes it in. peer: whose link is to have what is needed."""
        for descriptor, link in self._watched.items():
            # Acknowledgements and grants are sent without waiting: frames that the lane did not take leave here.
            if link.blocked and descriptor not in self._waiting_to_send:
                self._waiting_to_send.add(descriptor)
                self._poll.modify(descriptor, select.EPOLLIN | select.EPOLLOUT)
        self.waits_for = peer
        events = self._poll.poll()
        self.waits_for = ""
        for descriptor, _ in events:
            if descriptor == self._stop_event:
                raise Stopped
            link = self._watched[descriptor]
            link.poll()
            if descriptor in self._waiting_to_send and not link.ended and link.flush():
                self._waiting_to_send.discard(descriptor)
                self._poll.modify(descriptor, select.EPOLLIN)
            if link.ended:
                # Its descriptor stays readable for ever: watching it would be spinning.
                self._poll.unregister(descriptor)
                self._waiting_to_send.discard(descriptor)
                del self._watched[descriptor]
