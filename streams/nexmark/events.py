"""NEXMark's events: people, auctions and bids of an online auction house, made from their numbers alone.

The numbers and proportions are those of Apache Beam's generator (`GeneratorConfig` and `model` of its NEXMark suite,
after Tucker et al., "NEXMark: a benchmark for queries over data streams", 2002): of 50 events in a row, one is a new
person, three are new auctions, and 46 are bids. Half of the bids are on one hot auction of each hundred, three quarters
are by one hot bidder of each hundred people. The columns `channel` and `url` are those of the Flink version.

The n-th event of a kind is computed from n and the fields of `Events` alone. So it is the same in each run, and at any
parallelism.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

TIME = pa.timestamp("us", "UTC")
PERSON = pa.schema(
    {
        "id": pa.int64(),
        "name": pa.string(),
        "email": pa.string(),
        "credit_card": pa.string(),
        "city": pa.string(),
        "state": pa.string(),
        "date_time": TIME,
        "extra": pa.string(),
    }
)
AUCTION = pa.schema(
    {
        "id": pa.int64(),
        "item": pa.string(),
        "description": pa.string(),
        "initial_bid": pa.int64(),
        "reserve": pa.int64(),
        "date_time": TIME,
        "expires": TIME,
        "seller": pa.int64(),
        "category": pa.int64(),
        "extra": pa.string(),
    }
)
BID = pa.schema(
    {
        "auction": pa.int64(),
        "bidder": pa.int64(),
        "price": pa.int64(),
        "channel": pa.string(),
        "url": pa.string(),
        "date_time": TIME,
        "extra": pa.string(),
    }
)
SIDE = pa.schema({"slot": pa.int64(), "value": pa.string(), "version": pa.int64()})
KINDS = {"persons": PERSON, "auctions": AUCTION, "bids": BID, "side": SIDE}
PER_EPOCH = {"persons": 1, "auctions": 3, "bids": 46}
"""how many events of each kind are among 50 in a row, in this order"""
EPOCH = sum(PER_EPOCH.values())

SLOTS = 10_000
"""rows of the table that bids are joined with"""

FIRST_ID, FIRST_CATEGORY, CATEGORIES = 1000, 10, 5
_BEGIN_US = 1_735_689_600_000_000
"""2025-01-01"""
_HOT_AUCTIONS, _HOT_SELLERS, _HOT_BIDDERS = 2, 4, 4
"""one event in this number names an ordinary auction, seller or bidder; the others name a hot one"""
_HUNDRED = 100
"""every hundredth auction and person is hot"""
_ACTIVE_PEOPLE, _IN_FLIGHT_AUCTIONS, _LEAD = 1000, 100, 10
"""people and auctions that bids and new auctions choose from, and how many ids ahead: these come a little later"""
_STRIDE = 953
"""by which events are put out of order, as in Beam's generator; prime"""
_TEXT_BYTES = 1 << 16
_CITIES = (
    "Phoenix",
    "Los Angeles",
    "San Francisco",
    "Boise",
    "Portland",
    "Bend",
    "Redmond",
    "Seattle",
    "Kent",
    "Cheyenne",
)
_STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
_FIRST_NAMES = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter")
_LAST_NAMES = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")
_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
_OTHER_CHANNELS = 10_000


