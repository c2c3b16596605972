"""Objects in Redis: one hash per entry.

    redis://[user@]host[:port][/database]?prefix=siltstone&chunk_bytes=1048576      rediss:// for TLS

The password is in the variable `SILTSTONE_REDIS_PASSWORD`, or in the one that the option `password_variable` names.

    <prefix>:<entry>       hash: key -> value or header, and the chunks (`protocol`)
    <prefix>:.writing      hash: write id -> start time and object name, for chunked writes in progress

One command or script makes an object appear complete. Chunks stay only while their write is in `.writing`: otherwise
the transaction that stores them removes them again. So what a killed writer left can always be found there.

The server's setting `appendfsync` determines how durable a write is on return. On Redis 7.2 and later with its
append-only file on, a write also waits until the file is on disk (WAITAOF).
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import redis
from redis import exceptions as refusals

from siltstone.errors import Unreachable, UsageError
from siltstone.store.base import Remark, Unfinished
from siltstone.store.keyvalue.chunked import ChunkedStore
from siltstone.store.keyvalue.protocol import (
    CHUNK,
    HEADER_BYTES,
    MAGIC,
    WRITE_ID_BYTES,
    WRITE_ID_OFFSET,
    Chunks,
    Get,
    Keys,
    Values,
    join_name,
    split_name,
)
from siltstone.store.keyvalue.redis_client import (
    LARGEST_VALUE_BYTES,
    RedisOptions,
    Server,
    client,
    memory_remark,
    translate_errors,
    unreachable_error,
)
from siltstone.store.paths import check_object_name
from siltstone.store.retry import Retrying
from siltstone.store.url import options_of, redact_url


class Script:
    """A Lua script: sent as its hash if the server knows it, else in full."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


_DROP = """
local function drop(key, id)
  local stem, i = '\\0' .. key .. '\\0' .. id, 0
  while redis.call('HDEL', KEYS[1], stem .. struct.pack('>I4', i)) == 1 do i = i + 1 end
end
"""
_WRITE_ID = f"""
local function write_id(key)
  if redis.call('HSTRLEN', KEYS[1], key) ~= {HEADER_BYTES} then return nil end
  local value = redis.call('HGET', KEYS[1], key)
  if string.sub(value, 1, {len(MAGIC)}) ~= '{MAGIC.decode()}' then return nil end
  return string.sub(value, {WRITE_ID_OFFSET + 1}, {WRITE_ID_OFFSET + WRITE_ID_BYTES})
end
"""
# KEYS: the entry, the writes in progress.
BEGIN = Script("""
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then return 0 end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
return 1
""")
# After an HSET of chunks, in one transaction with it.
TAKE_BACK = Script("""
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then return 1 end
redis.call('HDEL', KEYS[1], unpack(ARGV, 2))
return 0
""")
COMMIT = Script("""
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 0 then return -1 end
if redis.call('HSETNX', KEYS[1], ARGV[2], ARGV[3]) == 0 then return 0 end
redis.call('HDEL', KEYS[2], ARGV[1])
return 1
""")
# Values that are too long are not sent: the reader would have to receive them.
VALUES = Script("""
local most, found = tonumber(ARGV[1]), {}
for i = 2, #ARGV do
  local size = redis.call('HSTRLEN', KEYS[1], ARGV[i])
  found[i - 1] = size > most and size or redis.call('HGET', KEYS[1], ARGV[i])
end
return found
""")
PART = Script("""
local value = redis.call('HGET', KEYS[1], ARGV[1])
return value and {string.len(value), string.sub(value, ARGV[2] + 1, ARGV[3])}
""")
# A write whose id is in the header of its object was committed, even if it is listed as in progress.
DISCARD = Script(f"""{_DROP}{_WRITE_ID}
if redis.call('HDEL', KEYS[2], ARGV[1]) == 1 and write_id(ARGV[2]) ~= ARGV[3] then drop(ARGV[2], ARGV[3]) end
""")
DELETE = Script(f"""{_DROP}{_WRITE_ID}
for _, key in ipairs(ARGV) do
  local id = write_id(key)
  redis.call('HDEL', KEYS[1], key)
  if id then drop(key, id) end
end
""")


_TRANSACTION_BYTES = 1 << 20
_TRANSACTION_CHUNKS = _SCRIPT_KEYS = 1000  # a script takes some thousand arguments
_WRITING_BYTES = 4096
"""maximum bytes of a row in `.writing`: a time and a name"""


