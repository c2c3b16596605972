"""Take the pictures of docs/first-hour-in-the-ui.md from a running page; `make screenshots` runs this.

It prepares a warehouse of its own: it runs flights, restores a month in a backfill, and kills a run with SIGKILL, so
that the page shows a recovery. Each picture is taken once the page shows its subject.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path

from playwright.sync_api import Page as Browser
from playwright.sync_api import sync_playwright

from siltstone.catalog.warehouse import OpenWarehouse
from tests.dagster.page import LOCATION, REPOSITORY_NAME, Page, browser, served

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
WINDOW, WIDE, LOW, SCALE = (1750, 1000), (2200, 1150), (1750, 320), 0.8
"""width and height of the window: by default, for the graph with details, for a short page; and the pictures' scale"""
MENU = 240
"""width of Dagster's menu, which the pictures leave out"""
WAIT_MS, STILL_MS, LOOKS = 180_000, 1_000, 30
STREAM = "flights"
DAYS = [f"2013-01-{day:02d}" for day in range(2, 32)]
ENVIRONMENT = {"SILTSTONE_RECOVERY__DELAY_S": "1", "SILTSTONE_UI__SENSORS_S": "2"}


def main() -> None:
    """Prepare the warehouse and take every picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PICTURES, help="directory of the pictures")
    parser.add_argument("--warehouse", type=Path, help="warehouse to use; default a new one, removed at the end")
    given = parser.parse_args()
    executable = browser()
    if executable is None:
        parser.error("no Chromium found: apt install chromium")
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="siltstone-pictures-") as scratch:
        warehouse = given.warehouse or Path(scratch) / "warehouse"
        with served(warehouse, Path(scratch) / "log", **ENVIRONMENT) as page:
            backfill = set_scene(page, warehouse)
            with sync_playwright() as playwright:
                chromium = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
                view = chromium.new_page(device_scale_factor=SCALE)
                view.set_default_timeout(WAIT_MS)
                take_pictures(view, page.address, backfill, given.out)
                chromium.close()


def set_scene(page: Page, warehouse: Path) -> str:
    """Run, restore and kill the stream, wait for recovery and sweep, run again; return the backfill's id."""
    run = _launch(page, 40)
    _expect(page, run, "SUCCESS")
    backfill = page.backfill(f"{STREAM}/restored_state", DAYS)
    assert page.backfilled(backfill)["status"] == "COMPLETED_SUCCESS"
    with OpenWarehouse.open_existing(str(warehouse)) as place:
        before = place.catalog.checkpoints.list(STREAM)[-1].id
        killed = _launch(page, 20)
        process = page.process(killed)
        page.wait(
            lambda: place.catalog.checkpoints.list(STREAM)[-1].id > before + 3 or None, "checkpoints to kill behind"
        )
        os.kill(process, signal.SIGKILL)
    _expect(page, killed, "FAILURE")
    recovery = page.wait(lambda: next(iter(page.runs({"siltstone/recovers": killed})), None), "the recovery").id
    _expect(page, recovery, "SUCCESS")
    sweep = page.wait(lambda: next(iter(page.runs({"siltstone/follows": recovery})), None), "the sweep").id
    _expect(page, sweep, "SUCCESS")
    _expect(page, _launch(page, 5), "SUCCESS")
    with OpenWarehouse.open_existing(str(warehouse)) as place:
        # A materialization that was killed with its run blocks its operator until its lease has expired.
        page.wait(lambda: not place.catalog.leases.list_live(STREAM) or None, "the leases of what was killed to expire")
    made = [f"{STREAM}/materialization", f"{STREAM}/full_snapshot"]
    checks = [
        f"{STREAM}/materialization:materialization_not_stalled",
        f"{STREAM}/full_snapshot:restore_equals_snapshot",
    ]
    _expect(page, page.materialize(*made, checks=checks), "SUCCESS")
    return backfill


def take_pictures(view: Browser, address: str, backfill: str, out: Path) -> None:
    """Take every picture, once the page shows its texts."""

    def take(
        name: str,
        path: str,
        *shown: str,
        click: str | None = None,
        then: str | None = None,
        window: tuple[int, int] = WINDOW,
    ) -> None:
        view.set_viewport_size({"width": window[0], "height": window[1]})
        view.goto(f"{address}{path}")
        for text in shown:
            view.get_by_text(text).filter(visible=True).first.wait_for()
        if click:
            view.get_by_text(click).first.click()
        if then:
            view.locator(then).first.wait_for()
        _await_still(view)
        picture = out / f"{name}.png"
        clip = {"x": MENU, "y": 0, "width": window[0] - MENU, "height": window[1]}
        view.screenshot(path=picture, animations="disabled", clip=clip)  # pyright: ignore[reportArgumentType]
        print(f"{picture} {picture.stat().st_size >> 10} kB", flush=True)

    lineage = f"/locations/{REPOSITORY_NAME}@{LOCATION}/asset-groups/{STREAM}/lineage"
    take("asset-graph", lineage, "checkpoints", "restored_state", "Latest event", window=WIDE)
    events = f"/assets/{STREAM}/checkpoints?view=events"
    take("checkpoint", events, "chain_picture", "newest_checkpoints")
    take("chain", events, "chain_picture", click="[Show Markdown]", then=f"img[alt='chain of {STREAM}']")
    take("checks", f"/assets/{STREAM}/checkpoints?view=checks", "Latest execution", "sink_agrees")
    take("backfill", f"/runs/b/{backfill}", "100% completed", "restored_state", window=LOW)
    take("recovery", "/runs", "siltstone__recover", "siltstone__sweep")


def _await_still(view: Browser) -> None:
    """Wait until the page has loaded and stopped changing, up to a time limit because some pages have a clock."""
    before = b""
    for _ in range(LOOKS):
        now = view.screenshot(animations="disabled")
        if now == before and not view.get_by_text("Loading").filter(visible=True).count():
            return
        before = now
        view.wait_for_timeout(STILL_MS)


def _launch(page: Page, batches: int) -> str:
    config = {"batches": batches, "options": {"period": "day"}}
    return page.launch(STREAM, {"ops": {f"{STREAM}__run": {"config": config}}})


def _expect(page: Page, run: str, status: str) -> None:
    found = page.ended(run).status
    failures = [event for event in page.events(run) if "FAILURE" in str(event.get("eventType"))]
    assert found == status, f"run {run} ended as {found}: {failures}"


if __name__ == "__main__":
    main()
