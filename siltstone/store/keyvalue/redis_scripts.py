"""Lua scripts that Redis runs atomically on an entry and the writes in progress; `redis` describes the keys."""

import hashlib

from siltstone.store.keyvalue.protocol import HEADER_BYTES, MAGIC, WRITE_ID_BYTES, WRITE_ID_OFFSET


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
