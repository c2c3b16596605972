"""When the parallelism changes, key groups move between the subtasks of a machine, and only the others are restored."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import Policy, PolicyOptions, policy_by_name
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.model import KeyGroupRange
from siltstone.run import working_state
from siltstone.run.task import StepTask
from siltstone.run.working_state import lock_directory
from siltstone.state.backends.named import BACKENDS
from tests.examples import usually
from tests.fault.small_stream import SMALL, purchases
from tests.proofs import failures
from tests.region_run import RegionRun

POLICY = policy_by_name("marginal-cost", PolicyOptions(d_max=3, size_ratio_max=None))
NAME = SMALL.name
OPERATORS = [operator.name for operator in SMALL.operators]
FILES = purchases()


class Counting(RegionRun):
    """Counts what its subtasks read of the store to restore their state."""

    restored_bytes = 0

    def attempt(self, task: StepTask, rows: Mapping[int, pa.Table]) -> tuple[pa.Table, Sequence[Acknowledgement]]:
        done = super().attempt(task, rows)
        self.restored_bytes += sum(a.restored_bytes for a in done[1])
        return done


def run_on(
    place: OpenWarehouse, parallelism: int, files: int, *, backend: str = "heap", policy: Policy = POLICY
) -> Counting:
    """Go on with the next `files` files, a checkpoint for each, and end the run."""
    run = Counting(place, SMALL, policy, parallelism=parallelism, backend=backend)
    for _ in range(files):
        run.step(FILES[run.batches])
    run.region.close("done")
    return run


def die_ahead(place: OpenWarehouse, parallelism: int, backend: str = "heap") -> None:
    """A run that dies after a step which is in no checkpoint."""
    run = RegionRun(place, SMALL, POLICY, parallelism=parallelism, checkpoint_steps=5, backend=backend)
    run.step(FILES[run.batches])


def places(place: OpenWarehouse, epoch: int, operator: str = "accounts") -> list[Path]:
    """The working state of an epoch's subtasks on this machine."""
    one = place.warehouse.local.state(NAME, epoch, operator, 0)
    return sorted(path for path in one.parent.glob("*") if path.is_dir() and path.name.isdigit())


def digest_of(tmp_path: Path, files: int) -> str | None:
    with OpenWarehouse.open_writable(str(tmp_path / "undisturbed")) as place:
        return run_on(place, 2, files).region.digest


@pytest.mark.parametrize(
    ("before", "after", "backend"),
    usually([(*of, backend) for of in [(2, 3), (4, 1)] for backend in BACKENDS], (2, 3, "heap"), (4, 1, "rocksdb")),
)
def test_no_key_group_of_this_machine_is_read_from_the_store(
    tmp_path: Path, before: int, after: int, backend: str
) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run_on(place, before, 5, backend=backend)
        run = run_on(place, after, 2, backend=backend)
        assert run.restored_bytes == 0 and run.region.digest == digest_of(tmp_path, 7)
        assert not failures(place, NAME)
        again = run_on(place, after, 1, backend=backend)
        assert again.restored_bytes == 0


def test_key_groups_that_are_not_on_this_machine_are_the_only_ones_that_are_read(tmp_path: Path) -> None:
    found, undisturbed = dict[int, int](), digest_of(tmp_path, 7)
    for lost in (0, 1, 2):
        with OpenWarehouse.open_writable(str(tmp_path / f"{lost}")) as place:
            epoch = run_on(place, 2, 5).region.epoch
            for operator in OPERATORS:
                for directory in places(place, epoch, operator)[:lost]:
                    shutil.rmtree(directory)
            run = run_on(place, 3, 2)
            found[lost] = run.restored_bytes
            assert run.region.digest == undisturbed and not failures(place, NAME)
    assert 0 == found[0] < found[1] < 0.8 * found[2]


def test_state_that_is_ahead_is_rolled_back_first(tmp_path: Path) -> None:
    """The run before died after a step that is in no checkpoint; it comes again, with other subtasks."""
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run_on(place, 2, 4)
        die_ahead(place, 2)
        run = run_on(place, 3, 3)
        assert run.restored_bytes == 0 and run.region.digest == digest_of(tmp_path, 7)
        assert not failures(place, NAME)


@pytest.mark.parametrize("backend", BACKENDS)
def test_damaged_state_of_this_machine_is_not_used(tmp_path: Path, backend: str) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        epoch = run_on(place, 2, 5, backend=backend).region.epoch
        flipped = 0
        for operator in OPERATORS:
            for directory in places(place, epoch, operator):
                for path in directory.rglob("*"):
                    if path.name in ("rows", "bytes") or path.suffix == ".sst":
                        data = bytearray(path.read_bytes())
                        half = len(data) // 2
                        data[:half] = bytes(255 - byte for byte in data[:half])
                        path.write_bytes(bytes(data))
                        flipped += 1
        assert flipped
        run = run_on(place, 3, 2, backend=backend)
        assert run.restored_bytes and run.region.digest == digest_of(tmp_path, 7)
        assert not failures(place, NAME)