def open_redis(url: str) -> Retrying:
    """Open the store at a `redis://` or `rediss://` URL, without I/O.

    Raises:
        UsageError: the URL or an option is not valid.
    """
    options = options_of(url, RedisOptions)
    return Retrying(ChunkedStore(RedisKeyValue(url, options), options.policy, options.checksums), options.policy)


WRITING = ".writing"
"""the entry of writes in progress; it holds no object"""
_waits: dict[tuple[int, str], bool] = {}


class RedisKeyValue:
    """`KeyValue` over one Redis database; it holds only plain values, so it can be sent to other processes."""

    def __init__(self, url: str, options: RedisOptions) -> None:
        Server.of(url, options)  # refuses a URL that is not valid
        self.url, self.label = url, redact_url(url)
        self.value_limit_bytes = options.chunk_bytes
        self._options = options
        self._prefix = options.prefix
        self._writing = self.key_of(WRITING)

    @property
    def client(self) -> redis.Redis:
        """A client with this process's connection pool."""
        return client(self.url, self._options)

    def key_of(self, entry: str) -> str:
        """Return the Redis key of an entry's hash."""
        return f"{self._prefix}:{entry}"

    def entries(self, prefix: str) -> Iterable[str]:
        """Return entries whose names start with `prefix`; SCAN goes over all keys of the database."""
        start = self.key_of("")
        pattern = "".join(f"\\{c}" if c in "*?[]\\^-" else c for c in start + prefix) + "*"
        with translate_errors("list entries", self.label):
            found = set(self.client.scan_iter(match=pattern, count=1000, _type="HASH"))
        names = (key.decode("utf-8", "replace").removeprefix(start) for key in found)
        return [name for name in names if not name.startswith(".")]

    def sizes(self, entry: str) -> Iterable[tuple[bytes, int]]:
        """Return (key, bytes of its value) of each key except chunks'."""
        with translate_errors(f"list entry {entry}", self.label):
            keys: Any = self.client.hkeys(self.key_of(entry))
            keys = [key for key in keys if not key.startswith(CHUNK)]
            pipe = self.client.pipeline(transaction=False)
            for key in keys:
                pipe.hstrlen(self.key_of(entry), key)
            # A key deleted meanwhile has length 0, like an empty value, so these are checked again.
            sizes = dict(zip(keys, pipe.execute(), strict=True))
            for key in [key for key, size in sizes.items() if size == 0]:
                if not self.client.hexists(self.key_of(entry), key):
                    del sizes[key]
        return sizes.items()

    @contextmanager
    def open_entry(self, entry: str, key: bytes = b"") -> Iterator[Get]:
        """Open an entry for reading values (`KeyValue.open_entry`)."""
        yield _RedisReading(self, entry, f"read object {join_name(entry, key)}" if key else f"read entry {entry}")

    def add(self, entry: str, key: bytes, value: memoryview) -> bool:
        """Store a new key by one HSETNX; False if it is taken."""
        with translate_errors(f"write object {join_name(entry, key)}", self.label):
            return bool(self._run("HSETNX", self.key_of(entry), key, value, durably=True))

    def stage(self, entry: str, key: bytes, write_id: bytes) -> "_StagedInRedis | None":
        """Begin a chunked write of `key`; None if it is taken."""
        name = join_name(entry, key)
        token = write_id.hex()
        began = f"{datetime.now(UTC).isoformat()} {name}"
        with translate_errors(f"write object {name}", self.label):
            if not self.run_script(BEGIN, entry, key, token, began):
                return None
        return _StagedInRedis(self, entry, key, token)

    def delete(self, entry: str, keys: list[bytes]) -> None:
        """Delete keys and their chunks by one script, so that no header is visible without its chunks."""
        with translate_errors(f"delete from entry {entry}", self.label):
            for start in range(0, len(keys), 1000):
                self.run_script(DELETE, entry, *keys[start : start + 1000])

    def list_unfinished(self) -> Iterable[Unfinished]:
        """List chunked writes not committed, with their names; rows that no writer here made are ignored."""
        with translate_errors("list unfinished writes", self.label):
            tokens: Any = self.client.hkeys(self._writing)
        values = _RedisReading(self, WRITING, "list unfinished writes")(tokens, _WRITING_BYTES)
        writes = [_decode_unfinished(token, value) for token, value in zip(tokens, values, strict=True)]
        return [write for write in writes if write is not None]

    def discard(self, unfinished: Unfinished) -> None:
        """Free the space of an unfinished write."""
        if unfinished.name is None:
            raise UsageError(f"unfinished write {unfinished.token} is not of {self.label}: its name is not known")
        entry, key = split_name(unfinished.name)
        with translate_errors(f"discard a write of {unfinished.name}", self.label):
            self.run_script(DISCARD, entry, unfinished.token, key, bytes.fromhex(unfinished.token))

    def check(self, *, writable: bool) -> None:
        """Check that the server answers and, if `writable`, that it is not a replica and keeps what is stored.

        Raises:
            UsageError: it may evict keys, or does not accept values of `chunk_bytes`.
            Unreachable: it does not answer, or refuses the credentials.
        """
        with translate_errors("use the store", self.label):
            self.client.ping()
        if writable:
            with translate_errors("check the settings", self.label):
                self._check_settings()

    def remarks(self) -> Sequence[Remark]:
        """Report whether the server keeps data on disk, and its memory, if it provides these."""
        with translate_errors("ask for the settings", self.label):
            about: Any = self._ask(self.client.info) or {}
            saves: Any = self._ask(lambda: self.client.config_get("save"))
        found = [] if (memory := memory_remark(about)) is None else [memory]
        if saves == {"save": ""} and not about.get("aof_enabled", 1):
            found.append(Remark("it keeps nothing on disk: a restart loses all state", "set its appendonly to yes"))
        return found

    def run_script(self, script: Script, entry: str, *arguments: Any, durably: bool = False) -> Any:
        """Run a script on an entry and the writes in progress, and return its answer."""
        rest = (2, self.key_of(entry), self._writing, *arguments)
        try:
            return self._run("EVALSHA", script.sha, *rest, durably=durably)
        except refusals.NoScriptError:
            return self._run("EVAL", script.text, *rest, durably=durably)

    def put_chunks(self, entry: str, token: str, chunks: Chunks) -> bool:
        """Store chunks, in transactions that are sent without waiting in between; False if one was removed again.

        Chunks are sent by HSET, since a script would copy each twice more.
        """
        place = (2, self.key_of(entry), self._writing)
        step = min(max(1, _TRANSACTION_BYTES // self.value_limit_bytes), _TRANSACTION_CHUNKS)
        pipe = self.client.pipeline(transaction=False)
        for start in range(0, len(chunks), step):
            some = chunks[start : start + step]
            pipe.execute_command("MULTI")
            pipe.execute_command("HSET", self.key_of(entry), *chain.from_iterable(some))
            pipe.execute_command("EVAL", TAKE_BACK.text, *place, token, *(key for key, _ in some))
            pipe.execute_command("EXEC")
        answers = pipe.execute(raise_on_error=False)  # its messages would contain the command
        ends = answers[3::4]
        said = chain(answers, chain.from_iterable(end for end in ends if isinstance(end, list)))
        for error in (answer for answer in said if isinstance(answer, Exception)):
            raise error
        return all(kept for _, kept in ends)

    def _run(self, *command: Any, durably: bool) -> Any:
        """Run a command and return its answer; if `durably` and the server supports it, wait for the server's disk."""
        if not (durably and self._waits_for_disk()):
            return self.client.execute_command(*command)
        pipe = self.client.pipeline(transaction=False)  # one connection: WAITAOF waits for its own writes
        pipe.execute_command(*command)
        pipe.execute_command("WAITAOF", 1, 0, int(self._options.timeout_s * 800))
        answer, waited = pipe.execute(raise_on_error=False)  # its messages would contain the command
        for error in (answer, waited):
            if isinstance(error, Exception):
                raise error
        if waited[0] < 1:
            raise Unreachable(f"{self.label} did not bring a write to its disk in time; check its disk", transient=True)
        return answer

    def _waits_for_disk(self) -> bool:
        place = (os.getpid(), self.url)
        if place not in _waits:
            about: Any = self._ask(lambda: self.client.info("server") | self.client.info("persistence")) or {}  # type: ignore[operator]
            version = [int(part) for part in re.findall(r"\d+", str(about.get("redis_version", "")))[:2]]
            _waits[place] = version >= [7, 2] and bool(about.get("aof_enabled"))  # not provided: do not wait
        return _waits[place]

    def _check_settings(self) -> None:
        about: Any = self._ask(self.client.info) or {}
        if about.get("role") == "slave":
            raise Unreachable(f"{self.label} is a read-only replica; name the primary")
        policy = str(about.get("maxmemory_policy", ""))
        if policy.startswith("allkeys"):
            raise UsageError(
                f"{self.label} may evict keys, and with them state (maxmemory-policy {policy}): set it to noeviction"
            )
        longest: Any = (self._ask(lambda: self.client.config_get("proto-max-bulk-len")) or {}).values()
        if any(self.value_limit_bytes > int(size) for size in longest):
            raise UsageError(
                f"{self.label} does not accept values of chunk_bytes: set it to {min(map(int, longest))} or less"
            )

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Return the answer; None if a managed server does not allow the question."""
        try:
            return question()
        except refusals.AuthenticationError:
            raise
        except refusals.ResponseError as error:
            if unreachable_error(error, "ask", self.label).transient:  # it may answer a little later
                raise
            return None


def _decode_unfinished(token: bytes, value: bytes | int | None) -> Unfinished | None:
    """Decode a row of the writes in progress; None if it is not valid, or too long."""
    if not isinstance(value, bytes):
        return None
    with suppress(ValueError, OverflowError, UsageError):  # a UnicodeDecodeError is a ValueError
        text, _, name = value.decode().partition(" ")
        write_id, began = bytes.fromhex(token.decode()), datetime.fromisoformat(text)
        if len(write_id) == WRITE_ID_BYTES and write_id.hex().encode() == token and began.tzinfo is not None:
            return Unfinished(write_id.hex(), check_object_name(name), began.astimezone(UTC))
    return None


class _RedisReading:
    """`Get` of one entry: one script per call, so that values too long or not wanted are not sent."""

    def __init__(self, driver: RedisKeyValue, entry: str, what: str) -> None:
        self._driver, self._entry, self._what = driver, entry, what

    def __call__(self, keys: Keys, most: int) -> Values:
        """Return the keys' values, or the lengths of those longer than `most` bytes."""
        values: Values = []
        for start in range(0, len(keys), _SCRIPT_KEYS):
            some = keys[start : start + _SCRIPT_KEYS]
            try:
                with translate_errors(self._what, self._driver.label):
                    values += self._driver.run_script(VALUES, self._entry, most, *some)
            except Unreachable as error:
                if not isinstance(error.__cause__, refusals.NoPermissionError):
                    raise
                values += self._without_script(some, most)
        return values

    def _without_script(self, keys: Keys, most: int) -> Values:
        """Read for users who may run no script: in two steps, between which a value may change."""
        place, client = self._driver.key_of(self._entry), self._driver.client
        with translate_errors(self._what, self._driver.label):
            pipe = client.pipeline(transaction=False)
            for key in keys:
                pipe.hstrlen(place, key)
            sizes = dict(zip(keys, pipe.execute(), strict=True))
            short = [key for key in keys if sizes[key] <= most]
            found: Any = client.hmget(place, short) if short else []
        return [*map((sizes | dict(zip(short, found, strict=True))).get, keys)]

    def part(self, key: bytes, start: int, stop: int) -> tuple[int, bytes] | None:
        """Return the length of a key's value, and its bytes in [start, stop)."""
        try:
            with translate_errors(self._what, self._driver.label):
                found = self._driver.run_script(PART, self._entry, key, start, stop)
        except Unreachable as error:
            if not isinstance(error.__cause__, refusals.NoPermissionError):
                raise
            [value] = self._without_script([key], LARGEST_VALUE_BYTES)
            return (len(value), value[start:stop]) if isinstance(value, bytes) else None
        return tuple(found) if found else None


class _StagedInRedis:
    """`StagedWrite`: chunks in the entry's hash, under keys that only this write uses."""

    def __init__(self, driver: RedisKeyValue, entry: str, key: bytes, token: str) -> None:
        self._driver, self._entry, self._key, self._token = driver, entry, key, token
        self._what = f"write object {join_name(entry, key)}"

    def put(self, chunks: Chunks) -> None:
        """Store the next chunks."""
        with translate_errors(self._what, self._driver.label):
            if not self._driver.put_chunks(self._entry, self._token, chunks):
                raise self._discarded_error()

    def commit(self, header: bytes) -> bool:
        """Make header and chunks visible; False if the key is taken."""
        with translate_errors(self._what, self._driver.label):
            done = self._driver.run_script(COMMIT, self._entry, self._token, self._key, header, durably=True)
        if done < 0:
            raise self._discarded_error()
        return bool(done)

    def discard(self) -> None:
        """Delete what was staged."""
        with translate_errors(self._what, self._driver.label):
            write_id = bytes.fromhex(self._token)
            self._driver.run_script(DISCARD, self._entry, self._token, self._key, write_id)

    def _discarded_error(self) -> Unreachable:
        return Unreachable(f"cannot {self._what}: its write in {self._driver.label} was discarded; start it again")
