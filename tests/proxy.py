"""A TCP proxy of loopback that a test can make hostile: it stands between a client and a real server.

A request is what a client sends until the server answers: an HTTP request of a kept connection, a command of Redis, a
pipeline of them. Each may meet a `Fault`: the next ones, each nth, or by chance, as `Proxy` is told.
"""

import random
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

CHUNK = 1 << 16
FLIPPED_BYTES = 1024
"""an answer of more is content, but for its head"""


@dataclass(frozen=True)
class Fault:
    """What happens to one request and its answer; nothing, by default.

    Attributes:
        delay_s: before the request goes on.
        request_bytes: only so many of the request go on, then both connections are cut.
        answer_bytes: the request goes on whole and is carried out; only so many bytes of its answer come back, then
            the client's connection is cut.
        hangs: the request is swallowed and never answered; the client has to lose patience.
        deaf: as `hangs`, but the request is carried out: it is the answer that never comes.
        reply: said instead of an answer; the request is swallowed. Each of several commands of Redis gets it.
        piece_bytes, pause_s: the answer comes in such pieces, with a pause before each.
        flips: one bit of each large part of the answer is another one.
    """

    delay_s: float = 0.0
    request_bytes: int | None = None
    answer_bytes: int | None = None
    hangs: bool = False
    deaf: bool = False
    reply: bytes | None = None
    piece_bytes: int | None = None
    pause_s: float = 0.0
    flips: bool = False


PASS = Fault()
LOST_REQUEST = Fault(request_bytes=0)
LOST_ANSWER = Fault(answer_bytes=0)


def http(status: int, code: str) -> Fault:
    """An S3 server's refusal."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
    return Fault(reply=f"{head}Connection: close\r\n\r\n".encode() + body)


def resp(error: str) -> Fault:
    """A Redis server's refusal."""
    return Fault(reply=f"-{error}\r\n".encode())


@dataclass
class _Rule:
    fault: Fault
    holding: bytes
    times: int | None
    """how often it still applies; None for ever"""
    every: int
    seen: int = 0

    def meets(self, head: bytes) -> bool:
        """Whether this request meets it."""
        if self.times == 0 or not re.search(self.holding, head):
            return False
        self.seen += 1
        if self.seen % self.every:
            return False
        if self.times is not None:
            self.times -= 1
        return True


