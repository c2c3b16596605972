"""Every option, its default, its unit. From the command line, `SILTSTONE_*` in the environment, then `siltstone.toml`.

The first of these that names an option wins. Options that may be secret (`SECRETS`) can also come from a file, whose
path is in the variable with `_FILE` appended: `SILTSTONE_CATALOG_FILE`. `siltstone.toml` is the file in the working
directory, or the one that `SILTSTONE_CONFIG` names; relative paths in the latter begin at its own directory. It uses
the names of the fields below:

    streams = ["./streams"]
    warehouse = "./warehouse"
    policy = "marginal-cost"
    [policy_options]
    restore_budget_s = 60
    [upload]
    hedging = false
    [materialization]
    interval_s = 300
    [retention]
    keep_daily = 7
    [recovery]
    automatic = false
    [ui]
    sensors_s = 30
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from siltstone.chains.materialization_rules import MaterializationOptions
from siltstone.chains.policies import DEFAULT_POLICY, PolicyOptions
from siltstone.changelog.upload_options import UploadOptions
from siltstone.errors import UsageError
from siltstone.log import DEFAULT_LEVEL, Format, Level, get_logger
from siltstone.model import OUTAGE_S
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.secret import FILE, read_variable

CONFIGURATION = Path("siltstone.toml")
PREFIX = "SILTSTONE_"
SQLITE = re.compile(r"(sqlite(?:\+\w+)?:///)(?!:|file:)(.+)")
"""the URL of a catalog in a file, by its path"""
CONFIG = f"{PREFIX}CONFIG"
"""the variable that names another file than the `siltstone.toml` of the working directory"""
SECRETS = ("warehouse", "catalog", "alerts__webhook", "ui__storage", "ui__token")
"""options that a file can hold, too: variables without their prefix"""
_LOG = get_logger(__name__)


def parse_address(text: str) -> tuple[str, int]:
    """Parse [HOST:]PORT to host and port; the host is 127.0.0.1 unless given, and an IPv6 address is in brackets.

    Raises:
        ValueError: it is not one.
    """
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    known = port.isdecimal() and int(port) < 1 << 16 and (":" not in host or bare != host)
    if not known or (":" in text and not bare):
        raise ValueError(f"{text!r} is not an address: write PORT or HOST:PORT, such as 9464 or 0.0.0.0:9464")
    return bare or "127.0.0.1", int(port)


def _check_address(text: str) -> str:
    parse_address(text)
    return text


Address = Annotated[str, BeforeValidator(str), AfterValidator(_check_address)]
"""[HOST:]PORT, which may be a number in siltstone.toml"""


class RecoveryOptions(BaseModel):
    """What a run may do about damage and outages, and what Dagster does after a failed run."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    automatic: bool = Field(default=True, description="whether a run that finds its stream damaged recovers it itself")
    attempts: int = Field(default=3, ge=0, description="maximum recoveries after a failed run under Dagster")
    delay_s: float = Field(
        default=10.0, ge=0, description="seconds before the first of them; each further one waits three times as long"
    )
    resets: int = Field(
        default=5,
        ge=0,
        description="how often in a row, with no checkpoint in between, a run goes back to its newest checkpoint by "
        "itself after a failure that is not its code's or its input's",
    )
    reset_delay_s: float = Field(
        default=1.0, ge=0, description="seconds before the first of these; each further one waits twice as long"
    )


class AlertOptions(BaseModel):
    """When alerts are sent, and where."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    webhook: str | None = Field(default=None, repr=False, description="URL to post alerts to; default only the log")
    still_s: float = Field(
        default=1800.0, gt=0, description="seconds without a checkpoint after which a running stream counts as stalled"
    )


class UiOptions(BaseModel):
    """How `siltstone ui` runs Dagster."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    storage: str | None = Field(
        default=None, repr=False, description="postgresql:// URL for runs and events; default files in the warehouse"
    )
    sensors_s: int = Field(default=10, ge=1, description="minimum seconds between two evaluations of a sensor")
    token: str | None = Field(
        default=None, repr=False, description="token that the page asks for; needed with a --host that others reach"
    )
    hosts: list[str] = Field(
        default=[], description="further names under which the page is reached, HOST or HOST:PORT, as behind a proxy"
    )
    warehouses: list[str] = Field(
        default=[], repr=False, description="further warehouses that a launch may name, exactly as it names them"
    )
    catalogs: list[str] = Field(
        default=[], repr=False, description="further catalogs that a launch may name, exactly as it names them"
    )


