"""`Control`: how the processes of a service are told what to do: whole messages, and sockets with them, over a socket pair.

The pair is also how each side learns that the other one has ended, however it did: nothing has to be cleaned up. Messages are
pickles, between processes that trust each other.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import pickle
import signal
import socket
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)

_LONGEST = 2**15  # bytes of a message that goes through the socket itself; a longer one goes in a file without a name
_MOST_SOCKETS = 4


class Control:
    """One end. `socket` is taken over."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def pair(cls) -> tuple[Control, socket.socket]:
        """An end, and the socket of the other one."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    @classmethod
    def inherited(cls, handle: int) -> Control:
        """The end whose file descriptor this process was started with."""
        os.set_inheritable(handle, False)
        return cls(socket.socket(fileno=handle))

    def fileno(self) -> int:
        """For event loops."""
        return self._socket.fileno()

    def send(self, *message: Any, sockets: Sequence[socket.socket] = ()) -> None:
        """Send a message and copies of sockets, without waiting. Nothing happens when the other side has ended."""
        data = pickle.dumps(message)
        handles = [one.fileno() for one in sockets]
        with contextlib.ExitStack() as stack:
            if long := len(data) > _LONGEST:
                file = stack.enter_context(open(os.memfd_create("llmjax-message"), "w+b"))
                file.write(data)
                file.flush()
                handles.append(file.fileno())
                data = b""
            try:
                flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                socket.send_fds(self._socket, [bytes([long]), data], handles, flags)
            except ConnectionError:
                pass
            except BlockingIOError:
                log.error("a process does not read what it is told: %s is lost", message[0])

    def receive(self) -> tuple[tuple[Any, ...], list[socket.socket]] | None:
        """The next message with its sockets; None when the other side has ended."""
        handles = array.array("i")
        try:
            room = socket.CMSG_LEN((1 + _MOST_SOCKETS) * handles.itemsize)
            data, others, _, _ = self._socket.recvmsg(1 + _LONGEST, room, socket.MSG_CMSG_CLOEXEC)  # socket.recv_fds drops flags
        except ConnectionError:
            return None
        if not data:
            return None
        for _, _, packed in others:  # nothing but file descriptors is ever sent
            handles.frombytes(packed)
        long, data = data[0], data[1:]
        if long:
            with open(handles.pop(), "rb") as file:
                file.seek(0)  # the position is the sender's, at the end
                data = file.read()
        return pickle.loads(data), [socket.socket(fileno=handle) for handle in handles]

    def close(self) -> None:
        """The other side sees that this one has ended."""
        self._socket.close()


def leave_signals_to_the_supervisor() -> None:
    """Ctrl-C reaches every process of a terminal, and a service manager's SIGTERM every one of a service: one of them decides.

    By a handler that does nothing, because a signal that is ignored stays so in processes that this one starts.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
