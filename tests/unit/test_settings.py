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
