"""A revision of the catalog that has landed is never changed: catalogs that say they are of it have what it made."""

import hashlib

from siltstone.catalog.tables import REVISION
from siltstone.catalog.upgrade import MIGRATIONS, revisions

LANDED = {
    "r0001_first_tables.py": "2b3972483ee7b816b295dbbc91468067573ad38a2554e5b274fa0323d80e4556",
    "r0002_receipts.py": "7684128262dff55fe9ab84b501823955076a28cea3f10fe0fb0fedf85b9108ac",
    "r0003_identity.py": "4658f927f1dfd22d1c6ec8ebcf6207005e998ca0afbc15905450a630ff237910",
    "r0004_input_log_pruned.py": "6a9975801120da7281d2269a2de4f702d7549fad70d8d72f45679291af5fafbc",
    "r0005_recorded_retention.py": "1918dc6717867a5a09cc18d04c02f547f18deeb507fb8333ed4c8fd2c6a0def9",
    "r0006_lease_process.py": "ea511cb9348fc944f5fbd969f5c9b5fce2a203b8d7ba930b025f484d0e39189e",
    "r0007_definitions.py": "2eb998165acbb4e8a82c8dd877485231e4e8bda64ce197831cfbf739b54a2b83",
    "r0008_outbox.py": "1aa0a56ec33180bb06a0dba773e49485c519ce8d2c646fb5ff53748c7f767cbf",
    "r0009_checksums.py": "75f114a45fcd928def9b5cb0a6b6d31076bcd3ae4531530546e2489a4ae6bd2c",
    "r0010_deletion_passes.py": "c19d493de1fdcc8e2db0564ddb811375712c0d03c284d8b15f139ea39b72b4a7",
    "r0011_steps_in_order.py": "b9703c3bcc179f26228885a8176e5f6a8fa2b92b1ff605820cb5884893c9ebcf",
    "r0012_needed_until.py": "0635f412f2d850c08f68e4cf0d37af1ad3629f7344a2a7ae0b761f829b80ae27",
    "r0013_extracts.py": "f185e5bce8a86e1c82fadbe4dee467c0ade5b181a4857471ba43d01edb2e094b",
    "r0014_sink_tables.py": "c0e8229ec4652b80a7e6772d5a5936d11a0bb8b223ad6cd374a378ab68a45bfd",
    "r0015_replaced_at.py": "b38c2a0b0d36a7c22b68539c63e967ae9a70bdae89d0f97a3683412ec6b5632f",
    "r0016_every_step.py": "c399e4f0ed3db0bd309e3d6df911914c912df7415583fd43d1a5ac68d3d68697",
}


def test_no_revision_that_has_landed_was_edited() -> None:
    """If this fails, undo the edit and make the change by a new revision; a new one is recorded here, once."""
    files = {path.name: path.read_bytes() for path in (MIGRATIONS / "versions").glob("r*.py")}
    assert {name: hashlib.sha256(data).hexdigest() for name, data in files.items()} == LANDED


def test_there_is_one_line_of_revisions_and_the_code_is_of_its_end() -> None:
    assert revisions() == [f"{n:04d}" for n in range(1, len(LANDED) + 1)]
    assert revisions()[-1] == REVISION
