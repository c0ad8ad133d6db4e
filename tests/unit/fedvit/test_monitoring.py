import base64
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from click.testing import CliRunner
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fedvit.errors import ConfigError
from fedvit.monitoring import (
    HUNG_S,
    Cause,
    Condition,
    Monitor,
    Watched,
    serve_metrics,
)
from fedvit.small_server import ListenAddress, SmallServer, parse_listen
from fedvit.timings import LoopWatch
from tests.support.codes import has_code
from tests.support.command_lines import PROGRAMS
from tests.support.waiting import WAIT_S

AT_ONCE = SmallServer.at_once
FREE = ListenAddress("127.0.0.1", 0)


class One(Collector):
    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("fedvit_test", "One.", 1)


class Wrong(Collector):
    def collect(self) -> Iterator[Metric]:
        raise KeyError("gone")


def ask_page(monitor: Monitor, page: str) -> tuple[int, str]:
    try:
        with urlopen(monitor.url.replace("/metrics", page), timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


READY = Condition(ready=True, role="leader")


def make_watched(collector: Collector, *, silent_s: float = 0.0, condition: Condition = READY) -> Watched:
    loop = LoopWatch(0.1)
    loop._turned_at -= silent_s
    return Watched(collector, lambda: [loop], lambda: condition)


def test_metrics_are_those_of_the_collector_and_of_the_process() -> None:
    with serve_metrics(FREE) as monitor:
        status, text = ask_page(monitor, "/readyz")
        assert (status, json.loads(text)["causes"][0]["cause"]) == (503, "starting")
        assert ask_page(monitor, "/healthz") == (200, "ok\n")
        monitor.show(lambda: make_watched(One()))
        status, text = ask_page(monitor, "/metrics")
        assert status == 200
        assert "\nfedvit_test 1.0\n" in text
        assert "process_resident_memory_bytes" in text
        status, text = ask_page(monitor, "/readyz")
        assert (status, json.loads(text)) == (200, {"ready": True, "role": "leader", "causes": []})
        assert ask_page(monitor, "/healthz?verbose") == (200, "ok\n")
        assert ask_page(monitor, "/other") == (404, "/metrics /healthz /readyz\n")


PASSWORD = "sixteen letters!"


def basic(password: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(f'fedvit:{password}'.encode()).decode()}"}


@pytest.mark.parametrize("page", ["/metrics", "/healthz", "/readyz", "/other"])
def test_page_is_only_for_those_who_have_the_password(page: str, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    with serve_metrics(FREE._replace(password_file=file)) as monitor:
        monitor.show(lambda: make_watched(One()))
        for headers in ({}, basic("another"), {"Authorization": "Basic \xff"}, {"Authorization": f"Bearer {PASSWORD}"}):
            with pytest.raises(HTTPError) as refused:
                urlopen(Request(monitor.url.replace("/metrics", page), headers=headers), timeout=WAIT_S)
            assert (refused.value.code, refused.value.read()) == (401, b"")
        if page != "/other":
            with urlopen(
                Request(monitor.url.replace("/metrics", page), headers=basic(PASSWORD)), timeout=WAIT_S
            ) as answer:
                assert answer.status == 200


def test_socket_is_only_for_its_owner(tmp_path: Path) -> None:
    """One that a killed program left is replaced; one that is served is not."""
    path = tmp_path / "metrics.socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with serve_metrics(parse_listen(f"unix:{path}")) as monitor:
        monitor.show(lambda: make_watched(One()))
        assert path.stat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(path))
            link.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert b"\nfedvit_test 1.0\n" in b"".join(iter(lambda: link.recv(65536), b""))
        with pytest.raises(ConfigError), serve_metrics(parse_listen(f"unix:{path}")):
            pass
    assert not path.exists()


@pytest.mark.parametrize(
    "program",
    [
        ["coordinator", "start"],
        ["coordinator", "serve"],
        ["edge-client"],
        ["fleet", "region", "--state", "region", "--centre", "127.0.0.1"],
    ],
)
def test_port_without_a_password_is_refused_with_both_ways(program: list[str]) -> None:
    done = CliRunner().invoke(PROGRAMS[program[0]], [*program[1:], "--prometheus", "127.0.0.1:0"])
    assert isinstance(done.exception, ConfigError)
    assert re.search("--prometheus-password-file FILE.*unix:PATH", str(done.exception))


def test_password_that_is_short_or_missing_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "password"
    with pytest.raises(ConfigError), serve_metrics(FREE._replace(password_file=file)):
        pass
    file.write_text("short")
    with pytest.raises(ConfigError, check=has_code("FV1021")), serve_metrics(FREE._replace(password_file=file)):
        pass


def test_standby_that_leads_now_is_shown_instead() -> None:
    with serve_metrics(FREE) as monitor:
        monitor.show(lambda: make_watched(Wrong(), condition=Condition(ready=True, role="standby")))
        assert json.loads(ask_page(monitor, "/readyz")[1])["role"] == "standby"
        monitor.show(lambda: make_watched(One()))
        assert json.loads(ask_page(monitor, "/readyz")[1])["role"] == "leader"
        assert ask_page(monitor, "/metrics")[0] == 200, "the former collector is no longer asked"


def test_trouble_is_answered_with_its_reason() -> None:
    lost = Condition(ready=False, role="leader", causes=(Cause("broker", "no connection to the broker"),))
    with serve_metrics(FREE) as monitor:
        monitor.show(lambda: make_watched(Wrong(), silent_s=HUNG_S + 40, condition=lost))
        status, text = ask_page(monitor, "/readyz")
        expected = {"cause": "broker", "reason": "no connection to the broker", "run": None}
        assert (status, json.loads(text)["causes"]) == (503, [expected])
        status, text = ask_page(monitor, "/healthz")
        assert status == 503
        assert "has not turned for" in text
        assert ask_page(monitor, "/metrics") == (500, "KeyError: 'gone'\n")


def test_clients_that_send_nothing_do_not_keep_others_away_for_ever() -> None:
    """More connections than are served at a time are closed; when some leave, there is room again."""
    with serve_metrics(FREE) as monitor:
        port = int(monitor.url.rpartition(":")[2].partition("/")[0])
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(AT_ONCE + 2)]
        assert [link.recv(1) for link in silent[AT_ONCE:]] == [b"", b""]
        for link in silent[:AT_ONCE]:
            link.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert link.recv(1) == b"H"
            link.close()


def test_port_that_is_taken_is_an_error_of_the_operator() -> None:
    with serve_metrics(FREE) as monitor:
        port = int(monitor.url.rpartition(":")[2].partition("/")[0])
        with (
            pytest.raises(ConfigError, check=has_code("FV1021", str(port))),
            serve_metrics(ListenAddress("127.0.0.1", port)),
        ):
            pass


def test_without_an_address_nothing_is_served() -> None:
    with serve_metrics(None) as monitor:
        monitor.show(lambda: pytest.fail("nothing is to be made"))
        assert monitor.url == ""


@pytest.mark.parametrize("text", ["", "x", "70000", ":1", "host:", "a:b:1", "[::1]", "127.0.0.1", "unix:"])
def test_address_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_listen(text)
