"""Reports the work of this process to a running cachemate daemon, or to ``cachemate run``.

>>> work = WorkCounter.open()
>>> work.add(1)  # per request, row or frame; does nothing if no daemon runs
"""

from __future__ import annotations

import mmap
import os
import socket
import struct

DEFAULT_SOCKET = "/run/cachemate/cachemate.sock"


class WorkCounter:
    """A count of work done, in memory that the daemon reads. Use it from one thread."""

    def __init__(self, memory: mmap.mmap | None) -> None:
        self._memory = memory
        self.total = 0 if memory is None else struct.unpack_from("=Q", memory)[0]

    @property
    def is_reported(self) -> bool:
        """Whether a daemon, or ``cachemate run``, reads the count."""
        return self._memory is not None

    def add(self, amount: int) -> None:
        """Adds work that was done."""
        self.total += amount
        if self._memory is not None:
            struct.pack_into("=Q", self._memory, 0, self.total & (2**64 - 1))

    @classmethod
    def open(cls, socket_path: str | None = None) -> WorkCounter:
        """Asks the daemon for memory; without a daemon, the counter reports to nobody."""
        descriptor = _open_report(socket_path)
        if descriptor is None:
            return cls(None)
        try:
            return cls(mmap.mmap(descriptor, 8))
        except (OSError, ValueError):
            return cls(None)
        finally:
            os.close(descriptor)


def _open_report(socket_path: str | None) -> int | None:
    report_file = os.environ.get("CACHEMATE_PROGRESS")
    try:
        if socket_path is None and report_file:
            return os.open(report_file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        path = socket_path or os.environ.get("CACHEMATE_SOCKET") or DEFAULT_SOCKET
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon:
            daemon.settimeout(5)
            daemon.connect(path)
            daemon.sendall(b"progress\n")
            _, descriptors, _, _ = socket.recv_fds(daemon, 1, 1)
            return descriptors[0] if descriptors else None
    except OSError:
        return None
