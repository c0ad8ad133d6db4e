"""`python -m bench api`: latency of `GET /runs` at a given rate, and the processor time of commands."""

import http.client
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median, quantiles

from bench.child import time_command
from bench.edge import read_cpu_s
from bench.reporting import Progress, Report
from coordinator.record.record import Record, open_record
from coordinator.record.tables import SavedState
from coordinator.security.api_tokens import ApiTokens
from fedvit.errors import FedvitError
from fleet.processes import program

CLIENTS = 8
COMMANDS = (["runs"], ["show", "run-0000"], ["status", "run-0000"], ["submit", "--rounds", "2"])
STARTS = 5
PAGE = "/api/v1/runs?limit=50"


def run_api_bench(
    *, runs: int = 500, rate: int = 200, seconds: int = 20, progress: Progress = lambda line: None
) -> Report:
    """Serve a folder of `runs` runs, whose record changes once a second, and ask at `rate` requests a second.

    Raises FedvitError if a request fails.
    """
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
        out = Path(folder) / "runs"
        _write_runs(out, runs)
        progress(f"{runs} runs are written")
        token = ApiTokens(out).add("bench", "viewer")
        command = [*program("coordinator.cli"), "dashboard", "--api-only", "--port", "0", "--runs", str(out)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().split("/ ")[0].rpartition(":")[2])
            _ask(port, token, 20, 20)  # warm
            still = _ask(port, token, rate, rate * seconds)
            progress("measured with a record that does not change")
            over = threading.Event()
            writer = threading.Thread(target=_change, args=(out, over))
            writer.start()
            changing = _ask(port, token, rate, rate * seconds)
            over.set()
            writer.join()
            server_s = round(read_cpu_s(server.pid), 2)
        finally:
            server.terminate()
            server.wait()
        commands = {
            words[0]: round(median(time_command(out, *words)[1] for _ in range(STARTS)), 3) for words in COMMANDS
        }
    return {
        "runs": runs,
        "rate": rate,
        "still_ms": still,
        "changing_ms": changing,
        "server_processor_s": server_s,
        "command_processor_s": commands,
    }


def _write_runs(out: Path, count: int) -> None:
    with open_record(out) as store:
        with store.database.together():  # one commit
            for number in range(count):
                _write_run(store, f"run-{number:04d}", number)
        for number in range(count):
            name = f"run-{number:04d}"
            (out / name).mkdir()
            (out / name / "status.json").write_text(
                '{"at": "2026-01-01T00:00:00+00:00", "doing": "-", "waiting_for": [], "resting": [], "online": 0}'
            )


def _write_run(store: Record, name: str, seed: int) -> None:
    store.runs.create(name, {"method": "fedavg", "model": "vit_small_images", "rounds": 3, "seed": seed})
    for number in (1, 2, 3):
        store.rounds.open(name, number, ["a", "b"])
        store.rounds.close(name, number, SavedState({}, None, {}), {"devices_s": 2.5, "server_s": 0.5})
    store.runs.update(name, status="finished")


def _change(out: Path, over: threading.Event) -> None:
    with open_record(out, check=False) as store:
        while not over.wait(1.0):
            store.runs.update("run-0001", reason=str(time.time()))


def _ask(port: int, token: str, rate: int, count: int) -> dict[str, float]:
    """Send requests at their times from CLIENTS connections; return latencies in ms, from the time of each request."""
    due: SimpleQueue[float] = SimpleQueue()
    began = time.monotonic() + 0.2
    for number in range(count):
        due.put(began + number / rate)
    latencies: list[float] = []
    failed: list[int] = []

    def client() -> None:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while True:
            try:
                at = due.get_nowait()
            except Empty:
                return
            time.sleep(max(0.0, at - time.monotonic()))
            link.request("GET", PAGE, headers={"authorization": f"Bearer {token}"})
            answer = link.getresponse()
            answer.read()
            latencies.append(1000 * (time.monotonic() - at))
            if answer.status != 200:
                failed.append(answer.status)

    clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    if failed:
        raise FedvitError("FV0001", f"{len(failed)} of {count} requests failed, with status {failed[0]}")
    parts = quantiles(latencies, n=100)
    return {"p50": round(parts[49], 1), "p99": round(parts[98], 1), "highest": round(max(latencies), 1)}
