"""Revisions of the catalog: one line, whose first makes today's tables until a version is released."""

from siltstone.catalog.database.tables import REVISION
from siltstone.catalog.database.upgrade import MIGRATIONS, revisions


def test_there_is_one_line_of_revisions_and_the_code_is_of_its_end() -> None:
    files = sorted(path.name[1:5] for path in (MIGRATIONS / "versions").glob("r*.py"))
    assert revisions() == files == [f"{n:04d}" for n in range(1, len(files) + 1)]
    assert revisions()[-1] == REVISION


def test_once_there_is_a_second_revision_the_first_is_written_out() -> None:
    """Else a new catalog would have from the first what the second adds, and an older one would have it twice."""
    [first] = (MIGRATIONS / "versions").glob("r0001_*.py")
    assert len(revisions()) == 1 or "METADATA" not in first.read_text()
