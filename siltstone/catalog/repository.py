"""The catalog: what exists and who refers to it, one class per noun."""

from datetime import datetime
from types import TracebackType
from typing import Self

from siltstone.catalog.chains import Chains
from siltstone.catalog.checkpoints import Checkpoints
from siltstone.catalog.commits import Commits
from siltstone.catalog.definitions import Definitions
from siltstone.catalog.deletions import Deletions
from siltstone.catalog.edits import Edits
from siltstone.catalog.forks import Forks
from siltstone.catalog.input_log import InputLog
from siltstone.catalog.leases import Leases
from siltstone.catalog.materializations import Materializations
from siltstone.catalog.objects import Objects
from siltstone.catalog.outbox import Outbox
from siltstone.catalog.passes import Passes
from siltstone.catalog.recorded_identity import RecordedIdentity
from siltstone.catalog.reference_copies import ReferenceCopies
from siltstone.catalog.references import References
from siltstone.catalog.rollbacks import Rollbacks
from siltstone.catalog.runs import Runs
from siltstone.catalog.savepoints import Savepoints
from siltstone.catalog.streams import Streams
from siltstone.catalog.tombstones import Tombstones
from siltstone.catalog.transactions import Transactions


class Catalog:
    """What exists and who refers to it. Close it, or use it in a `with` block. Safe for use by many threads.

    Each method of each part is one transaction. Writes that belong to a run are guarded by its writer epoch
    (`fencing`). Any method may raise Unreachable, and UnknownStream if it takes a stream's name.
    """

    def __init__(self, transactions: Transactions) -> None:
        self.transactions = transactions
        self.url = transactions.url
        """where the catalog is, without its password"""
        self.identity = RecordedIdentity(transactions)
        """which warehouse it is of"""
        self.streams = Streams(transactions)
        self.runs = Runs(transactions)
        """who wrote to a stream under which writer epoch"""
        self.definitions = Definitions(transactions)
        """what checkpoints were made under"""
        self.commits = Commits(transactions)
        """what makes checkpoints exist"""
        self.checkpoints = Checkpoints(transactions)
        self.chains = Chains(transactions)
        """what a restore of a checkpoint reads"""
        self.materializations = Materializations(transactions)
        self.objects = Objects(transactions)
        """what checkpoints refer to in the store"""
        self.references = References(transactions)
        """whether an object is referred to, by any stream"""
        self.reference_copies = ReferenceCopies(transactions)
        """live state copied in full, to compare a restore with"""
        self.edits = Edits(transactions)
        """what people changed in the state by hand"""
        self.input_log = InputLog(transactions)
        """where sources begin, and what was read of them since"""
        self.outbox = Outbox(transactions)
        """outputs of checkpoints, and whether sinks have them"""
        self.savepoints = Savepoints(transactions)
        self.leases = Leases(transactions)
        """who is at work on checkpoints"""
        self.deletions = Deletions(transactions)
        """checkpoints that are being deleted"""
        self.tombstones = Tombstones(transactions)
        """what was deleted from the store"""
        self.passes = Passes(transactions)
        """what each deletion took away"""
        self.rollbacks = Rollbacks(transactions)
        """checkpoints that were given up"""
        self.forks = Forks(transactions)
        """streams that began as a checkpoint of another"""

    def now(self) -> datetime:
        """The time it goes by, UTC: the database's own, so that all hosts that use it go by the same.

        Raises:
            Unreachable
        """
        return self.transactions.now()

    def close(self) -> None:
        """Close all connections; idempotent."""
        self.transactions.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
