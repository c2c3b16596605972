"""Store URLs: their options, and how people may see them.

Options of a store are the URL's query, such as `s3://bucket/prefix?region=eu-west-1&attempts=3`, so that one string
opens the same store in every process. What may be secret, a password, is never shown.
"""

from typing import ClassVar, Literal, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote_plus, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from siltstone.errors import UsageError
from siltstone.secret import HIDDEN
from siltstone.store.checksums import DEFAULT, Algorithm
from siltstone.store.retry import RetryPolicy


class StoreOptions(BaseModel):
    """What every store over a network takes."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    retry: Literal["exponential", "fixed", "none"] = Field("exponential", description="how waits between attempts grow")
    attempts: int = Field(5, ge=1, description="attempts a call, the first included")
    wait_s: float = Field(0.1, gt=0, description="seconds before the second attempt")
    connect_timeout_s: float = Field(5.0, gt=0, description="seconds to wait for a connection")
    timeout_s: float = Field(30.0, gt=0, description="seconds to wait for an answer")
    checksums: Algorithm = Field(DEFAULT, description="the algorithm of the checksums of what is written")

    @property
    def policy(self) -> RetryPolicy:
        """How calls are tried again."""
        return RetryPolicy(kind=self.retry, attempts=self.attempts, wait_s=self.wait_s)


Options = TypeVar("Options", bound=BaseModel)


def redacted(url: str) -> str:
    """The URL as people may see it: no password, no option.

    Raises:
        UsageError: it is no URL.
    """
    parts = split(url)
    if parts.netloc and "@" in parts.path + parts.query + parts.fragment:
        return f"{parts.scheme}://{HIDDEN}"  # a password with a slash or the like in it ends up there
    host = parts.netloc.rpartition("@")[2]
    user = parts.username
    credentials = f"{user or ''}:{HIDDEN}@" if parts.password else f"{user}@" if user else ""
    return f"{parts.scheme}://{credentials}{host}{parts.path}"


def has_password(url: str) -> bool:
    """Whether a URL, of a store or of a database, holds a password, or what looks like one."""
    try:
        return HIDDEN in redacted(url) or "pass" in split(take_option(url, "password_variable")[0]).query.lower()
    except UsageError:
        return "@" in url


def split(url: str) -> SplitResult:
    """The parts of a URL.

    Raises:
        UsageError: it is no URL; the message holds only its scheme.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise UsageError(
            f"the {url.partition('://')[0]}:// URL cannot be read: check host and port, and write what is special in a "
            "user's name or password with %, such as %2F for a slash"
        ) from None
    return parts


def options_of(url: str, model: type[Options]) -> Options:
    """The URL's query as `model`.

    Raises:
        UsageError: an unknown option, one given twice, or a bad value; lists what there is.
    """
    pairs = parse_qsl(split(url).query, keep_blank_values=True)
    names = [name for name, _ in pairs]
    known = ", ".join(model.model_fields)
    for name in names:
        if name not in model.model_fields:
            raise UsageError(f"{redacted(url)} has no option {name!r}: use {known}")
        if names.count(name) > 1:
            raise UsageError(f"{redacted(url)}: option {name} is given twice: leave one out")
    try:
        return model(**dict(pairs))
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{redacted(url)}: option {where}: {first['msg']}; correct it behind the URL's ?") from None


def take_option(url: str, name: str) -> tuple[str, str | None]:
    """The URL without one of its options, all else as it was, and that option's value, None where it is not given.

    Raises:
        UsageError: it is given twice, or the URL is none.
    """
    split(url)
    place, _, query = url.partition("?")
    pairs = query.split("&") if query else []
    values = [unquote_plus(pair.partition("=")[2]) for pair in pairs if pair.partition("=")[0] == name]
    if len(values) > 1:
        raise UsageError(f"{redacted(url)}: option {name} is given twice: leave one out")
    rest = "&".join(pair for pair in pairs if pair.partition("=")[0] != name)
    return f"{place}?{rest}" if rest else place, values[0] if values else None
