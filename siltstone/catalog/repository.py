"""The catalog records what exists and who refers to it, with one class per noun."""

from datetime import datetime
from types import TracebackType
from typing import Self

from siltstone.catalog.database.transactions import Transactions
from siltstone.catalog.recorded_identity import RecordedIdentity
from siltstone.catalog.records.chains import Chains
from siltstone.catalog.records.checkpoints import Checkpoints
from siltstone.catalog.records.commits import Commits
from siltstone.catalog.records.definitions import Definitions
from siltstone.catalog.records.deletions import Deletions
from siltstone.catalog.records.edits import Edits
from siltstone.catalog.records.extracts import Extracts
from siltstone.catalog.records.forks import Forks
from siltstone.catalog.records.imports import Imports
from siltstone.catalog.records.input_log import InputLog
from siltstone.catalog.records.leases import Leases
from siltstone.catalog.records.materializations import Materializations
from siltstone.catalog.records.objects import Objects
from siltstone.catalog.records.outbox import OutboxRecords
from siltstone.catalog.records.passes import Passes
from siltstone.catalog.records.reference_copies import ReferenceCopies
from siltstone.catalog.records.references import References
from siltstone.catalog.records.rollbacks import Rollbacks
from siltstone.catalog.records.runs import Runs
from siltstone.catalog.records.savepoints import Savepoints
from siltstone.catalog.records.streams import Streams
from siltstone.catalog.records.tombstones import Tombstones


class Catalog:
    """An open catalog. Close it, or use it in a `with` block. Safe for use by many threads.

    Each method of each part is one transaction. Writes that belong to a run are guarded by its writer epoch
    (`fencing`). Any method may raise Unreachable, and UnknownStream if it takes a stream's name.
    """

    def __init__(self, transactions: Transactions) -> None:
        self.transactions = transactions
        self.url = transactions.url
        """where the catalog is, without its password"""
        self.identity = RecordedIdentity(transactions)
        """the identity of its warehouse"""
        self.streams = Streams(transactions)
        self.runs = Runs(transactions)
        """who wrote to a stream under which writer epoch"""
        self.definitions = Definitions(transactions)
        """the definitions under which checkpoints were made"""
        self.commits = Commits(transactions)
        """make checkpoints exist"""
        self.checkpoints = Checkpoints(transactions)
        self.chains = Chains(transactions)
        """what a restore of a checkpoint reads"""
        self.materializations = Materializations(transactions)
        self.objects = Objects(transactions)
        """the stored objects that checkpoints refer to"""
        self.references = References(transactions)
        """whether any stream refers to an object"""
        self.reference_copies = ReferenceCopies(transactions)
        """full copies of live state, to compare with a restore"""
        self.edits = Edits(transactions)
        """changes that people made to the state by hand"""
        self.input_log = InputLog(transactions)
        """where sources begin, and what each step has read"""
        self.outbox = OutboxRecords(transactions)
        """outputs of checkpoints, and whether sinks have them"""
        self.savepoints = Savepoints(transactions)
        self.leases = Leases(transactions)
        """who is working on checkpoints"""
        self.deletions = Deletions(transactions)
        """checkpoints that are being deleted"""
        self.tombstones = Tombstones(transactions)
        """objects that were deleted from the store"""
        self.passes = Passes(transactions)
        """what each deletion removed"""
        self.rollbacks = Rollbacks(transactions)
        """checkpoints that were given up"""
        self.forks = Forks(transactions)
        """streams that began at a checkpoint of another"""
        self.imports = Imports(transactions)
        """streams that began with a savepoint of another warehouse"""
        self.extracts = Extracts(transactions)
        """what the store holds of the catalog, besides manifests"""

    def now(self) -> datetime:
        """Return the current time, UTC: the database's own, so that all its clients use the same.

        Raises:
            Unreachable: the database does not answer.
        """
        return self.transactions.now()

    def close(self) -> None:
        """Close all connections; idempotent."""
        self.transactions.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
