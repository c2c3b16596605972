"""Threads for requests that may hang."""

import queue
import threading
from collections.abc import Callable

_NAME = "siltstone-upload"


class RequestThreads:
    """Daemon threads, made as they are needed. A process may end though some of them hang."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0
        self._threads = 0
        self._closed = False

    def run(self, task: Callable[[], None]) -> None:
        """Have a thread run `task` now, even if there are many: what its caller waits for must not wait for others."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._take_thread()
        if closed:
            threading.Thread(target=task, name=_NAME, daemon=True).start()
        else:
            self._tasks.put(task)

    def try_run(self, task: Callable[[], None]) -> bool:
        """Have a thread run `task` now; return False if none is free and no further one may be started."""
        with self._lock:
            if self._closed or (not self._free and self._threads >= self._most):
                return False
            self._take_thread()
        self._tasks.put(task)
        return True

    def close(self) -> None:
        """End the threads that are free, and the others once they are."""
        with self._lock:
            threads = 0 if self._closed else self._threads
            self._closed = True
        for _ in range(threads):
            self._tasks.put(None)

    def _take_thread(self) -> None:
        if self._free:
            self._free -= 1
        else:
            self._threads += 1
            threading.Thread(target=self._work, name=_NAME, daemon=True).start()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # it holds the object's bytes
            with self._lock:
                if self._threads > self._most:
                    self._threads -= 1
                    return
                self._free += 1