class Proxy:
    """Passes on everything to `target` until told otherwise: a port of loopback, or the path of a Unix socket. It
    listens on `Proxy.port`, for all its life."""

    def __init__(self, target: int | str) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._rules: list[_Rule] = []
        self._chance: tuple[random.Random, Mapping[Fault, float]] | None = None
        self._left: int | None = None
        self.heads: list[bytes] = []
        """the first bytes of each request"""
        self.met = 0
        """requests that met a fault"""
        self._listener = self._bound(0)
        self.port: int = self._listener.getsockname()[1]
        self._listening = False
        self.up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what shall happen -----------------------------------------------------------------------------------------

    def next(self, fault: Fault, times: int | None = 1, *, holding: bytes = b"", every: int = 1) -> None:
        """The next `times` requests (None: all) in whose first bytes `holding` is found, a regular expression, meet
        the fault; or each `every`th of them."""
        with self._lock:
            self._rules.append(_Rule(fault, holding, times, every))

    def sometimes(self, chance: random.Random, faults: Mapping[Fault, float]) -> None:
        """Every request meets each of the faults with this probability."""
        with self._lock:
            self._chance = (chance, faults)

    def down_after(self, requests: int) -> None:
        """So many more requests are answered; with the next the server is gone, until `up`."""
        with self._lock:
            self._left = requests

    def clear(self) -> None:
        """Pass on everything, from now on; forget what was seen."""
        with self._lock:
            self._rules, self._chance, self._left = [], None, None
            self.heads, self.met = [], 0
        self.up()

    def down(self) -> None:
        """Cut all connections and refuse new ones."""
        with self._lock:
            if not self._listening:
                return
            self._listening = False
            listener, connections = self._listener, list(self._connections)
            _wake(listener)
            listener.close()
            self._listener = self._bound(self.port)  # nobody else gets the port; who connects is refused
        for connection in connections:
            _wake(connection)

    @property
    def listening(self) -> bool:
        """Whether it is up."""
        return self._listening

    def up(self) -> None:
        """Listen again."""
        with self._lock:
            self._left = None
            if not self._listening:
                self._listen()

    def close(self) -> None:
        """End, for good."""
        self.down()
        self._listener.close()

    # --- what happens ----------------------------------------------------------------------------------------------

    def _bound(self, port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        return listener

    def _listen(self) -> None:
        self._listener.listen(64)
        self._listening = True
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with socket.socket(socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET) as server, client:
            for end in (client, server):
                if end.family == socket.AF_INET:
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # Closed, it is reset: who waits on it gets an error.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError):  # cut by either end, or by `down`
                server.connect(self._target if isinstance(self._target, str) else ("127.0.0.1", self._target))
                with self._lock:
                    if not self._listening:
                        return
                    self._connections |= {client, server}
                try:
                    _Exchange(self, client, server).run()
                finally:
                    with self._lock:
                        self._connections -= {client, server}

    def fault(self, head: bytes) -> Fault:
        """What a request that begins so is to meet."""
        with self._lock:
            self.heads.append(head)
            gone = self._left == 0
            if self._left:
                self._left -= 1
            fault = next((rule.fault for rule in self._rules if rule.meets(head)), None)
            if fault is None and self._chance is not None:
                chance, faults = self._chance
                fault = next((each for each, share in faults.items() if chance.random() < share), None)
            self.met += fault is not None
        if gone:
            self.down()
        return fault or PASS


class _Exchange:
    """The requests and answers of one connection, one after the other."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self._ends = [client, server]
        self._fault = PASS
        self._asking = False
        self._asked = self._answered = 0
        self._held = b""

    def run(self) -> None:
        """Until one of both ends, or a fault does it."""
        while True:
            for end in select.select(self._ends, [], [])[0]:
                data = end.recv(CHUNK)
                if not data and end is self._server and self._fault.deaf:
                    self._ends = [self._client]  # which is to find out by itself
                    continue
                if not data or not (self._ask(data) if end is self._client else self._answer(data)):
                    return

    def _ask(self, data: bytes) -> bool:
        """Pass on what the client says; False to end."""
        if not self._asking:
            self._asking, self._asked, self._answered = True, 0, 0
            self._fault = self._proxy.fault(data)
            time.sleep(self._fault.delay_s)
        fault = self._fault
        if fault.hangs:
            return True
        if fault.reply is not None and not fault.reply.startswith(b"HTTP"):
            self._held += data
            commands = _commands(self._held)
            if commands:
                self._client.sendall(fault.reply * commands)
                self._asking, self._held = False, b""
            return True
        if fault.reply is not None:
            self._client.sendall(fault.reply)
            self._client.shutdown(socket.SHUT_WR)
            while self._client.recv(CHUNK):  # a reset would take the reply away from a client that still sends
                continue
            return False
        if fault.request_bytes is not None:
            data = data[: fault.request_bytes - self._asked]
        self._asked += len(data)
        self._server.sendall(data)
        return fault.request_bytes is None or self._asked < fault.request_bytes

    def _answer(self, data: bytes) -> bool:
        """Pass on what the server says; False to end."""
        if data.startswith(b"HTTP/1.1 100 "):  # the request goes on after that
            head, _, data = data.partition(b"\r\n\r\n")
            self._client.sendall(head + b"\r\n\r\n")
            if not data:
                return True
        self._asking = False
        fault = self._fault
        if fault.deaf:
            return True
        if fault.answer_bytes is not None:
            data = data[: fault.answer_bytes - self._answered]
        if fault.flips and len(data) > FLIPPED_BYTES:
            at = len(data) - FLIPPED_BYTES // 4
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        for start in range(0, len(data), fault.piece_bytes or CHUNK):
            time.sleep(fault.pause_s)
            self._client.sendall(data[start : start + (fault.piece_bytes or CHUNK)])
        self._answered += len(data)
        return fault.answer_bytes is None or self._answered < fault.answer_bytes


def _commands(data: bytes) -> int:
    """How many commands of Redis these are; 0 while the last is not complete."""
    at = count = 0
    try:
        while at < len(data):
            end = data.index(b"\r\n", at)
            parts, at = int(data[at + 1 : end]), end + 2
            for _ in range(parts):
                end = data.index(b"\r\n", at)
                at = end + 2 + int(data[at + 1 : end]) + 2
            count += 1
    except ValueError:
        return 0
    return count if at == len(data) else 0


def _wake(end: socket.socket) -> None:
    """Whoever waits on the socket finds it ended; its own thread closes it."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
