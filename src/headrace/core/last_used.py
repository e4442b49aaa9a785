"""Things by key, of which the last used ones stay."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any


class LastUsed:
    """At most so many things by key, for several threads; what was put or taken longest ago goes first."""

    def __init__(self, most: int) -> None:
        self._most, self._things, self._lock = most, OrderedDict[Hashable, Any](), Lock()

    def __len__(self) -> int:
        return len(self._things)

    def take_or_make(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the thing under a key, made now if there is none."""
        with self._lock:
            found = self._things.pop(key, None) or make()
            self._put(key, found)
        return found

    def put(self, key: Hashable, thing: Any) -> None:
        """Keep a thing among the last ones."""
        with self._lock:
            self._things.pop(key, None)
            self._put(key, thing)

    def get(self, key: Hashable) -> Any:
        """Return what was kept under a key; None if there is nothing."""
        with self._lock:
            return self._things.get(key)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._things.clear()

    def _put(self, key: Hashable, thing: Any) -> None:
        self._things[key] = thing
        if len(self._things) > self._most:
            self._things.popitem(last=False)
