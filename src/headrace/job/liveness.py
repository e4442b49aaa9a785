"""Liveness: every process learns within seconds that another one has died, hangs or has failed, and ends too.

Collectives do not detect this: a process that waits for a stopped one waits for ever, and JAX's own heartbeat ends a
process with a C++ stack trace that names nobody. So a thread watches the channels that the rendezvous opened. A channel
that closes means that the process died; one that stays silent for too long, that the process hangs or its host is gone.
"""

import faulthandler
import os
import re
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from headrace.core.errors import ProcessLost, RunHung
from headrace.job.rendezvous import Channel, ChannelClosed, Connections, Peer
from headrace.job.variables import HANG_SECONDS, read_seconds

HANG_SECONDS_AT_START = 1800.0  # at least, until the first results of a run
GRACE_SECONDS = 3.0  # in which process 0 may still write its last record after another process was lost


class LivenessMonitor:
    """The watching thread, what it has found, and how this process leaves the job."""

    def __init__(self, connections: Connections, silence_seconds: float, launcher_pid: int | None = None) -> None:
        self.me, self._channels, self._silence = connections.me, dict(connections.channels), silence_seconds
        self.lost: str | None = None  # which process was lost, and how
        self._loss_found, self._ended = threading.Event(), threading.Event()
        self._launcher_pid = launcher_pid  # this process ends when that one does
        self._peers_done: set[Channel] = set()
        self._done = False  # this process has nothing left to do
        self._last_message = threading.Lock()
        # Several beats fit into the silence that counts as a hang, so that a late one is not taken for it.
        self._heartbeat = min(1.0, silence_seconds / 5)
        threading.Thread(target=self._run, name="liveness", daemon=True).start()

    @property
    def _is_first(self) -> bool:
        return self.me.process == 0

    def wait_for_loss(self, seconds: float) -> str | None:
        """Wait up to some seconds for a report of a lost process; return it, or None."""
        self._loss_found.wait(seconds)
        return self.lost

    def fail(self, reason: str) -> None:
        """Send the others the reason why this process ends."""
        self._ended.set()  # first: from here on, what the others report about this process does not matter
        for channel in self._channels:
            channel.send(failed=reason)

    def wait_until_all_done(self) -> None:
        """Wait until every process is done, so that none leaves while another still needs it."""
        if self._ended.is_set() or self.lost:
            return
        self._done = True
        for channel in () if self._is_first else self._channels:
            channel.send(done=True)
        # The daemon thread sets it: process 0 once all are done, the others when it tells them.
        self._ended.wait()

    def claim_last_message(self) -> bool:
        """Return True to the first caller only: it prints why this process ends."""
        return self._last_message.acquire(blocking=False)

    def _run(self) -> None:
        heard = dict.fromkeys(self._channels, time.monotonic())
        checked = sent = 0.0
        with selectors.DefaultSelector() as selector:
            for channel in self._channels:
                selector.register(channel, selectors.EVENT_READ)
            while not self._ended.is_set():
                for key, _ in selector.select(self._heartbeat / 2):
                    channel: Any = key.fileobj
                    heard[channel] = time.monotonic()
                    if not self._read(channel):
                        selector.unregister(channel)
                now = time.monotonic()
                # After a long pause of this very process (a suspended machine, say), the silence was its own.
                if checked and now - checked > self._silence / 2:
                    heard = dict.fromkeys(heard, now)
                checked = now
                if now - sent > self._heartbeat:
                    sent = now
                    for channel in self._channels:
                        channel.send(beat=True)
                self._check(heard, now)

    def _check(self, heard: dict[Channel, float], now: float) -> None:
        """Check who is silent, whether all are done, and whether the launcher still runs."""
        for channel, peer in self._channels.items():
            if channel not in self._peers_done and now - heard[channel] > self._silence:
                self._lose(f"{peer} has not responded for {self._silence:g} s: it hangs, or its host is gone")
        if self._is_first and self._done and len(self._peers_done) == len(self._channels):
            for channel in self._channels:
                channel.send(all_done=True)
            self._ended.set()
        # The kernel gives orphans another parent, so that no pid has to be probed, which might be somebody else's by
        # now.
        if self._launcher_pid is not None and os.getppid() != self._launcher_pid and not self._ended.is_set():
            self._lose("the launcher has ended")

    def _read(self, channel: Channel) -> bool:
        """Handle the messages of a channel; return False when it is closed."""
        peer = self._channels[channel]
        try:
            for message in channel.receive():
                # A process that is done may close its channel: that is no death.
                if message.get("done"):
                    self._peers_done.add(channel)
                if message.get("all_done"):
                    self._ended.set()
                if "failed" in message:
                    self._lose(f"{peer} failed: {message['failed']}")
                if "lost" in message:
                    self._lose(message["lost"])
        except ChannelClosed:
            if channel not in self._peers_done and not self._ended.is_set():
                self._lose(f"{peer} died")
            return False
        return True

    def _lose(self, what: str) -> None:
        """End the job: inform the others, give process 0 a moment for its last record, and exit."""
        if self.lost or self._ended.is_set():
            return
        self.lost = what
        self._loss_found.set()
        if self._is_first:
            for channel in self._channels:
                channel.send(lost=what)
            # A main thread that is not blocked in a collective ends by itself and records why; else it is ended here.
            time.sleep(GRACE_SECONDS)
        if self.claim_last_message():
            with suppress(OSError, ValueError):
                print(f"headrace: {ending_message(self.me, what)}", file=sys.stderr, flush=True)
        # Not sys.exit: this is not the main thread, and that one may be inside a collective which never returns.
        os._exit(ProcessLost.exit_code)


