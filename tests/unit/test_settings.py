"""Settings: where a mistake is, in one line."""

from pathlib import Path

import pytest

from siltstone.errors import UsageError
from siltstone.settings import load_settings


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("SILTSTONE_STREAMS", "flights", r'environment: .*"streams".*write lists and tables as JSON'),
        ("SILTSTONE_PARALLELISM", "0", "option parallelism"),
        ("SILTSTONE_POLICY_OPTIONS__D0", "-1", "option policy_options.d0: Input should be greater than or equal to 0"),
    ],
)
def test_a_mistake_in_the_environment_is_named(
    variable: str, value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=said) as refused:
        load_settings()
    assert "\n" not in str(refused.value)


def test_what_is_named_first_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("siltstone.toml").write_text('policy = "adjust-d"\nparallelism = 2\nmaster = "local[1]"\n')
    monkeypatch.setenv("SILTSTONE_PARALLELISM", "3")
    monkeypatch.setenv("SILTSTONE_MASTER", "local[2]")
    found = load_settings(master="local[4]", parallelism=None)
    assert (found.master, found.parallelism, found.policy) == ("local[4]", 3, "adjust-d")


def test_a_configuration_elsewhere_is_named_by_a_variable_and_its_paths_are_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    (project / "other.toml").write_text(
        'streams = ["./streams", "one.py", "installed.module"]\nwarehouse = "w?checksums=xxh3-128"\n'
        'catalog = "sqlite:///c.db"\nopenmetrics = "{stream}.txt"\n'
    )
    monkeypatch.chdir(elsewhere)
    (elsewhere / "siltstone.toml").write_text("parallelism = 3\n")
    monkeypatch.setenv("SILTSTONE_CONFIG", "../project/other.toml")
    found = load_settings()
    assert [Path(each).resolve() for each in found.streams[:2]] == [project / "streams", project / "one.py"]
    assert found.streams[2] == "installed.module"
    assert Path(found.warehouse).resolve() == project / "w?checksums=xxh3-128"
    assert found.catalog is not None and Path(found.catalog.removeprefix("sqlite:///")).resolve() == project / "c.db"
    assert found.openmetrics is not None and found.openmetrics.resolve() == project / "{stream}.txt"
    assert found.parallelism is None
    monkeypatch.setenv("SILTSTONE_WAREHOUSE", "here")
    assert load_settings().warehouse == "here"
    (project / "other.toml").write_text('warehouse = "s3://bucket/w"\ncatalog = "postgresql://db/c"\n')
    monkeypatch.delenv("SILTSTONE_WAREHOUSE")
    assert (load_settings().warehouse, load_settings().catalog) == ("s3://bucket/w", "postgresql://db/c")


def test_a_configuration_that_is_named_and_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SILTSTONE_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match=r"none.toml cannot be read: No such file or directory; see SILTSTONE_CONFIG"):
        load_settings()
