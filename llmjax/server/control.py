"""`Control`: how the processes of a service are told what to do: whole messages, and sockets with them, over a socket pair.

The pair is also how each side learns that the other one has ended, however it did: nothing has to be cleaned up. Messages are
pickles, between processes that trust each other.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
from collections.abc import Sequence
from typing import Any

_LONGEST = 2**18  # bytes of a message
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
        with contextlib.suppress(OSError):
            socket.send_fds(self._socket, [data], [one.fileno() for one in sockets], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def receive(self) -> tuple[tuple[Any, ...], list[socket.socket]] | None:
        """The next message with its sockets; None when the other side has ended."""
        try:
            data, handles, _, _ = socket.recv_fds(self._socket, _LONGEST, _MOST_SOCKETS)
        except ConnectionError:
            return None
        if not data:
            return None
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
