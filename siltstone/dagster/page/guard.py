"""What stands before Dagster's web server: ASGI middleware that lets in only its own page and those who have the token.

A browser sends any page's requests to any address it can reach, this machine's own too. So, of every request and
WebSocket: the Host is a name of this server (a foreign name may have been bound to its address), the Origin, where
there is one, is that of its own page, and what changes something is a POST of JSON, which no page may send elsewhere
without being asked. Nobody may put the page into a frame of theirs.

With a token, all of it is only for those who have it: as `Authorization: Bearer TOKEN`, or as a cookie that /login
gives for it. `/login#TOKEN` logs in at once; what follows # stays in the browser. The cookie is not the token, and
ends after a week, or when the token is changed.
"""

import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Collection
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from siltstone.log import get_logger

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
LOGIN = "/login"
SESSION_S = 7 * 86_400
FORM_BYTES = 4096
"""the largest body that is read here"""
_LOG = get_logger("siltstone.ui")
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_FOREIGN = ("cross-site", "same-site")
_JSON, _FORM = "application/json", "application/x-www-form-urlencoded"
_PAGE = """<!doctype html><meta charset="utf-8"><title>Siltstone</title>
<form method="post" action="/login"><p>{said}
<p><label>Token <input name="token" type="password" autocomplete="current-password" autofocus required></label>
<button>Log in</button></form>
<script nonce="{nonce}">if (location.hash.length > 1) {{
  const form = document.forms[0]; form.token.value = decodeURIComponent(location.hash.slice(1));
  history.replaceState(null, "", "/login"); form.submit() }}</script>"""


