"""Options of retention: lengths of time, where rules come from, and where a mistake is."""

from datetime import timedelta
from pathlib import Path

import pytest

from siltstone.errors import UsageError
from siltstone.settings import load_settings
from siltstone.times import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("15m", 900),
        ("12h", 43_200),
        ("7d", 604_800),
        ("4w", 2_419_200),
        (" 0s ", 0),
        ("007m", 420),
        ("7 d", 604_800),
        ("10 minutes", 600),
        ("1 day", 86_400),
    ],
)
def test_a_length_of_time(text: str, seconds: int) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "d",
        "7x",
        "-7d",
        "+7d",
        "1.5h",
        "7  d",
        "7d12h",
        "7 minuets",
        "7D",
        "٣d",
        "P7D",
        "9" * 30 + "w",
        7,
        7.5,
        None,
    ],
)
def test_what_is_no_length_of_time(text: object) -> None:
    with pytest.raises(
        UsageError, match="is not a length of time: write it like 90s, 15m, 12h, 7d, 4w or '15 minutes'"
    ) as refused:
        parse_duration(text)
    assert "\n" not in str(refused.value)


def test_rules_come_from_the_file_the_environment_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings(retention={}).retention.rules == {}
    Path("siltstone.toml").write_text('[retention]\nkeep_daily = 7\nkeep_last = 10\nmin_age = "1h"\n')
    monkeypatch.setenv("SILTSTONE_RETENTION__KEEP_WITHIN", "2d")
    found = load_settings(retention={"keep_last": 3}).retention
    assert found.rules == {"keep_last": 3, "keep_within": timedelta(days=2), "keep_daily": 7}
    assert (found.min_age, found.min_count) == (timedelta(hours=1), 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keep_last = -1", "option retention.keep_last: .*greater than or equal to 0"),
        ("keep_daily = 1.5", "option retention.keep_daily"),
        ("keep_within = 7", "7 is not a length of time"),
        ('min_age = "soon"', "'soon' is not a length of time"),
        ("keep_yearly = 1", "option retention.keep_yearly"),
    ],
)
def test_a_mistake_in_the_file_is_named(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("siltstone.toml").write_text(f"[retention]\n{text}\n")
    with pytest.raises(UsageError, match=said) as refused:
        load_settings()
    assert "\n" not in str(refused.value)
