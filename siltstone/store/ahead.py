"""Read many small objects, some at once: a store may take long to answer each request."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")

AT_ONCE = 16
"""maximum objects that are read before they are used"""


def read_ahead(read: Callable[[Item], Found], items: Iterable[Item]) -> Iterator[Found]:
    """Yield `read(item)` of each item, in order; later ones are read meanwhile, by other threads.

    An error of `read` is raised where its result would have come.
    """
    left = deque(items)
    if len(left) <= 1:
        yield from map(read, left)
        return
    pool = ThreadPoolExecutor(min(AT_ONCE, len(left)), thread_name_prefix="fetch")
    waiting: deque[Future[Found]] = deque()
    try:
        while waiting or left:
            while left and len(waiting) < AT_ONCE:
                waiting.append(pool.submit(read, left.popleft()))
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
