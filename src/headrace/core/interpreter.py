"""The settings of the interpreter while a command or a run works: how soon threads take turns, how rarely it tidies."""

import gc
import sys
import threading

# A thread that asks for Python's lock gets it after this time. With the usual five milliseconds, sending the hundreds
# of weights of a network took a second beside tracing, which does not let it go.
SWITCH_SECONDS = 0.001
# Importing JAX and tracing a network make many objects and few cycles of them: with Python's own thresholds the search
# for those is a fifth of the time.
COLLECTION_THRESHOLDS = (20_000, 10, 10)


class Interpreter:
    """The settings of the interpreter, which has one of each: as they were, once nobody asks for others."""

    def __init__(self) -> None:
        self._lock, self._asked = threading.Lock(), list[float]()
        self._before: tuple[float, tuple[int, int, int]] = (sys.getswitchinterval(), gc.get_threshold())

    def ask(self, seconds: float) -> None:
        with self._lock:
            if not self._asked:
                self._before = sys.getswitchinterval(), gc.get_threshold()
                if 0 < self._before[1][0] < COLLECTION_THRESHOLDS[0]:  # 0 turns the search off
                    gc.set_threshold(*COLLECTION_THRESHOLDS)
            self._asked.append(seconds)
            self._switch()

    def leave(self, seconds: float) -> None:
        with self._lock:
            self._asked.remove(seconds)
            self._switch()
            if not self._asked:
                gc.set_threshold(*self._before[1])

    def _switch(self) -> None:
        sys.setswitchinterval(min(self._before[0], *self._asked) if self._asked else self._before[0])