@dataclass(frozen=True)
class Events:
    """The events of one seed.

    Args:
        seed: of all that is random.
        rate: events per second of event time.
        out_of_order: among how many events in a row the order is changed, within each kind; at least 50.
    """

    seed: int = 0
    rate: int = 10_000
    out_of_order: int = 1000

    def make(self, kind: str, places: np.ndarray) -> pa.Table:
        """Return the events of a kind at these places (int64[n], from 0) of its sequence.

        Args:
            kind: "persons", "auctions" or "bids"; or "side", the rows of a table, again and again.
        """
        if kind == "side":
            return pa.table(self._side(places % SLOTS), schema=SIDE)
        size = self.out_of_order // EPOCH * PER_EPOCH[kind]
        number = places // size * size + places * _STRIDE % size
        make = {"persons": self._persons, "auctions": self._auctions, "bids": self._bids}[kind]
        return pa.table(make(number), schema=KINDS[kind])

    def times(self, kind: str, number: np.ndarray) -> np.ndarray:
        """Return when events were made, in microseconds since 1970 (int64[n])."""
        return _BEGIN_US + _event_number(kind, number) * 1_000_000 // self.rate

    def _random(self, kind: str, number: np.ndarray, column: str) -> np.ndarray:
        """Return random numbers (uint64[n]) that depend on what is given, and on the seed."""
        salt = hashlib.blake2b(f"{self.seed}/{kind}/{column}".encode(), digest_size=8).digest()
        return _mix(number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ np.frombuffer(salt, np.uint64))

    def _below(self, kind: str, number: np.ndarray, column: str, bound: "np.ndarray | int") -> np.ndarray:
        return (self._random(kind, number, column) % np.asarray(bound, np.uint64)).astype(np.int64)

    def _persons(self, number: np.ndarray) -> dict[str, pa.Array]:
        first = _choose(_FIRST_NAMES, self._below("persons", number, "first", len(_FIRST_NAMES)))
        last = _choose(_LAST_NAMES, self._below("persons", number, "last", len(_LAST_NAMES)))
        card = np.char.zfill((self._random("persons", number, "card") % np.uint64(10**16)).astype("U16"), 16)
        words = self._text("persons", number, "email", 7, 14)
        return {
            "id": pa.array(FIRST_ID + number),
            "name": pa.array(np.char.add(np.char.add(first, " "), last)),
            "email": _concat(words, pa.scalar("@"), self._text("persons", number, "host", 5, 10), pa.scalar(".com")),
            "credit_card": pa.array(card),
            "city": pa.array(_choose(_CITIES, self._below("persons", number, "city", len(_CITIES)))),
            "state": pa.array(_choose(_STATES, self._below("persons", number, "state", len(_STATES)))),
            "date_time": pa.array(self.times("persons", number), TIME),
            "extra": self._text("persons", number, "extra", 80, 120),
        }

    def _auctions(self, number: np.ndarray) -> dict[str, pa.Array]:
        at, initial = self.times("auctions", number), self._price("auctions", number, "initial")
        horizon_us = _IN_FLIGHT_AUCTIONS * EPOCH * 1_000_000 // (PER_EPOCH["auctions"] * self.rate)
        lasts = 1 + self._below("auctions", number, "lasts", max(1, 2 * horizon_us))
        return {
            "id": pa.array(FIRST_ID + number),
            "item": self._text("auctions", number, "item", 10, 20),
            "description": self._text("auctions", number, "description", 60, 100),
            "initial_bid": pa.array(initial),
            "reserve": pa.array(initial + self._price("auctions", number, "reserve")),
            "date_time": pa.array(at, TIME),
            "expires": pa.array(at + lasts, TIME),
            "seller": pa.array(self._person("auctions", number, _HOT_SELLERS, 0)),
            "category": pa.array(FIRST_CATEGORY + self._below("auctions", number, "category", CATEGORIES)),
            "extra": self._text("auctions", number, "extra", 240, 360),
        }

    def _bids(self, number: np.ndarray) -> dict[str, pa.Array]:
        newest = np.maximum(0, number // PER_EPOCH["bids"] * PER_EPOCH["auctions"] + PER_EPOCH["auctions"] - 1)
        oldest = np.maximum(0, newest - _IN_FLIGHT_AUCTIONS)
        any_auction = oldest + self._below("bids", number, "auction", newest - oldest + 1 + _LEAD)
        hot = self._below("bids", number, "is hot auction", _HOT_AUCTIONS) > 0
        channel = self._below("bids", number, "channel", 2 * len(_CHANNELS))
        other = self._below("bids", number, "other channel", _OTHER_CHANNELS)
        names = np.where(
            channel < len(_CHANNELS), _choose(_CHANNELS, channel % len(_CHANNELS)), _label("channel-", other)
        )
        directories = [self._text("bids", number, f"directory {n}", 3, 5) for n in range(3)]
        return {
            "auction": pa.array(FIRST_ID + np.where(hot, newest // _HUNDRED * _HUNDRED, any_auction)),
            "bidder": pa.array(self._person("bids", number, _HOT_BIDDERS, 1)),
            "price": pa.array(self._price("bids", number, "price")),
            "channel": pa.array(names),
            "url": _concat(
                pa.scalar("https://www.nexmark.com/"),
                *(part for name in directories for part in (name, pa.scalar("/"))),
                pa.scalar("item.htm?query=1&channel_id="),
                pa.array(other.astype("U5")),
            ),
            "date_time": pa.array(self.times("bids", number), TIME),
            "extra": self._text("bids", number, "extra", 30, 50),
        }

    def _side(self, slot: np.ndarray) -> dict[str, pa.Array]:
        return {
            "slot": pa.array(slot),
            "value": self._text("side", slot, "value", 8, 12),
            "version": pa.array(np.zeros(len(slot), np.int64)),
        }

    def _person(self, kind: str, number: np.ndarray, hot: int, offset: int) -> np.ndarray:
        """Return the ids of people that sell or bid when an event is made."""
        newest = number // PER_EPOCH[kind]
        active = np.minimum(newest + 1, _ACTIVE_PEOPLE)
        someone = newest + 1 - active + self._below(kind, number, "person", active + _LEAD)
        is_hot = self._below(kind, number, "is hot person", hot) > 0
        return FIRST_ID + np.where(is_hot, newest // _HUNDRED * _HUNDRED + offset, someone)

    def _price(self, kind: str, number: np.ndarray, column: str) -> np.ndarray:
        """Return prices in cents: their logarithms are evenly spread from 1 to a million dollars."""
        part = (self._random(kind, number, column) >> np.uint64(11)).astype(np.float64) / (1 << 53)
        return np.rint(10.0 ** (part * 6) * 100).astype(np.int64)

    def _text(self, kind: str, number: np.ndarray, column: str, least: int, most: int) -> pa.Array:
        """Return pieces of `least` to `most` letters, of a text that is random but always the same."""
        lengths = least + self._below(kind, number, f"{column} length", most - least + 1)
        begins = self._below(kind, number, f"{column} begin", _TEXT_BYTES - most)
        ends = np.concatenate(([0], np.cumsum(lengths)))
        places = np.arange(ends[-1]) + np.repeat(begins - ends[:-1], lengths)
        return pa.StringArray.from_buffers(
            len(number), pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(_TEXT[places])
        )


def _event_number(kind: str, number: np.ndarray) -> np.ndarray:
    """Return which event of all kinds the n-th of one kind is."""
    kinds = list(PER_EPOCH)
    before, each = sum(PER_EPOCH[k] for k in kinds[: kinds.index(kind)]), PER_EPOCH[kind]
    return number // each * EPOCH + before + number % each


def _mix(values: np.ndarray) -> np.ndarray:
    """Spread the bits of 64-bit numbers (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_TEXT = (ord("a") + _mix(np.arange(_TEXT_BYTES, dtype=np.uint64)) % np.uint64(26)).astype(np.uint8)


def _choose(names: tuple[str, ...], places: np.ndarray) -> np.ndarray:
    return np.array(names)[places]


def _label(prefix: str, numbers: np.ndarray) -> np.ndarray:
    return np.char.add(prefix, numbers.astype("U5"))


def _concat(*parts: "pa.Array | pa.Scalar") -> pa.Array:
    return pc.binary_join_element_wise(*parts, "")  # pyright: ignore[reportAttributeAccessIssue]