@pytest.mark.parametrize("damage", ["offsets", "undo"])
def test_damage_that_no_check_of_the_backend_finds_is_not_fatal(tmp_path: Path, damage: str) -> None:
    """Offsets that lead anywhere, which Arrow refuses; a directory whose removal was killed half way."""
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        epoch = run_on(place, 2, 4).region.epoch
        if damage == "undo":
            for directory in places(place, epoch):
                shutil.rmtree(directory / "undo")
        else:
            for path in places(place, epoch)[0].rglob("offsets"):
                path.write_bytes(bytes(255 - byte for byte in path.read_bytes()))
        run = run_on(place, 3, 2)
        assert run.restored_bytes and run.region.digest == digest_of(tmp_path, 6) and not failures(place, NAME)


def test_a_directory_whose_removal_was_killed_is_restored_at_the_same_parallelism(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        for directory in places(place, run_on(place, 2, 4).region.epoch):
            shutil.rmtree(directory / "undo")
        run = run_on(place, 2, 1)
        assert run.restored_bytes and run.region.digest == digest_of(tmp_path, 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_back_to_the_parallelism_before_a_run_that_died_nothing_is_read(tmp_path: Path, backend: str) -> None:
    """Its working state has other key groups; the state before it fits."""
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run_on(place, 2, 4, backend=backend)
        die_ahead(place, 3, backend)
        run = run_on(place, 2, 2, backend=backend)
        assert run.restored_bytes == 0 and run.region.digest == digest_of(tmp_path, 6)
        assert not failures(place, NAME)


def test_files_of_rocksdb_are_not_fetched_either(tmp_path: Path) -> None:
    """Also where a subtask has the key groups that one had before: of 16, the first has 4 at 4 subtasks and at 5."""
    files = policy_by_name("files", PolicyOptions())
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run_on(place, 4, 4, backend="rocksdb", policy=files)
        run = run_on(place, 5, 2, backend="rocksdb", policy=files)
        assert run.restored_bytes == 0 and run.region.digest == digest_of(tmp_path, 6)
        assert not failures(place, NAME)


def test_a_process_that_hangs_on_to_state_costs_one_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits are added up, not timed: each operator has one of `FORMER_WAIT_S` for its four former subtasks."""
    waited_s = list[float]()

    @contextmanager
    def counted(directory: Path, wait_s: float) -> Iterator[None]:
        try:
            with lock_directory(directory, wait_s):
                yield
        except TimeoutError:
            waited_s.append(wait_s)
            raise

    monkeypatch.setattr(working_state, "FORMER_WAIT_S", 0.5)
    monkeypatch.setattr(working_state, "lock_directory", counted)
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place, ExitStack() as hung:
        epoch = run_on(place, 4, 4).region.epoch
        for operator in OPERATORS:
            for directory in places(place, epoch, operator):
                hung.enter_context(lock_directory(directory, 0))
        run = run_on(place, 1, 1)
        assert len(waited_s) == 4 * len(OPERATORS) and 0 < sum(waited_s) <= 0.5 * len(OPERATORS)
        assert run.restored_bytes and run.region.digest == digest_of(tmp_path, 5)


def test_a_rescale_that_died_is_begun_anew(tmp_path: Path) -> None:
    """What it had moved is of no checkpoint; the state that it moved from is still there."""
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run_on(place, 2, 4)
        die_ahead(place, 3)
        run = run_on(place, 3, 2)
        back = run_on(place, 2, 1)
        assert run.restored_bytes == back.restored_bytes == 0 and back.region.digest == digest_of(tmp_path, 7)
        assert not failures(place, NAME)


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 3), st.booleans(), st.sets(st.integers(0, 5))),
        min_size=2,
        max_size=5,
    )
)
def test_however_often_it_is_rescaled_the_state_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[int, int, bool, set[int]]]
) -> None:
    root = tmp_path_factory.mktemp("moved")
    with OpenWarehouse.open_writable(str(root / "w")) as place:
        taken = 0
        for parallelism, files, dies, lost in runs:
            run = run_on(place, parallelism, files)
            taken += files
            if dies:
                die_ahead(place, parallelism)
            for operator in OPERATORS:
                for number, directory in enumerate(places(place, run.region.epoch, operator)):
                    if number in lost:
                        shutil.rmtree(directory)
        last = run_on(place, 2, 1)
        assert last.region.digest == digest_of(root, taken + 1) and not failures(place, NAME)


def test_what_is_left_of_a_range() -> None:
    whole = KeyGroupRange(4, 8)
    assert whole.without(KeyGroupRange(5, 6)) == [KeyGroupRange(4, 5), KeyGroupRange(6, 8)]
    assert whole.without(KeyGroupRange(0, 6)) == [KeyGroupRange(6, 8)]
    assert whole.without(KeyGroupRange(6, 9)) == [KeyGroupRange(4, 6)]
    assert whole.without(whole) == [] and whole.without(KeyGroupRange(8, 9)) == [whole] == whole.without(
        KeyGroupRange(0, 4)
    )