class Refused(Exception):
    """A request that is not let through: the status, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Guard:
    """Passes on to `app` what may pass.

    Args:
        hosts: names of this server beside those of the loopback and the address that was connected to; with `:PORT`
            where the page is at another port than the one in Host, as behind a proxy.
        token: what is needed to be let in; None lets everybody in who reaches the port.
        now: seconds since 1970.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str] = (), token: str | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self._app = app
        self._authorities = frozenset(host.lower() for host in hosts)
        self._names = LOOPBACK | {_name_of(host) for host in self._authorities}
        self._token = token
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request or WebSocket through, or answer it here."""
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        connection = HTTPConnection(scope)
        is_request = scope["type"] == "http"
        try:
            self._check_place(connection)
            if is_request and self._token and connection.url.path == LOGIN:
                return await (await self._log_in(Request(scope, receive)))(scope, receive, send)
            self._check_token(connection)
            if is_request:
                _check_method(scope["method"], connection)
        except Refused as refused:
            method, path = scope.get("method", "WebSocket"), connection.url.path[:200]
            _LOG.warning("refused a request", method=method, path=path, reason=refused)
            if is_request:
                await self._answer(connection, refused)(scope, receive, send)
            else:
                await WebSocket(scope, receive, send).close(1008)
            return None

        async def unframed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Frame-Options"] = "SAMEORIGIN"
                headers["Cross-Origin-Resource-Policy"] = "same-origin"
            await send(message)

        return await self._app(scope, receive, unframed)

    def _check_place(self, connection: HTTPConnection) -> None:
        """Refused unless this server is meant, by a page of its own or by no page at all."""
        headers = connection.headers
        host = _only(headers, "host")
        server = (connection.scope.get("server") or ("",))[0]
        if not host or not (_name_of(host) in self._names or _name_of(host) == server):
            raise Refused(403, f"Host {host!r:.100} is not a name of this server: list it as [ui] hosts")
        origin = _only(headers, "origin")
        if origin is not None:
            scheme, mark, authority = origin.lower().partition("://")
            if not mark or scheme not in ("http", "https") or authority not in {host.lower(), *self._authorities}:
                raise Refused(403, f"Origin {origin!r:.100} is another page")
        elif headers.get("sec-fetch-site") in _FOREIGN and not (
            headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        ):
            raise Refused(403, "another page asks for it")  # a link from there may be followed, nothing more

    def _check_token(self, connection: HTTPConnection) -> None:
        if self._token is None:
            return
        scheme, _, given = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(given.strip(), self._token):
            return
        until, _, _ = (cookie := connection.cookies.get(self._cookie(connection), "")).partition(".")
        if until.isdecimal() and _same(cookie, self._session(until)) and int(until) > self._now():
            return
        raise Refused(401, "no token, or not the right one")

    def _answer(self, connection: HTTPConnection, refused: Refused) -> Response:
        if refused.status == 401:
            if connection.scope["method"] == "GET" and "text/html" in connection.headers.get("accept", ""):
                return RedirectResponse(LOGIN, 303)
            hint = "send Authorization: Bearer TOKEN, or open /login"
            return PlainTextResponse(f"{refused}: {hint}\n", 401, {"WWW-Authenticate": "Bearer"})
        return PlainTextResponse(f"{refused}\n", refused.status)

    async def _log_in(self, request: Request) -> Response:
        """The form, or what it sends: the token for a cookie."""
        if request.method in ("GET", "HEAD"):
            return _form("This page needs the token that siltstone ui was started with.", 200)
        if request.method != "POST" or _media_type(request) != _FORM:
            raise Refused(405, "log in by the form at /login")
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > FORM_BYTES:
                raise Refused(413, "that is no token")
        given = parse_qs(body.decode("latin-1")).get("token", [""])[0]
        if not _same(given.strip(), self._token or ""):
            _LOG.warning("refused a token")
            return _form("That is not the token.", 403)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            self._cookie(request),
            self._session(str(int(self._now()) + SESSION_S)),
            max_age=SESSION_S,
            httponly=True,
            samesite="lax",
            secure=request.url.scheme == "https",
        )
        return answer

    def _cookie(self, connection: HTTPConnection) -> str:
        """Cookies know no ports: two servers on one machine have two names."""
        return f"siltstone-{(connection.scope.get('server') or ('', 0))[1]}"

    def _session(self, until: str) -> str:
        key = (self._token or "").encode()
        made = hmac.digest(key, f"siltstone session until {until}".encode(), hashlib.sha256)
        return f"{until}.{base64.urlsafe_b64encode(made).decode().rstrip('=')}"


def _check_method(method: str, connection: HTTPConnection) -> None:
    """Refused unless it only reads, or is a POST that no foreign page can send."""
    if method in ("GET", "HEAD"):
        # Dagster would carry out what a GET asks for, a mutation too; but for browsers it is only the page GraphiQL.
        if connection.url.path.rstrip("/").endswith("/graphql") and "text/html" not in connection.headers.get(
            "accept", ""
        ):
            raise Refused(405, "GraphQL is answered by POST only")
    elif method != "POST":
        raise Refused(405, "use GET or POST")
    elif _media_type(connection) != _JSON:
        raise Refused(415, f"POST takes Content-Type {_JSON} only")


def _media_type(connection: HTTPConnection) -> str:
    return (_only(connection.headers, "content-type") or "").partition(";")[0].strip().lower()


def _only(headers: Headers, name: str) -> str | None:
    """The one value of a header, None if there is none; Refused where there are two, which may be read otherwise."""
    values = headers.getlist(name)
    if len(values) > 1:
        raise Refused(400, f"more than one {name}")
    return values[0] if values else None


def _name_of(authority: str) -> str:
    """The name in HOST[:PORT], without brackets; empty for what is none."""
    if not _AUTHORITY.fullmatch(authority.lower()):
        return ""
    return urlsplit(f"//{authority}").hostname or ""


def _same(given: str, wanted: str) -> bool:
    """Whether they are equal, in a time that does not say how much of it is."""
    return bool(wanted) and hmac.compare_digest(given.encode(), wanted.encode())


def _form(said: str, status: int) -> Response:
    nonce = secrets.token_urlsafe()
    rules = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    )
    headers = {"Content-Security-Policy": rules, "Cache-Control": "no-store", "Referrer-Policy": "same-origin"}
    return HTMLResponse(_PAGE.format(said=said, nonce=nonce), status, headers)
