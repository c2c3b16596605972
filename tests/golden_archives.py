"""Writes the warehouses in `tests/golden` anew, with today's formats: `python -m tests.golden_archives`.

Until a version is released, a change of a stored format writes them again. What a released version wrote stays.
"""

import socket
from unittest.mock import patch

from tests import golden_extras, golden_files, golden_warehouse
from tests.golden_warehouse import GOLDEN


def write_archives() -> None:
    """Write each archive."""
    golden_warehouse.write_archive(GOLDEN / "segments.tar.xz", ranged=True)
    golden_warehouse.write_archive(GOLDEN / "sections.tar.xz", ranged=False)
    golden_extras.write_archive(GOLDEN / "values.files.tar.xz", "")
    golden_extras.write_archive(GOLDEN / "values.rocksdb.tar.xz", "rocksdb://")
    golden_files.write_archive(GOLDEN / "row-files.tar.xz")


if __name__ == "__main__":
    with patch.object(socket, "gethostname", lambda: "golden"):
        write_archives()
