"""Guard Dagster's web server: ASGI middleware that admits only requests of its own page, and only with the token.

A browser sends requests of any page to any address it can reach, including this machine's own. So the guard requires of
every request and WebSocket: the Host is a name of this server (a foreign name may be bound to its address); the Origin,
if there is one, is that of its own page; and a request that changes something is a POST of JSON, which a foreign page
cannot send without a preflight. No other page may show this one in a frame.

If a token is set, every request needs it: as `Authorization: Bearer TOKEN`, or as a cookie that /login gives for it.
`/login#TOKEN` logs in at once; the part after # stays in the browser. The cookie does not contain the token. It expires
after a week, or when the token changes.
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
"""largest body that the guard reads"""
_LOG = get_logger("siltstone.ui")
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_FOREIGN = ("cross-site", "same-site")
_JSON, _FORM = "application/json", "application/x-www-form-urlencoded"
_PAGE = """<!doctype html><meta charset="utf-8"><title>Siltstone</title>
<form method="post" action="/login"><p>{text}
<p><label>Token <input name="token" type="password" autocomplete="current-password" autofocus required></label>
<button>Log in</button></form>
<script nonce="{nonce}">if (location.hash.length > 1) {{
  const form = document.forms[0]; form.token.value = decodeURIComponent(location.hash.slice(1));
  history.replaceState(null, "", "/login"); form.submit() }}</script>"""


class Refused(Exception):
    """A request is refused: the HTTP status, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Guard:
    """Forwards admitted requests to `app`.

    Args:
        hosts: names of this server besides the loopback names and the address that was connected to; with `:PORT` if
            the page has another port than the one in Host, as behind a proxy.
        token: the token that requests need; None admits everybody who reaches the port.
        now: returns seconds since 1970.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str] = (), token: str | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self._app = app
        self._authorities = frozenset(host.lower() for host in hosts)
        self._names = LOOPBACK | {_host_name(host) for host in self._authorities}
        self._token = token
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request or WebSocket, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        connection = HTTPConnection(scope)
        is_request = scope["type"] == "http"
        try:
            self._check_origin(connection)
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

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Frame-Options"] = "SAMEORIGIN"
                headers["Cross-Origin-Resource-Policy"] = "same-origin"
            await send(message)

        return await self._app(scope, receive, send_with_headers)

    def _check_origin(self, connection: HTTPConnection) -> None:
        """Raise Refused unless the request names this server, and comes from its own page or from no page."""
        headers = connection.headers
        host = _single_header(headers, "host")
        server = (connection.scope.get("server") or ("",))[0]
        if not host or not (_host_name(host) in self._names or _host_name(host) == server):
            raise Refused(403, f"Host {host!r:.100} is not a name of this server: list it as [ui] hosts")
        origin = _single_header(headers, "origin")
        if origin is not None:
            scheme, mark, authority = origin.lower().partition("://")
            if not mark or scheme not in ("http", "https") or authority not in {host.lower(), *self._authorities}:
                raise Refused(403, f"Origin {origin!r:.100} is not this page")
        elif headers.get("sec-fetch-site") in _FOREIGN and not (
            headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        ):
            raise Refused(403, "the request comes from another page")  # which may only link to this one

    def _check_token(self, connection: HTTPConnection) -> None:
        if self._token is None:
            return
        scheme, _, given = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _is_equal(given.strip(), self._token):
            return
        until, _, _ = (cookie := connection.cookies.get(self._cookie(connection), "")).partition(".")
        if until.isdecimal() and _is_equal(cookie, self._session(until)) and int(until) > self._now():
            return
        raise Refused(401, "the token is missing or wrong")

    def _answer(self, connection: HTTPConnection, refused: Refused) -> Response:
        if refused.status == 401:
            if connection.scope["method"] == "GET" and "text/html" in connection.headers.get("accept", ""):
                return RedirectResponse(LOGIN, 303)
            hint = "send Authorization: Bearer TOKEN, or open /login"
            return PlainTextResponse(f"{refused}: {hint}\n", 401, {"WWW-Authenticate": "Bearer"})
        return PlainTextResponse(f"{refused}\n", refused.status)

    async def _log_in(self, request: Request) -> Response:
        """Answer /login: show the form, or exchange the token it sends for a cookie."""
        if request.method in ("GET", "HEAD"):
            return _login_page("This page needs the token that siltstone ui was started with.", 200)
        if request.method != "POST" or _media_type(request) != _FORM:
            raise Refused(405, "log in by the form at /login")
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > FORM_BYTES:
                raise Refused(413, "the form is too large")
        given = parse_qs(body.decode("latin-1")).get("token", [""])[0]
        if not _is_equal(given.strip(), self._token or ""):
            _LOG.warning("refused a token")
            return _login_page("The token is wrong.", 403)
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
        """Name the cookie by the port: cookies ignore ports, but one machine may have two servers."""
        return f"siltstone-{(connection.scope.get('server') or ('', 0))[1]}"

    def _session(self, until: str) -> str:
        key = (self._token or "").encode()
        made = hmac.digest(key, f"siltstone session until {until}".encode(), hashlib.sha256)
        return f"{until}.{base64.urlsafe_b64encode(made).decode().rstrip('=')}"


def _check_method(method: str, connection: HTTPConnection) -> None:
    """Raise Refused unless a request only reads, or is a POST that no foreign page can send."""
    if method in ("GET", "HEAD"):
        # Dagster would execute GraphQL of a GET, even a mutation; a browser's GET only loads the page GraphiQL.
        if connection.url.path.rstrip("/").endswith("/graphql") and "text/html" not in connection.headers.get(
            "accept", ""
        ):
            raise Refused(405, "GraphQL needs POST")
    elif method != "POST":
        raise Refused(405, "use GET or POST")
    elif _media_type(connection) != _JSON:
        raise Refused(415, f"POST needs Content-Type {_JSON}")


def _media_type(connection: HTTPConnection) -> str:
    return (_single_header(connection.headers, "content-type") or "").partition(";")[0].strip().lower()


def _single_header(headers: Headers, name: str) -> str | None:
    """Return a header's value, or None. Raise Refused if it is repeated, because others may read another value."""
    values = headers.getlist(name)
    if len(values) > 1:
        raise Refused(400, f"more than one {name}")
    return values[0] if values else None


def _host_name(authority: str) -> str:
    """Return the name in HOST[:PORT], without brackets; empty if it is not valid."""
    if not _AUTHORITY.fullmatch(authority.lower()):
        return ""
    return urlsplit(f"//{authority}").hostname or ""


def _is_equal(given: str, wanted: str) -> bool:
    """Whether two secrets are equal, compared in constant time; never equal to an empty one."""
    return bool(wanted) and hmac.compare_digest(given.encode(), wanted.encode())


def _login_page(text: str, status: int) -> Response:
    nonce = secrets.token_urlsafe()
    rules = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    )
    headers = {"Content-Security-Policy": rules, "Cache-Control": "no-store", "Referrer-Policy": "same-origin"}
    return HTMLResponse(_PAGE.format(text=text, nonce=nonce), status, headers)
