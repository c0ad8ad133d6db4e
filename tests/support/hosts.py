"""Services that share a record in PostgreSQL and a broker: one leads, others stand by."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from coordinator.security.broker import start_broker
from tests.support.forked import Forked
from tests.support.postgresql import Postgresql
from tests.support.programs import DEVICES, ROUNDS, Stage
from tests.support.proxy import Links


class Hosts:
    """Services that share a broker and, unless they get one of their own, a folder of runs; each has a link of its own
    to the database."""

    def __init__(self, stage: Stage, server: Postgresql, links: Links) -> None:
        self._stage = stage
        self.links = links
        stage.environment["PGPORT"] = str(server.port)
        self.url = server.schema()
        # without a port, which is each service's own
        stage.environment["FEDVIT_RECORD"] = self.url.replace(f":{server.port}/", "/")

    def serve(self, name: str, *arguments: str, runs: Path | None = None) -> Forked:
        given = ["serve", "--runs", str(runs or self._stage.out), "--broker", f"mqtt://127.0.0.1:{self._stage.port}"]
        environment = self._stage.environment | {"PGPORT": str(self.links.port(name))}
        return self._stage.keep(
            Forked("coordinator.cli", [*given, *arguments], self._stage.log_path(name), environment)
        )

    def query(self, sql: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.url) as connection:
            return connection.execute(sql.encode()).fetchall()

    def is_at_work(self, round_number: int) -> bool:
        return bool(self.query(f"select 1 from tasks where round = {round_number} and outcome is null"))

    def check_run(self, undisturbed: bytes) -> None:
        """The run is that of a single service: no result was lost or counted twice, and the tensors are the same."""
        counted = self.query("select round, count(*) from results where kind = 'train' group by round order by round")
        assert counted == [(number, len(DEVICES)) for number in range(1, ROUNDS + 1)]
        assert self._stage.model() == undisturbed


@contextmanager
def make_hosts(stage: Stage, server: Postgresql) -> Iterator[Hosts]:
    """Provide a broker, and links to the database, for services of a stage."""
    broker = start_broker("mosquitto", stage.folder / "broker", port=stage.port)
    with Links(server.port) as links:
        yield Hosts(stage, server, links)
        stage.close()
    broker.stop()