def ending_message(me: Peer, lost: str) -> str:
    """Return the last message of a process that ends because another one was lost."""
    return f"Process {me.process} ends, because {lost}"


LAST_MESSAGE = re.compile(r"headrace: Process \d+ ends, because (.*?)\.?$")  # as a launcher finds it in the output


class ProgressWatch:
    """Ends this process if its run makes no progress for too long while the block runs.

    Other processes only notice that this one does not answer at all. But its threads may well answer while the run
    waits for ever: for a file system, a device, a collective or a callback.
    """

    def __init__(self, environ: Mapping[str, str], monitor: LivenessMonitor | None) -> None:
        text = environ.get(HANG_SECONDS)
        self._seconds = read_seconds(HANG_SECONDS, text) if text else None
        # Before anything has moved programs are compiled, for as long as that takes.
        self._limit = max(self._seconds or 0.0, HANG_SECONDS_AT_START)
        self._monitor, self._last, self._ended = monitor, time.monotonic(), threading.Event()

    def __enter__(self) -> "ProgressWatch":
        self._last = time.monotonic()
        if self._seconds:
            threading.Thread(target=self._run, args=(self._seconds / 8,), name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def moved(self) -> None:
        """Note that the run has made progress."""
        # From the first progress on the limit is the one asked for: everything is compiled by then.
        self._last, self._limit = time.monotonic(), self._seconds or 0.0

    def _run(self, period: float) -> None:
        checked = time.monotonic()
        while not self._ended.wait(min(1.0, period)):
            now, limit = time.monotonic(), self._limit
            if now - checked > limit / 2:  # this process was stopped, or the machine suspended
                self._last = now
            checked = now
            if now - self._last > limit:
                self._give_up(f"no progress for {limit:g} s ({HANG_SECONDS})")

    def _give_up(self, reason: str) -> None:
        """Report where every thread is, inform the other processes, and exit: nothing else could end the wait."""
        with suppress(OSError, ValueError):
            text = f"headrace: pid {os.getpid()}, host {socket.gethostname()}: {reason}; where its threads are:"
            print(text, file=sys.stderr, flush=True)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        if self._monitor:
            self._monitor.fail(reason)
        os._exit(RunHung.exit_code)
