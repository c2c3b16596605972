"""Complete checkpoints behind the stream: each is uploaded by a thread of its own, side by side with the others; one
thread stores their manifests and commits them, another delivers their outputs.

These two take them in order, and so do errors come: a checkpoint whose upload fails keeps none before it from being
completed. A commit takes its turn between two steps, so a task never runs while the checkpoint changes that it would
restore. The first error ends it all: the region goes back to its newest complete checkpoint.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from threading import Thread

from siltstone.run.pending import Completed
from siltstone.run.region import ConsistentRegion

Work = Callable[[], None]


class CheckpointsBehind:
    """The checkpoints of one region that are on their way.

    Args:
        turn: the lock that a thread holds while it takes a step or commits.
        deliver: delivers the outputs of a complete checkpoint, and says that it exists.
        failed: called, with `turn` held, with an error after which the region takes no further step.
        as_thread: wraps what a thread does; called on the thread that makes this object.
    """

    def __init__(
        self,
        region: ConsistentRegion,
        turn: threading.Condition,
        deliver: Callable[[Completed], None],
        failed: Callable[[BaseException], None],
        as_thread: Callable[[Work], Work] = lambda work: work,
    ) -> None:
        self._region, self._turn, self._deliver, self._failed = region, turn, deliver, failed
        self._undelivered = 0
        """complete checkpoints whose outputs are not delivered, and the one that is being committed"""
        self.ended = False
        """whether nothing more begins: it was closed, or has failed"""
        self._queues: list[SimpleQueue[Work | None]] = [SimpleQueue(), SimpleQueue()]
        # Not in `add`: a query's thread calls that, and what inherits its job group is cancelled with the query.
        self._work = [partial(self._attempt, as_thread(partial(self._follow, queue))) for queue in self._queues]
        self._threads: list[Thread] = []
        self._uploads: list[Thread] = []

    @property
    def has_room(self) -> bool:
        """Whether one more checkpoint may be on its way; outputs that wait for delivery count, too."""
        return self._on_their_way < self._region.protocol.max_pending

    @property
    def is_empty(self) -> bool:
        """Whether all have been completed and delivered."""
        return not self._on_their_way

    @property
    def _on_their_way(self) -> int:
        return len(self._region.protocol.pending) + self._undelivered

    def add(self) -> None:
        """Take the checkpoint that the region has just prepared; `turn` is held."""
        if not self._threads:
            for what, work in zip(("store", "deliver"), self._work, strict=True):
                self._threads.append(self._start(what, work))
        [*_, newest] = self._region.protocol.pending
        uploaded = Future[None]()
        thread = self._start("upload", partial(copy_context().run, partial(self._upload, newest.id, uploaded)))
        self._uploads = [*(each for each in self._uploads if each.is_alive()), thread]
        self._queues[0].put(partial(copy_context().run, partial(self._complete, uploaded)))

    def _start(self, what: str, work: Callable[[], object]) -> Thread:
        # A daemon: a driver that ends without waiting ends its run like a crash, which loses nothing.
        thread = Thread(target=work, name=f"siltstone-{what}-{self._region.stream.name}", daemon=True)
        thread.start()
        return thread

    def _upload(self, checkpoint: int, uploaded: Future[None]) -> None:
        try:
            uploaded.set_result(self._region.upload(checkpoint))
        except BaseException as error:
            uploaded.set_exception(error)

    def _complete(self, uploaded: Future[None]) -> None:
        self._region.store(uploaded.result)
        with self._turn:
            if self.ended:
                return
            # Before the commit: if the region cannot go on from it, nobody may take the outputs for delivered.
            self._undelivered += 1
            completed = self._region.commit()
            self._turn.notify_all()
        self._queues[1].put(partial(copy_context().run, partial(self._give, completed)))

    def _give(self, completed: Completed) -> None:
        self._deliver(completed)
        with self._turn:
            self._undelivered -= 1
            self._turn.notify_all()

    def _follow(self, queue: "SimpleQueue[Work | None]") -> None:
        """Do what is in a queue, in order, until the end or the first error."""
        while (work := queue.get()) is not None:
            if not self.ended:
                self._attempt(work)

    def _attempt(self, work: Work) -> None:
        try:
            work()
        except BaseException as error:
            with self._turn:
                self.ended = True
                self._failed(error)
                self._turn.notify_all()

    def close(self) -> None:
        """Begin nothing more, and wait until what is under way has ended; `turn` is not held."""
        self.ended = True
        for queue in self._queues:
            queue.put(None)
        for thread in (*self._uploads, *self._threads):
            thread.join()
