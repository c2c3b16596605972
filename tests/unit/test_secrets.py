"""Where secrets may stand, and where none is shown."""

import logging
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog.database import engine
from siltstone.errors import UsageError
from siltstone.run.definition import check_definition, definition_of, recorded_options
from siltstone.secret import Secret, hide
from siltstone.settings import given_settings, load_settings
from siltstone.store.url import has_password, redact_url
from siltstone.stream import Stream
from tests.fault.small_stream import SMALL

PLANTED = "pl4nted"


def with_options(**options: Any) -> Stream:
    return Stream("told", SMALL.source, SMALL.operators, options=options)


def test_a_secret_option_is_neither_recorded_nor_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = with_options(servers="one", password=Secret("MY_PASSWORD"))
    monkeypatch.setenv("MY_PASSWORD", PLANTED)
    first = definition_of(stream, {})
    assert PLANTED not in str(first) and first["options"] == {"servers": "one"}
    monkeypatch.setenv("MY_PASSWORD", "rotated")
    check_definition("told", first, definition_of(stream, {}))
    with pytest.raises(UsageError, match="was started with other values of the source options") as caught:
        check_definition("told", first, definition_of(stream, {"servers": "two"}))
    assert "password" not in str(caught.value)


def test_an_option_that_was_recorded_in_clear_may_become_secret() -> None:
    recorded = definition_of(with_options(servers="one", password=PLANTED), {})
    stream = with_options(servers="one", password=Secret("MY_PASSWORD"))
    check_definition("told", recorded, definition_of(stream, recorded_options(stream, recorded)))
    changed = with_options(servers="two", password=Secret("MY_PASSWORD"))
    with pytest.raises(UsageError, match="source options") as caught:
        check_definition("told", recorded, definition_of(changed, {}))
    assert PLANTED not in str(caught.value)


def test_a_secret_option_is_given_nowhere_else() -> None:
    with pytest.raises(UsageError, match="is secret: set it only by MY_PASSWORD") as caught:
        definition_of(with_options(password=Secret("MY_PASSWORD")), {"password": PLANTED})
    assert PLANTED not in str(caught.value)


def test_a_secret_is_read_from_a_variable_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = Secret("MY_PASSWORD")
    with pytest.raises(UsageError, match="set MY_PASSWORD, or MY_PASSWORD_FILE"):
        secret.read()
    monkeypatch.setenv("MY_PASSWORD_FILE", str(tmp_path / "password"))
    with pytest.raises(UsageError, match="which MY_PASSWORD_FILE names: No such file"):
        secret.read()
    (tmp_path / "password").write_text(f"{PLANTED}\n")
    assert secret.read() == PLANTED
    monkeypatch.setenv("MY_PASSWORD", "first")
    assert secret.read() == "first"


def test_settings_that_may_be_secret_come_from_files_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("WAREHOUSE", "CATALOG", "ALERTS__WEBHOOK", "UI__STORAGE", "UI__TOKEN")
    for name in names:
        (tmp_path / name).write_text(f"{PLANTED}-{name}\n")
        monkeypatch.setenv(f"SILTSTONE_{name}_FILE", str(tmp_path / name))
    settings = load_settings()
    found = (settings.warehouse, settings.catalog, settings.alerts.webhook, settings.ui.storage, settings.ui.token)
    assert found == tuple(f"{PLANTED}-{name}" for name in names)
    assert PLANTED not in repr(settings)
    assert load_settings(catalog="given").catalog == "given"
    (tmp_path / "CATALOG").unlink()
    with pytest.raises(UsageError, match=r"cannot read .*CATALOG, which SILTSTONE_CATALOG_FILE names"):
        load_settings()


@pytest.mark.parametrize("option", ["warehouse", "catalog"])
def test_a_password_in_an_argument_is_warned_of(option: str, caplog: pytest.LogCaptureFixture) -> None:
    given = {"warehouse": None, "catalog": None}
    with caplog.at_level(logging.WARNING):
        given_settings(**given | {option: "redis://user@host/0"})
        given_settings(**given | {option: "redis://user@host/0?password_variable=MINE"})
        assert "\n".join(caplog.messages) == ""
        given_settings(**given | {option: f"redis://user:{PLANTED}@host/0"})
    assert f"SILTSTONE_{option.upper()}_FILE" in "\n".join(caplog.messages) and PLANTED not in "\n".join(
        caplog.messages
    )


HOSTILE = [
    f"{PLANTED}{mark}{PLANTED}" for mark in ("", "@", ":", "/", "#", "?", "%40", "[", "]", "@:", "/@", "?@#", " ")
]


@pytest.mark.parametrize("password", HOSTILE)
@pytest.mark.parametrize("scheme", ["redis", "rediss", "cassandra", "s3", "postgresql", "postgresql+psycopg"])
def test_no_part_of_a_password_is_shown_whatever_is_in_it(scheme: str, password: str) -> None:
    for url in (f"{scheme}://user:{password}@host:1/0", f"{scheme}://:{password}@host/0?a=b"):
        told = []
        for show in (redact_url, lambda url: engine.redacted_url(engine.parse_url(url))):
            try:
                told.append(show(url))
            except UsageError as error:
                told.append(str(error))
        assert not any(PLANTED in each for each in told), told
        assert has_password(url)


def test_no_secret_in_the_query_of_a_database_is_shown() -> None:
    for name in ("password", "sslpassword", "sslkey", "passfile", "oauth_client_secret"):
        assert PLANTED not in engine.redacted_url(engine.parse_url(f"postgresql://user@host/d?{name}={PLANTED}"))


def test_what_a_source_fails_with_is_told_without_its_secrets() -> None:
    assert hide(f"no login with {PLANTED}@ as {PLANTED}", [PLANTED, f"{PLANTED}@", ""]) == "no login with *** as ***"
