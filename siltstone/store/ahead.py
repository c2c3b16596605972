"""Read many small objects, some at once: a store may take long to answer each request."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")

AT_ONCE = 16
"""maximum objects that are read before they are used"""


@contextmanager
def fetch_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that fetch until the block ends. What they fetch at that time is not waited for, and of no interest.

    A generator that uses them may be closed by the garbage collector, at any point of any thread, even one that just
    begins and has a lock of `threading` that an ending thread needs. To wait for the threads there would be for ever.
    """
    pool = ThreadPoolExecutor(count, thread_name_prefix="fetch")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def read_ahead(read: Callable[[Item], Found], items: Iterable[Item]) -> Iterator[Found]:
    """Yield `read(item)` of each item, in order; later ones are read meanwhile, by other threads.

    An error of `read` is raised where its result would have come.
    """
    left = deque(items)
    if len(left) <= 1:
        yield from map(read, left)
        return
    waiting: deque[Future[Found]] = deque()
    with fetch_threads(min(AT_ONCE, len(left))) as pool:
        while waiting or left:
            while left and len(waiting) < AT_ONCE:
                waiting.append(pool.submit(read, left.popleft()))
            yield waiting.popleft().result()