class Settings(BaseSettings):
    """All options of the engine; unknown names are refused."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
    )

    streams: list[str] = Field(default=[], description="modules that define streams: paths, or names of installed ones")
    warehouse: str = Field(
        default="./warehouse",
        repr=False,  # it may hold a password, as the catalog's URL may
        description="where objects are: a path, s3://, redis://, cassandra:// or rocksdb:// URL",
    )
    catalog: str | None = Field(
        default=None, repr=False, description="SQLAlchemy URL; default SQLite inside a local warehouse"
    )
    catalog_timeout_s: float = Field(
        default=OUTAGE_S, ge=0, description="seconds that a run waits for an unreachable catalog, as in a failover"
    )
    master: str = Field(default="local[*]", description="Spark master URL, or sc://HOST[:PORT] of Spark Connect")
    spark: dict[str, str] = Field(default={}, repr=False, description="further Spark settings")
    placement: bool | None = Field(
        default=None,
        description="whether each subtask stays on the executor that has its state; default unless the master is local",
    )
    parallelism: int | None = Field(
        default=None, ge=1, description="subtasks per operator; default the last rescale's, else cores"
    )
    backend: Literal["heap", "rocksdb"] = Field(
        default="heap", description="backend of the working state: heap or rocksdb"
    )
    checkpoint_steps: int = Field(default=1, ge=1, description="micro-batches per checkpoint")
    checkpoint_s: float | None = Field(
        default=None, gt=0, description="seconds between checkpoints, instead of `checkpoint_steps`"
    )
    checkpoint_idle_s: float = Field(
        default=60.0,
        gt=0,
        description="seconds without a micro-batch after which fewer than checkpoint_steps end in a checkpoint",
    )
    max_pending: int = Field(
        default=0,
        ge=0,
        description="checkpoints on their way to the store while the stream goes on; 0: the stream waits for each",
    )
    log_steps: bool = Field(
        default=True,
        description="whether what a micro-batch changes is logged before its checkpoint; if not, a stream that loses "
        "working state goes back to its newest checkpoint",
    )
    policy: str = Field(default=DEFAULT_POLICY, description="when to take a base: marginal-cost, adjust-d or files")
    policy_options: PolicyOptions = Field(default_factory=PolicyOptions, description="options of the policy")
    upload: UploadOptions = Field(default_factory=UploadOptions, description="how changes travel to the store")
    materialization: MaterializationOptions = Field(
        default_factory=MaterializationOptions, description="when chains are consolidated"
    )
    retention: RetentionOptions = Field(
        default_factory=RetentionOptions,
        description="what is kept; without a rule, as recorded with the stream",
    )
    ui: UiOptions = Field(default_factory=UiOptions, description="how `siltstone ui` runs Dagster")
    alerts: AlertOptions = Field(default_factory=AlertOptions, description="when alerts are sent, and where")
    schedules: dict[str, dict[str, str]] = Field(
        default={},
        description="by stream and operation: a cron expression (UTC), or off; see siltstone/dagster/schedules.py",
    )
    openmetrics: Path | None = Field(
        default=None,
        description="file to which runs write metrics as OpenMetrics text; {stream} in it is the stream's name",
    )
    metrics_port: Address | None = Field(
        default=None,
        description="[HOST:]PORT on which runs serve metrics to Prometheus; the host is 127.0.0.1 unless given",
    )
    recovery: RecoveryOptions = Field(default_factory=RecoveryOptions, description="what a run may do about damage")
    log_level: Level = Field(default=DEFAULT_LEVEL, description="the lowest level of events that command lines show")
    log_format: Format = Field(default="text", description="text for people, or json: one object per line")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources in order of precedence: arguments, environment, file."""
        if isinstance(env_settings, EnvSettingsSource):
            env_settings.env_vars = _with_files(env_settings.env_vars)
        return init_settings, env_settings, InitSettingsSource(settings_cls, _read_configuration())


def load_settings(**given: object) -> Settings:
    """Load the settings; `given` holds the command line's options, None for those not given.

    Raises:
        UsageError: an unknown option, a value out of range, or a siltstone.toml that is not TOML, or is not where
            `SILTSTONE_CONFIG` says.
    """
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})  # pyright: ignore[reportArgumentType]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"option {where}: {first['msg']} (see SILTSTONE_* and {_configuration()})") from None
    except SettingsError as error:
        raise UsageError(f"SILTSTONE_* in the environment: {error}; write lists and tables as JSON") from None
    except ValueError as error:
        raise UsageError(f"{_configuration()} cannot be read: {error}; write it as TOML") from None
    except OSError as error:
        raise UsageError(f"{_configuration()} cannot be read: {error.strerror}; see {CONFIG}") from None


def _read_configuration() -> dict[str, Any]:
    """Read the configuration file; empty if there is none in the working directory."""
    path = _configuration()
    if path is CONFIGURATION and not path.is_file():
        return {}
    with path.open("rb") as file:
        found = tomllib.load(file)
    return found if path is CONFIGURATION else _beside(path.absolute().parent, found)


def _configuration() -> Path:
    named = os.environ.get(CONFIG)
    return Path(named).expanduser() if named else CONFIGURATION


def _beside(directory: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Let the relative paths among some options begin at a directory."""

    def absolute(value: Any) -> Any:
        if not isinstance(value, str) or not value:
            return value  # not valid, which Settings says
        if found := SQLITE.fullmatch(value):
            return f"{found[1]}{directory / found[2]}"
        return value if "://" in value else str(directory / value)

    paths = {name: absolute(given[name]) for name in ("warehouse", "catalog", "openmetrics") if name in given}
    streams = given.get("streams")
    if isinstance(streams, list):
        is_module = [isinstance(each, str) and "/" not in each and not each.endswith(".py") for each in streams]
        paths["streams"] = [n if here else absolute(n) for n, here in zip(streams, is_module, strict=True)]
    return given | paths


def given_settings(warehouse: str | None, catalog: str | None, **further: object) -> Settings:
    """Load the settings of a command line, and warn of a password among its arguments.

    Raises:
        UsageError: see `load_settings`.
    """
    from siltstone.store.url import has_password  # imported late: it loads Arrow, which --help does not need

    for name, url in (("warehouse", warehouse), ("catalog", catalog)):
        if url and has_password(url):
            variable = f"{PREFIX}{name.upper()}"
            _LOG.warning(
                f"the list of processes shows the password in --{name} to everybody on this machine: set {variable} "
                f"instead, or {variable}{FILE} to the path of a file that holds it"
            )
    return load_settings(warehouse=warehouse, catalog=catalog, **further)


def _with_files(variables: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the variables, names in lower case, including those given as files."""
    found = dict(variables)
    for name in (f"{PREFIX}{secret}".lower() for secret in SECRETS):
        found[name] = read_variable(name, found, FILE.lower())
        found.pop(f"{name}{FILE.lower()}", None)
        if found[name] is None:
            del found[name]
    return found
