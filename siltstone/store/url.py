"""Store URLs: their options, and hiding their secrets.

A store's options are the URL's query, such as `s3://bucket/prefix?region=eu-west-1&attempts=3`, so that one string
opens the same store in every process. Passwords are never shown.
"""

from typing import ClassVar, Literal, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote_plus, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from siltstone.errors import UsageError
from siltstone.secret import HIDDEN
from siltstone.store.checksums import DEFAULT, Algorithm
from siltstone.store.retry import RetryPolicy


class StoreOptions(BaseModel):
    """Options of every network store."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    retry: Literal["exponential", "fixed", "none"] = Field("exponential", description="how waits between attempts grow")
    attempts: int = Field(5, ge=1, description="maximum attempts per call, including the first")
    wait_s: float = Field(0.1, gt=0, description="seconds before the second attempt")
    connect_timeout_s: float = Field(5.0, gt=0, description="seconds to wait for a connection")
    timeout_s: float = Field(30.0, gt=0, description="seconds to wait for an answer")
    checksums: Algorithm = Field(DEFAULT, description="the algorithm of new checksums")

    @property
    def policy(self) -> RetryPolicy:
        """The retry policy of calls."""
        return RetryPolicy(kind=self.retry, attempts=self.attempts, wait_s=self.wait_s)


Options = TypeVar("Options", bound=BaseModel)


def redact_url(url: str) -> str:
    """Return the URL for people: without password and options.

    Raises:
        UsageError: it is not a URL.
    """
    parts = split(url)
    if parts.netloc and "@" in parts.path + parts.query + parts.fragment:
        return f"{parts.scheme}://{HIDDEN}"  # a password that contains a slash or the like is parsed into these parts
    host = parts.netloc.rpartition("@")[2]
    user = parts.username
    credentials = f"{user or ''}:{HIDDEN}@" if parts.password else f"{user}@" if user else ""
    return f"{parts.scheme}://{credentials}{host}{parts.path}"


def has_password(url: str) -> bool:
    """Whether the URL of a store or a database contains a password, or something that looks like one."""
    try:
        return HIDDEN in redact_url(url) or "pass" in split(take_option(url, "password_variable")[0]).query.lower()
    except UsageError:
        return "@" in url


def split(url: str) -> SplitResult:
    """Split a URL into its parts.

    Raises:
        UsageError: it is not a URL; the message contains only its scheme.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise UsageError(
            f"the {url.partition('://')[0]}:// URL cannot be read: check host and port, and escape special characters "
            "in user and password with %, such as %2F for a slash"
        ) from None
    return parts


def options_of(url: str, model: type[Options]) -> Options:
    """Parse the URL's query as `model`.

    Raises:
        UsageError: an option is unknown or given twice, or a value is bad; the message lists the options.
    """
    pairs = parse_qsl(split(url).query, keep_blank_values=True)
    names = [name for name, _ in pairs]
    known = ", ".join(model.model_fields)
    for name in names:
        if name not in model.model_fields:
            raise UsageError(f"{redact_url(url)} has no option {name!r}: use {known}")
        if names.count(name) > 1:
            raise UsageError(f"{redact_url(url)}: option {name} is given twice: leave one out")
    try:
        return model(**dict(pairs))
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{redact_url(url)}: option {where}: {first['msg']}; correct it after the URL's ?") from None


def take_option(url: str, name: str) -> tuple[str, str | None]:
    """Return the URL without one of its options, otherwise unchanged, and that option's value, or None.

    Raises:
        UsageError: the option is given twice, or the URL is not valid.
    """
    split(url)
    place, _, query = url.partition("?")
    pairs = query.split("&") if query else []
    values = [unquote_plus(pair.partition("=")[2]) for pair in pairs if pair.partition("=")[0] == name]
    if len(values) > 1:
        raise UsageError(f"{redact_url(url)}: option {name} is given twice: leave one out")
    rest = "&".join(pair for pair in pairs if pair.partition("=")[0] != name)
    return f"{place}?{rest}" if rest else place, values[0] if values else None
