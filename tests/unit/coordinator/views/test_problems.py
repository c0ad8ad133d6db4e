"""Problems of a fleet, each with a sentence and what to do."""

from contextlib import closing
from pathlib import Path

import pytest

from coordinator.record.record import Record, open_record
from coordinator.rounds.service.status import ServiceStatus, read_service_status, write_service_status
from coordinator.views.fleet import make_fleet, read_fleet_record
from coordinator.views.problems import Problem, find_problems, next_commands
from coordinator.views.service_facts import DiskSpace, ServiceFacts, make_facts, read_record_facts
from tests.support.records import FLEET_RUN, RUN, begin_run, fleet_run, name_of, write_status


def facts_of(store: Record, folder: Path) -> ServiceFacts:
    return make_facts(read_record_facts(store), folder, read_service_status(folder), None)


def problems_of(store: Record, folder: Path, facts: ServiceFacts | None = None) -> list[Problem]:
    fleet = make_fleet(read_fleet_record(store), folder, read_service_status(folder), {})
    return find_problems(fleet, facts or facts_of(store, folder), folder, None, None)


def serve(folder: Path, **changes: object) -> None:
    status = ServiceStatus(federation="home", broker="mqtt://b:1883", running=[], members=[])
    for name, value in changes.items():
        status = ServiceStatus(**{**{key: getattr(status, key) for key in status.__struct_fields__}, name: value})
    write_service_status(folder, status)


def test_empty_folder_has_no_problem_and_says_what_to_type(tmp_path: Path) -> None:
    with open_record(tmp_path) as store:
        assert problems_of(store, tmp_path) == []
        fleet = make_fleet(read_fleet_record(store), tmp_path, None, {})
        assert next_commands(fleet, facts_of(store, tmp_path), tmp_path, None) == [
            "coordinator init", f"coordinator serve --broker.deployment deployment --runs {tmp_path}",
        ]  # fmt: skip
        serve(tmp_path)
        assert next_commands(fleet, facts_of(store, tmp_path), tmp_path, None) == [
            "coordinator enroll NAME", f"coordinator submit run.toml --runs {tmp_path}",
        ]  # fmt: skip


def test_interrupted_run_says_how_it_is_resumed(tmp_path: Path) -> None:
    with closing(begin_run(tmp_path)) as store:
        store.runs.update(RUN, status="interrupted")
        [problem] = problems_of(store, tmp_path)
    assert problem.severity == "bad"
    assert problem.command == f"coordinator start --resume {RUN} --runs {tmp_path}"


def test_ending_certificates_name_the_command_that_replaces_them(tmp_path: Path) -> None:
    with open_record(tmp_path) as store:
        facts = facts_of(store, tmp_path)
        ends = {"authority": 0.0, "broker": 0.0, "coordinator": 1e12}
        found = problems_of(store, tmp_path, facts._replace(certificates=ends))
    assert [problem.command for problem in found] == ["coordinator rotate-authority", "coordinator renew"]


def test_queue_without_a_service_is_a_problem(tmp_path: Path) -> None:
    with open_record(tmp_path) as store:
        store.runs.submit("night", {"method": "fedavg"})
        [problem] = problems_of(store, tmp_path)
        assert problem.command == f"coordinator serve --runs {tmp_path}"
        serve(tmp_path)
        assert problems_of(store, tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"connected": False}, "no connection to its broker"), ({"backup": "missing"}, "no backup yet")],
)
def test_service_reports_what_it_lacks(tmp_path: Path, changes: dict[str, object], word: str) -> None:
    with open_record(tmp_path) as store:
        serve(tmp_path, **changes)
        [problem] = problems_of(store, tmp_path)
    assert word in problem.text


def test_full_disk_names_the_command_that_makes_room(tmp_path: Path) -> None:
    with open_record(tmp_path) as store:
        facts = facts_of(store, tmp_path)._replace(disk=DiskSpace(10**8, 10**10))
        [problem] = problems_of(store, tmp_path, facts)
    assert "100 MB" in problem.text
    assert problem.command == f"coordinator gc --runs {tmp_path}"


def test_lost_object_store_is_named_while_its_run_is_served(tmp_path: Path) -> None:
    with closing(fleet_run(tmp_path, 20)) as store:
        write_status(tmp_path / FLEET_RUN, store_trouble="connection refused")
        [problem] = [one for one in problems_of(store, tmp_path) if "object store" in one.text]
        assert problem[:2] == ("bad", f"The object store of run {FLEET_RUN} cannot be used: connection refused.")
        assert problem.run == FLEET_RUN
        write_status(tmp_path / FLEET_RUN, store_trouble="")
        assert not [one for one in problems_of(store, tmp_path) if "object store" in one.text]


def test_quarantined_and_paused_are_named_with_their_commands(tmp_path: Path) -> None:
    """The fleet's refusals are of this hour."""
    with closing(fleet_run(tmp_path, 20, refusals=30)) as store:
        write_status(tmp_path / FLEET_RUN)
        store.runs.pause(FLEET_RUN, paused=True)
        commands = [problem.command or "" for problem in problems_of(store, tmp_path)]
    assert [command.split(" --runs")[0] for command in commands] == [
        f"coordinator unpause {FLEET_RUN}", f"coordinator show {FLEET_RUN}",
        f"coordinator quarantine {FLEET_RUN} --release {name_of(3)}",
    ]  # fmt: skip
