"""`python -m bench`: runs in a checkout of the source; the wheel does not contain it."""

import signal

from bench.commands import bench_command
from bench.simulate.command import simulate_command
from fedvit import command_line

bench_command.add_command(simulate_command)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that child processes are stopped on the way out
    command_line.run(bench_command, "bench")
