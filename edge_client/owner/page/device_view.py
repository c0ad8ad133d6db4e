"""The page's first view: what the device does now, what it may do, and what it has used of that."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from edge_client.health.readiness import Readiness
from edge_client.health.status import Status, read_status
from edge_client.owner.page.html import Child, make_part, render, tag
from edge_client.owner.page.use import LedgerUse
from edge_client.settings import DeviceSettings
from edge_client.storage.features import FEATURES
from edge_client.storage.ledger import describe_sent
from edge_client.storage.pause import OwnerPause
from edge_client.storage.state import in_use, status_file
from fedvit.errors import ConfigError
from fedvit.files import folder_bytes
from fedvit.policy import describe_policy
from fedvit.quantities import format_bytes, format_count, format_seconds

REFRESH_S = 3


class DevicePart:
    """Shows the device whose state is in a folder, by its files alone."""

    def __init__(self, settings: DeviceSettings, state: Path, use: LedgerUse) -> None:
        self._settings = settings
        self._state = state
        self._pause = OwnerPause(state)
        self._use = use

    def show(self, name: str, waiting: int) -> bytes:
        """Return the view; `waiting` images have no label."""
        try:
            status, reason = read_status(status_file(self._state)), ""
        except ConfigError as error:
            status, reason = None, str(error)
        is_running = in_use(self._state)
        return render(
            name,
            name,
            "/",
            make_part(
                "now", _describe_now(status, is_running, reason), self._show_pause(status if is_running else None)
            ),
            make_part("past", tag("dl", _describe_past(status), class_="list") if status else None),
            make_part("left", tag("h2", "What left today"), self._describe_left()),
            make_part("images", tag("h2", "Pictures"), _describe_images(status, waiting)),
            make_part("limits", tag("h2", "Hours and budgets"), self._describe_limits(status, is_running)),
            tag("h2", "What may leave"),
            tag("dl", self._describe_policy(), class_="list"),
            tag(
                "p",
                "From ",
                tag("code", "policy.toml"),
                " of this device and the options of this page. ",
                class_="note",
            ),
            every_s=REFRESH_S,
        )

    def _show_pause(self, running: Status | None) -> Element:
        """Return the button; `running` is the status of a device that runs."""
        if (began_s := self._pause.began_s()) is None:
            note = "A pause lets the task under way end. After it the device takes none, also after a restart."
            return tag(
                "form",
                tag("button", "Pause this device", id="pause"),
                tag("p", note, class_="note"),
                method="post", action="/pause", class_="pause",
            )  # fmt: skip
        since = f"Paused by you since {format_time(began_s)}. "
        more = "It takes no task when it runs again."
        if running:
            more = "It ends the task under way, and takes no other." if running.doing.run else "It takes no task."
        return tag(
            "form",
            tag("p", since, more),
            tag("button", "Resume", id="pause"),
            method="post", action="/resume", class_="pause banner mild",
        )  # fmt: skip

    def _describe_left(self) -> Iterator[Element]:
        text = describe_sent(self._use.read().today)
        yield tag("p", f"{text[:1].upper()}{text[1:]}.")
        yield tag("p", tag("a", "Everything that left", href="/left"))

    def _describe_policy(self) -> Iterator[Element]:
        for line in describe_policy(self._settings.policy):
            name, _, text = line.partition(": ")
            yield make_row(name[:1].upper() + name[1:], text)

    def _describe_limits(self, status: Status | None, is_running: bool) -> Element:
        policy = self._settings.policy
        train = policy.train
        not_now = Readiness(policy=policy, pause=self._pause).not_now()
        rows = [make_row("Takes a task now", f"no: {not_now.reason}" if not_now else "yes")]
        hours = [str(train.hours)] if train.hours else []
        hours += [f"not {train.quiet_hours}"] if train.quiet_hours else []
        rows.append(make_row("Hours", ", ".join(hours) or "any time"))
        sent_bytes = self._use.read().bytes_of_24_hours
        rows.append(_show_budget("Results in 24 hours", sent_bytes, policy.send.max_bytes_per_day))
        used = status.rss_bytes if status and is_running else 0
        memory = status.memory_budget_bytes if status and is_running else train.memory
        rows.append(_show_budget("Memory", used, memory))
        stored_bytes = sum(folder_bytes(self._state / name) for name in ("vault", "blobs", "models", FEATURES))
        rows.append(_show_budget("Disk", stored_bytes, train.disk))
        if train.min_battery is not None:
            rows.append(make_row("Battery", f"{train.min_battery} % at least, or a charger"))
        if train.max_temperature is not None:
            rows.append(make_row("Temperature", f"{train.max_temperature:g} °C at most when a task begins"))
        if train.round_deadline is not None:
            rows.append(make_row("Time of a round", f"{format_seconds(train.round_deadline)} at most"))
        return tag("dl", rows, class_="list")


def _describe_now(status: Status | None, is_running: bool, reason: str) -> Iterator[Child]:
    if status is None:
        yield tag("h1", "It has not run yet")
        yield tag("p", reason, class_="note")
        return
    doing = status.doing
    state = doing.state if is_running else "not running"
    yield tag("h1", state[:1].upper() + state[1:])
    if not is_running:
        yield tag("p", f"Since {format_time(status.written_s)} or later.", class_="note")
    elif doing.run:
        yield tag("p", f"Round {doing.round} of {doing.run}")
        if doing.total_steps:
            done = doing.done_steps or 0
            label = f"step {done} of {doing.total_steps}"
            yield tag("progress", value=done, max=doing.total_steps, aria_label=label)
            yield tag("p", label, class_="note")


def _describe_past(status: Status) -> Iterator[Element]:
    doing = status.doing
    if last := doing.last:
        details = [format_count(last.samples, "picture")] if last.samples is not None else []
        details += [f"{name} {value:.4g}" for name, value in last.metrics.items()]
        kind = "trained" if last.kind == "train" else "tested"
        what = f"{kind} in round {last.round} of {last.run}: {last.outcome}"
        yield make_row("Last task", f"{', '.join([what, *details])} ({format_time(last.ended_s)})")
    else:
        yield make_row("Last task", "none since the start")
    if error := doing.last_error:
        yield make_row("Last error", f"{error.what} ({format_time(error.at_s)})")
    yield make_row("Coordinator", f"{status.broker}, federation {status.federation}")
    yield make_row("Software", f"fedvit {status.software}")


def _describe_images(status: Status | None, waiting: int) -> Iterator[Element]:
    if status and status.doing.classes:
        rows = [
            tag("tr", tag("th", name, scope="row"), tag("td", str(count.train)), tag("td", str(count.test)))
            for name, count in status.doing.classes.items()
        ]
        heads = tag("tr", [tag("th", text, scope="col") for text in ("Class", "Training", "Testing")])
        yield tag("table", tag("thead", heads), tag("tbody", rows))
    else:
        yield tag("p", "The device has used none yet.")
    for reason, files in status.doing.unusable.items() if status else ():
        more = ", ..." if files.count > len(files.examples) else ""
        yield tag("p", f"{files.count} not used, {reason}: {', '.join(files.examples)}{more}", class_="note")
    if waiting:
        yield tag("p", tag("a", f"Label {format_count(waiting, 'picture')}", href="/label", class_="action"))


def make_row(name: str, *content: Child | Sequence[Child]) -> Element:
    """Return a row of a list of names and values."""
    return tag("div", tag("dt", name), tag("dd", *content))


def _show_budget(name: str, used: float, limit: float | None) -> Element:
    if limit is None:
        return make_row(name, f"{format_bytes(used)}, no limit" if used else "no limit")
    label = f"{format_bytes(used)} of {format_bytes(limit)}"
    return make_row(name, label, tag("meter", value=min(used, limit), max=limit, aria_label=f"{name}: {label}"))


def format_time(seconds: float) -> str:
    """Return a time by this device's clock; of today without the date."""
    then, now = time.localtime(seconds), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%Y-%m-%d %H:%M", then)
