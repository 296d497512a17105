"""`kvbus top`, as a person runs it: one picture, and the live one in a terminal of its own."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from tests.flow.command_line import Up, kvbus, up
from tests.flow.terminal import terminal
from tests.flow.town import as_text, prompt
from tests.unit.story_parts import TRANSFER, Pair, flushed

CTRL_C = "\x03"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("top")
    folder.chmod(0o700)
    with up(folder, "--no-http") as started:
        staged = kvbus("stage", "--from", "a", "--to", "b", as_text(prompt("top", 3)), state=folder)
        assert staged.returncode == 0, staged
        yield started


def test_one_picture_shows_instances_and_outcomes_in_80_columns(running: Up) -> None:
    ran = kvbus("top", "--once", state=running.state, env={"COLUMNS": "80"})

    assert ran.returncode == 0, ran
    lines = ran.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in ran.stdout
    for words in ("instances: 2 members", "a/m0 ", "b/m0 ", "transfers in flight: 0", "1 settled", "3/3"):
        assert words in ran.stdout, ran.stdout


def test_one_picture_is_a_document_that_holds_no_prompt(running: Up) -> None:
    ran = kvbus("top", "--json", state=running.state)

    assert ran.returncode == 0, ran
    document = json.loads(ran.stdout)
    assert document["complete"] is True
    assert [(one["instance"], one["pages"]) for one in document["members"]] == [("a", 256), ("b", 256)]
    assert document["ended"][0]["outcome"] == "settled"
    assert document["totals"]["pages_moved"] == 3
    assert as_text(prompt("top", 3))[:20] not in ran.stdout


@pytest.mark.parametrize(("keys", "how"), [("q", "q"), (CTRL_C, "Ctrl-C")], ids=["q", "ctrl-c"])
def test_the_live_picture_shows_a_story_and_leaves_the_terminal_as_it_was(running: Up, keys: str, how: str) -> None:
    with terminal("top", state=running.state) as screen:
        screen.until("1 settled")
        screen.until("b/m0")
        screen.press("\x1b[B")
        screen.until("> b-")
        screen.press("\r")
        screen.until("data plane")
        screen.press("\x1b")
        screen.until_anew("instances: 2 members")

        screen.press(keys)

        assert screen.ended() == 0, how
        assert "Traceback" not in screen.text
        assert screen.is_as_before()


def test_on_a_broker_without_streams_it_says_what_to_run(tmp_path: Path, nats_url: str) -> None:
    ran = kvbus("top", "--once", "--nats", nats_url, state=tmp_path)

    assert ran.returncode == 2, ran
    assert "kvbus init" in ran.stderr


@pytest.fixture
async def bus(broker: EmbeddedBroker) -> AsyncIterator[NatsBus]:
    made = await NatsBus.connect(broker.url, name="t", token=broker.token, limits=EMBEDDED)
    await made.ensure_assets()
    yield made
    await made.close()


async def test_a_broker_that_goes_away_and_comes_back_is_seen(
    broker: EmbeddedBroker, bus: NatsBus, nats_url: str, tmp_path: Path
) -> None:
    pair = Pair(bus)
    pair.whole()
    async with flushed(pair.a, pair.b):
        pass
    with terminal("top", "--nats", nats_url, state=tmp_path) as screen:
        screen.until(TRANSFER)
        await broker.stop()
        screen.until("the broker is away; what stands here was true then")
        await broker.start()
        screen.until_anew(f"{TRANSFER}")
        screen.press("q")
        assert screen.ended() == 0
        assert screen.is_as_before()
