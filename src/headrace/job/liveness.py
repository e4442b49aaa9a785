"""The watch: every process hears within seconds that another one has died, hangs or has failed, and ends too.

Collectives do not help here: a process that waits for one that is stopped waits for ever, and JAX's own heartbeat ends
a process with a dump of the C++ stack that names nobody. So a thread keeps the lines of the roll call open. A line that
closes is a process that died; one that is silent for too long is a process that hangs, or whose host is gone.
"""

import os
import selectors
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from headrace.core.errors import ProcessLost
from headrace.job.rendezvous import Attendance, Gone, Line, Member

GRACE = 3.0  # seconds in which process 0 may still write its last record after another process was lost


class LivenessMonitor:
    """The thread, what it has found out, and the ways in which this process leaves the job."""

    def __init__(self, roll: Attendance, silence_seconds: float, parent: int | None = None) -> None:
        self.me, self._lines, self._silence = roll.me, dict(roll.lines), silence_seconds
        self.lost: str | None = None  # who was lost, and how, in words
        self._found, self._ended = threading.Event(), threading.Event()
        self._parent = parent  # a launcher, whose end is ours
        self._left: set[Line] = set()  # lines of processes that are done
        self._done = False  # this process is
        self._told = threading.Lock()
        self._beat = min(1.0, silence_seconds / 5)
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    @property
    def _is_first(self) -> bool:
        return self.me.process == 0

    def wait_for_loss(self, seconds: float) -> str | None:
        """Return who was lost, after waiting a while for the news; None when nobody was."""
        self._found.wait(seconds)
        return self.lost

    def fail(self, reason: str) -> None:
        """Tell the others that this process cannot go on."""
        self._ended.set()  # first: what the others say about it is no news
        for line in self._lines:
            line.send(failed=reason)

    def farewell(self) -> None:
        """Wait until every process is done, so that nobody leaves while another still needs it."""
        if self._ended.is_set() or self.lost:
            return
        self._done = True
        for line in () if self._is_first else self._lines:
            line.send(done=True)
        self._ended.wait()

    def tell(self) -> bool:
        """Say whether it is for the caller to print the last line: once only, by whoever comes first."""
        return self._told.acquire(blocking=False)

    def _run(self) -> None:
        heard = dict.fromkeys(self._lines, time.monotonic())
        looked = sent = 0.0
        with selectors.DefaultSelector() as selector:
            for line in self._lines:
                selector.register(line, selectors.EVENT_READ)
            while not self._ended.is_set():
                for key, _ in selector.select(self._beat / 2):
                    line: Any = key.fileobj
                    heard[line] = time.monotonic()
                    if not self._hear(line):
                        selector.unregister(line)
                now = time.monotonic()
                if looked and now - looked > self._silence / 2:  # it was us who slept: everybody gets a new chance
                    heard = dict.fromkeys(heard, now)
                looked = now
                if now - sent > self._beat:
                    sent = now
                    for line in self._lines:
                        line.send(beat=True)
                self._look(heard, now)

    def _look(self, heard: dict[Line, float], now: float) -> None:
        """Look who is silent, whether all are done, and whether the launcher is still there."""
        for line, member in self._lines.items():
            if line not in self._left and now - heard[line] > self._silence:
                self._lose(f"{member} is not heard of for {self._silence:g} s: it hangs, or its host is gone")
        if self._is_first and self._done and len(self._left) == len(self._lines):
            for line in self._lines:
                line.send(all_done=True)
            self._ended.set()
        if self._parent is not None and os.getppid() != self._parent and not self._ended.is_set():
            self._lose("the launcher has ended")

    def _hear(self, line: Line) -> bool:
        """Take what came through a line; return False when it is closed."""
        member = self._lines[line]
        try:
            for message in line.receive():
                if message.get("done"):
                    self._left.add(line)
                if message.get("all_done"):
                    self._ended.set()
                if "failed" in message:
                    self._lose(f"{member} failed: {message['failed']}")
                if "lost" in message:
                    self._lose(message["lost"])
        except Gone:
            if line not in self._left and not self._ended.is_set():
                self._lose(f"{member} died")
            return False
        return True

    def _lose(self, what: str) -> None:
        """End the job: tell the others, give process 0 a moment for its last record, and leave."""
        if self.lost or self._ended.is_set():
            return
        self.lost = what
        self._found.set()
        if self._is_first:
            for line in self._lines:
                line.send(lost=what)
            # Where the main thread does not wait for anybody it ends by itself, with a record of why; else we end it.
            time.sleep(GRACE)
        if self.tell():
            with suppress(OSError, ValueError):
                print(f"headrace: {describe(self.me, what)}", file=sys.stderr, flush=True)
        os._exit(ProcessLost.exit_code)


def describe(me: Member, lost: str) -> str:
    """Return the last line of a process that ends because another one was lost."""
    return f"Process {me.process} ends, because {lost}"
