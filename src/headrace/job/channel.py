"""Small JSON messages between two processes of a job, over a TCP socket."""

import json
import socket
import threading
from contextlib import suppress
from typing import Any

from headrace.core.files import parse_json

MAX_MESSAGE_BYTES = 1 << 20  # without an end of line: not a message of ours
SEND_SECONDS = 5.0  # a peer that no longer reads must not block us


class ChannelClosed(Exception):
    """The other end of a channel is closed, or sends something that is not a message."""


class Channel:
    """Small JSON messages between two processes, one per line, over a TCP socket.

    `send` may be called by any thread, `receive` by one.
    """

    def __init__(self, connection: socket.socket, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._socket, self._buffer, self._lock = connection, b"", threading.Lock()
        self.max_message_bytes = max_message_bytes
        # The messages are small and awaited: by default the kernel would hold each back to fill a packet.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SEND_SECONDS)

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def addresses(self) -> tuple[str, str]:
        """Return the addresses of this end and of the other one, without ports."""
        ends = (self._socket.getsockname()[0], self._socket.getpeername()[0])
        return ends[0].removeprefix("::ffff:"), ends[1].removeprefix("::ffff:")  # IPv4 at a socket for both kinds

    def send(self, **message: Any) -> None:
        """Send a message. One that cannot be sent is dropped; `receive` will raise ChannelClosed."""
        # Under a lock: the parts of two long messages must not mix in the stream.
        with self._lock, suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float = SEND_SECONDS) -> list[dict[str, Any]]:
        """Wait for data and return the messages that are complete; ChannelClosed if the other end is gone."""
        # The timeout belongs to the socket, for both directions; it is set back for senders below.
        self._socket.settimeout(timeout)
        try:
            data = self._socket.recv(65536)
        except TimeoutError:
            return []
        except OSError as error:
            raise ChannelClosed from error
        finally:
            with suppress(OSError):
                self._socket.settimeout(SEND_SECONDS)
        if not data:
            raise ChannelClosed
        # TCP is a stream: a message may arrive in pieces, or several at once.
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > self.max_message_bytes:
            raise ChannelClosed
        try:
            messages = [parse_json(line, self.max_message_bytes) for line in lines]
        except ValueError as error:
            raise ChannelClosed from error
        if not all(isinstance(message, dict) for message in messages):
            raise ChannelClosed
        return messages

    def close(self) -> None:
        """Close the connection."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
