"""The token of the page: the guard before an application that says `in`, asked over real connections."""

import http.client
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from siltstone.dagster.page.guard import SESSION_S, Guard

TOKEN = "the-token-of-this-page"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
HTML = {"Accept": "text/html"}


@dataclass
class Server:
    """A guarded application: its port, and the time it goes by."""

    port: int = 0
    now: float = 1_000_000.0

    def ask(
        self, method: str, path: str, headers: dict[str, str], body: str = ""
    ) -> tuple[int, http.client.HTTPMessage]:
        """Status and headers of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body or None, headers)
        answer = connection.getresponse()
        said = answer.read().decode()
        connection.close()
        assert (said == "in") == (answer.status == 200 and path != "/login"), said
        assert TOKEN not in said and TOKEN not in str(answer.headers)
        return answer.status, answer.headers

    def log_in(self, token: str) -> tuple[int, str]:
        """Status, and what the browser sends back."""
        status, headers = self.ask("POST", "/login", FORM, f"token={token}")
        return status, headers.get("Set-Cookie", "").partition(";")[0]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    guard = Guard(PlainTextResponse("in"), ["proxy.example:8443"], TOKEN, lambda: made.now)
    running = uvicorn.Server(uvicorn.Config(guard, port=0, log_level="warning"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    made.port = running.servers[0].sockets[0].getsockname()[1]
    yield made
    running.should_exit = True
    thread.join()


def test_nobody_is_let_in_without_it(server: Server) -> None:
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
        assert server.ask("GET", "/", headers)[0] == 401
    assert server.ask("POST", "/graphql", {"Content-Type": "application/json"}, "{}")[0] == 401
    status, headers = server.ask("GET", "/", HTML)
    assert (status, headers["Location"]) == (303, "/login"), "people are shown where to log in"
    with pytest.raises(InvalidStatus, match="403"), connect(f"ws://127.0.0.1:{server.port}/graphql"):
        pass


def test_it_lets_in_as_a_header_or_by_logging_in(server: Server) -> None:
    assert server.ask("GET", "/", {"Authorization": f"Bearer {TOKEN}"})[0] == 200
    assert server.ask("GET", "/login", HTML)[0] == 200
    status, cookie = server.log_in(TOKEN)
    assert status == 303 and cookie.startswith(f"siltstone-{server.port}=")
    assert server.ask("GET", "/", {"Cookie": cookie})[0] == 200


def test_a_wrong_token_gives_no_cookie_and_nobody_makes_one_up(server: Server) -> None:
    assert server.log_in("wrong") == (403, "")
    assert server.log_in("") == (403, "")
    assert server.log_in("x" * 5000) == (413, "")
    _, cookie = server.log_in(TOKEN)
    name, _, value = cookie.partition("=")
    until, _, seal = value.partition(".")
    for made in (f"{int(until) + 1}.{seal}", f"{until}.", until, seal, f"{until}.{seal}x", f"{until}é.{seal}"):
        headers = {"Cookie": f"{name}={made}".encode().decode("latin-1")}
        assert server.ask("GET", "/", headers)[0] == 401


def test_a_login_ends(server: Server) -> None:
    _, cookie = server.log_in(TOKEN)
    server.now += SESSION_S - 1
    assert server.ask("GET", "/", {"Cookie": cookie})[0] == 200
    server.now += 1
    assert server.ask("GET", "/", {"Cookie": cookie})[0] == 401


def test_another_page_cannot_log_in_nor_use_a_login(server: Server) -> None:
    _, cookie = server.log_in(TOKEN)
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}):
        assert server.ask("POST", "/login", FORM | headers, f"token={TOKEN}")[0] == 403
        assert (
            server.ask("POST", "/x", {"Content-Type": "application/json", "Cookie": cookie} | headers, "{}")[0] == 403
        )


def test_a_proxy_is_named(server: Server) -> None:
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    kept = {"Host": "proxy.example:8443", "Origin": "https://proxy.example:8443"}
    rewritten = {"Host": f"127.0.0.1:{server.port}", "Origin": "https://proxy.example:8443"}
    for headers in (kept, rewritten):
        assert server.ask("GET", "/", bearer | headers)[0] == 200
    assert server.ask("GET", "/", bearer | kept | {"Origin": "https://proxy.example"})[0] == 403


def test_nobody_frames_the_page(server: Server) -> None:
    _, headers = server.ask("GET", "/", {"Authorization": f"Bearer {TOKEN}"})
    assert headers["X-Frame-Options"] == "SAMEORIGIN"
    assert "frame-ancestors 'none'" in server.ask("GET", "/login", HTML)[1]["Content-Security-Policy"]
