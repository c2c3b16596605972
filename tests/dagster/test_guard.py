"""The page refuses what other pages send it: the real server, asked over real connections and by a real browser."""

import http.client
import json
import subprocess
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.dagster.page import LAUNCH, LOCATION, REPOSITORY_NAME, Page, browser, served

WAIT_S = 120.0
EVIL = "http://evil.example"
SELECTOR = {"repositoryLocationName": LOCATION, "repositoryName": REPOSITORY_NAME, "jobName": "siltstone__sweep"}
VARIABLES = {"params": {"selector": SELECTOR, "runConfigData": {}, "executionMetadata": {"tags": []}}}
BODY = json.dumps({"query": LAUNCH, "variables": VARIABLES})
QUERY = urlencode({"query": LAUNCH, "variables": json.dumps(VARIABLES)}, quote_via=quote)
JSON = {"Content-Type": "application/json"}
ATTACK = """<!doctype html><form id="f" method="post" action="TARGET/graphql?QUERY"></form>
<script>
const body = BODY, said = [];
const tried = (what, done) => done.then(() => said.push(what + " answered"), () => said.push(what + " failed"));
const json = {"Content-Type": "application/json"};
const loaded = (tag, url) => new Promise((yes, no) => {
  const e = document.createElement(tag); e.onload = yes; e.onerror = no; e.src = url; document.body.append(e); });
const socket = new Promise((yes, no) => {
  const s = new WebSocket("ws" + "TARGET".slice(4) + "/graphql", "graphql-ws"); s.onopen = yes; s.onerror = no; });
(async () => {
  await tried("cors", fetch("TARGET/graphql", {method: "POST", body, headers: json}));
  await tried("read", fetch("TARGET/graphql?query={version}"));
  await tried("script", loaded("script", "TARGET/graphql?QUERY"));
  await tried("image", loaded("img", "TARGET/graphql?QUERY"));
  await tried("socket", socket);
  for (const type of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
    await fetch("TARGET/graphql?QUERY", {method: "POST", mode: "no-cors", body, headers: {"Content-Type": type}});
  await fetch("TARGET/graphql?QUERY", {mode: "no-cors", credentials: "include"});
  f.target = "_blank"; f.submit();
  await fetch("/said", {method: "POST", body: said.join(", ")});
})();
</script><img src="/later">"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    home = tmp_path_factory.mktemp("guarded")
    with served(home / "warehouse", home / "log") as page:
        yield page


def asked(page: Page, method: str, path: str, headers: Mapping[str, str], body: str | None = None) -> tuple[int, str]:
    """The answer to a request with these headers, Host included, and no others."""
    connection = http.client.HTTPConnection(page.address.removeprefix("http://"), timeout=60)
    connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
    for name, value in (headers | ({"Content-Length": str(len(body))} if body else {})).items():
        connection.putheader(name, value)
    connection.endheaders(body.encode() if body else None)
    answer = connection.getresponse()
    said = answer.read().decode()
    connection.close()
    return answer.status, said


@pytest.mark.parametrize(
    ("status", "method", "path", "headers", "body"),
    [
        pytest.param(403, "POST", "/graphql", JSON | {"Origin": EVIL}, BODY, id="foreign origin"),
        pytest.param(403, "POST", "/graphql", JSON | {"Origin": "null"}, BODY, id="origin of a sandbox"),
        pytest.param(403, "POST", "/graphql", JSON | {"Origin": "http://127.0.0.1:1"}, BODY, id="another port"),
        pytest.param(403, "POST", "/graphql", JSON | {"Host": "evil.example"}, BODY, id="foreign host"),
        pytest.param(403, "POST", "/graphql", JSON | {"Host": "evil.example", "Origin": EVIL}, BODY, id="rebound name"),
        pytest.param(403, "GET", "/", {"Host": "127.0.0.1.evil.example"}, None, id="foreign host that looks like ours"),
        pytest.param(405, "GET", f"/graphql?{QUERY}", {}, None, id="mutation by GET"),
        pytest.param(405, "GET", f"//graphql/?{QUERY}", {}, None, id="mutation by GET, by another path"),
        pytest.param(403, "GET", f"/graphql?{QUERY}", {"Sec-Fetch-Site": "cross-site"}, None, id="GET by a page"),
        pytest.param(415, "POST", f"/graphql?{QUERY}", {}, "x", id="no type"),
        pytest.param(415, "POST", "/graphql", {"Content-Type": "text/plain"}, BODY, id="text"),
        pytest.param(415, "POST", "/graphql", {"Content-Type": "text/plain; application/json"}, BODY, id="json within"),
        pytest.param(415, "POST", "/graphql", {"Content-Type": "application/graphql"}, LAUNCH, id="bare graphql"),
        pytest.param(
            415, "POST", f"/graphql?{QUERY}", {"Content-Type": "application/x-www-form-urlencoded"}, QUERY, id="form"
        ),
        pytest.param(
            415, "POST", f"/graphql?{QUERY}", {"Content-Type": "multipart/form-data; boundary=b"}, BODY, id="multipart"
        ),
        pytest.param(500, "POST", "/graphql", JSON, f"[{BODY}]", id="batch"),
        pytest.param(415, "POST", "/report_asset_materialization/flights/events", {}, "x", id="a reported event"),
        pytest.param(405, "PUT", "/graphql", JSON, BODY, id="PUT"),
    ],
)
def test_what_is_not_a_post_of_json_by_its_own_page_launches_nothing(
    page: Page, status: int, method: str, path: str, headers: Mapping[str, str], body: str | None
) -> None:
    assert asked(page, method, path, headers, body)[0] == status
    assert page.runs({}) == []


def test_its_own_page_and_programs_are_let_in(page: Page) -> None:
    mutation = json.dumps({"query": 'mutation { terminateRun(runId: "none") { __typename } }'})
    port = urlsplit(page.address).port
    ways: list[dict[str, str]] = [
        {},
        {"Origin": page.address},
        {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"},
        {"Host": "localhost:9", "Origin": "http://localhost:9"},  # through a tunnel
    ]
    for headers in ways:
        status, said = asked(page, "POST", "/graphql", JSON | headers, mutation)
        assert status == 200 and "RunNotFoundError" in said
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert asked(page, "GET", "/runs", followed)[0] == 200


def test_a_websocket_of_another_page_is_refused(page: Page) -> None:
    where = f"ws{page.address.removeprefix('http')}/graphql"
    for origin in (EVIL, "null"):
        with pytest.raises(InvalidStatus) as caught, connect(where, origin=origin, subprotocols=["graphql-ws"]):  # pyright: ignore[reportArgumentType]
            pass
        assert caught.value.response.status_code == 403
    with connect(where, origin=page.address, subprotocols=["graphql-ws"]) as socket:  # pyright: ignore[reportArgumentType]
        socket.send(json.dumps({"type": "connection_init"}))
        assert json.loads(socket.recv(timeout=60)) == {"type": "connection_ack"}


class Elsewhere:
    """Another page on this machine, which tries to launch a run, and what it says that came of it."""

    def __init__(self, target: str) -> None:
        attack = ATTACK.replace("TARGET", target).replace("QUERY", QUERY).replace("BODY", json.dumps(BODY))
        other, self.said, self.done = self, "", threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path != "/":  # an image, without which the page has not loaded, and the browser goes on
                    other.done.wait(WAIT_S)
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(attack.encode())

            def do_POST(self) -> None:
                other.said = self.rfile.read(int(self.headers["Content-Length"])).decode()
                self.send_response(204)
                self.end_headers()
                other.done.set()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.done.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def render(address: str, profile: Path, *options: str) -> str:
    """What a real browser makes of a page."""
    command = [str(browser()), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", *options]
    return subprocess.run(
        [*command, "--disable-popup-blocking", "--dump-dom", address],
        capture_output=True,
        check=True,
        text=True,
        timeout=2 * WAIT_S,
    ).stdout


@pytest.mark.skipif(browser() is None, reason="needs a Chromium: apt install chromium")
def test_a_page_in_a_real_browser_cannot_launch_a_run(page: Page, tmp_path: Path) -> None:
    elsewhere = Elsewhere(page.address)
    render(elsewhere.address, tmp_path)
    elsewhere.close()
    assert elsewhere.said == ", ".join(f"{what} failed" for what in ("cors", "read", "script", "image", "socket"))
    assert page.runs({}) == []
    log = page.log.read_text()
    assert log.count("is not this page") + log.count("comes from another page") >= 9, "all of it came to the server"
    own = render(f"{page.address}/runs", tmp_path, "--virtual-time-budget=30000")
    assert "No runs to display" in own or "Runs" in own.partition('id="root"')[2]
