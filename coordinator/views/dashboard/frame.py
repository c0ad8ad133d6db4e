"""The frame of all pages: navigation, parts that follow the record, and errors as one line."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import urlencode

from markupsafe import Markup
from nicegui import ui

from coordinator.record.devices import RefusalCount
from coordinator.record.tables import RefusalRecord
from coordinator.rounds.status import LiveStatus, read_status
from coordinator.security.credentials import Credentials
from coordinator.security.folder import Deployment
from coordinator.views.dashboard.charts import Options
from coordinator.views.dashboard.experiments import Experiments
from coordinator.views.dashboard.reader import RecordReader
from fedvit.errors import ConfigError, FedvitError
from profiles.report.page import environment
from profiles.report.tables import Column, Sheet, clock, format_value

if TYPE_CHECKING:
    from jinja2 import Environment

T = TypeVar("T")

EVERY_S = 1.0
"""Interval at which a page looks for news."""
PAGES = (("/", "Runs"), ("/fleet", "Fleet"), ("/compare", "Compare"))


@dataclass(frozen=True)
class Site:
    """Settings and sources that all pages share."""

    reader: RecordReader
    folder: Path  # of the runs
    experiments: Experiments
    deployment: Deployment | None  # the devices' certificates
    credentials: Credentials  # who may change something

    def list_revoked(self) -> set[str]:
        """Devices whose certificates were revoked."""
        if self.deployment is None:
            return set()
        with self.deployment.registry.read() as rows:
            return set(rows.revocations.list_devices())


@cache
def templates() -> "Environment":
    """Return the templates of the pages, with what all of them use."""
    pages = environment("coordinator.views.dashboard")
    pages.filters |= {"clock": clock}
    pages.globals |= {"text": format_value, "anchor": anchor}
    return pages


def link(path: str, **values: object) -> str:
    """Return an address within the dashboard.

    >>> link("/device", run="r", device="a&b <i>")
    '/device?run=r&device=a%26b+%3Ci%3E'
    """
    return f"{path}?{urlencode(values)}" if values else path


def anchor(path: str, text: str, **values: object) -> Markup:
    """Return a link within the dashboard as markup; text and address are escaped."""
    return Markup('<a href="{}">{}</a>').format(link(path, **values), text)


@contextmanager
def page(title: str, here: str) -> Iterator[None]:
    """The frame of a page; `here` is the address of its entry in the navigation."""
    ui.page_title(f"{title} · fedvit")
    Part("frame.html", "navigation", "frame").show(pages=PAGES, here=here)
    with ui.element("div").props('id="content" tabindex="-1"'):
        yield


class Part:
    """A block of a page's template, whose values are escaped. It is sent when its text changes."""

    def __init__(self, template: str, block: str, style: str = "part") -> None:
        self._template, self._block = templates().get_template(template), block
        self._html = ui.html("", sanitize=False).classes(style)

    def show(self, **values: Any) -> None:
        """Render the block with these values."""
        text = "".join(self._template.blocks[self._block](self._template.new_context(values)))
        if text != self._html.content:
            self._html.content = text


class LiveChart:
    """A chart that is sent when its data change; `name` is read to people who do not see it."""

    def __init__(self, name: str) -> None:
        self._shown: Options = {}
        self._chart = ui.echart({}, renderer="svg").classes("figure").props(f'role="img" aria-label="{name}"')

    def show(self, options: Options) -> None:
        """Draw the chart with these options."""
        if options != self._shown:
            self._shown = options
            self._chart.options.clear()
            self._chart.options.update(options)
            self._chart.update()


class Figures(Generic[T]):
    """The charts of a page, by their names; each is drawn from the same data."""

    def __init__(self, drawings: Mapping[str, Callable[[T], Options]]) -> None:
        with ui.element("div").classes("figures"):
            self._charts = [(LiveChart(name), draw) for name, draw in drawings.items()]

    def show(self, data: T) -> None:
        """Draw all charts from the same data."""
        for chart, draw in self._charts:
            chart.show(draw(data))


async def follow(refresh: Callable[[], Awaitable[None]]) -> None:
    """Fill a page, and fill it again about once a second. An error is shown as one line, and the page tries again."""
    trouble = Part("frame.html", "trouble")

    async def attempt() -> None:
        try:
            await refresh()
        except FedvitError as error:
            trouble.show(error=str(error))
        else:
            trouble.show(error=None)

    await attempt()
    ui.timer(EVERY_S, attempt, immediate=False)


def find_status(site: Site, run: str) -> LiveStatus | None:
    """Return what the run's coordinator does; None if none has served it, or its file cannot be read."""
    try:
        return read_status(site.folder / run)
    except ConfigError:
        return None


def refusal_sheet(refusals: Sequence[RefusalRecord], run: str | None = None) -> Sheet:
    """Make the table of single refusals, the newest first: of all devices of a run, or of one device."""
    device = Column("device", "device", lambda entry: anchor("/device", entry.device, run=run, device=entry.device))
    shown = [
        Column("at", "at, UTC"),
        device if run else Column("round", "round"),
        Column("kind", "of", describe_kind),
        Column("reason", "reason"),
    ]
    return Sheet(reversed(refusals), shown)


def describe_kind(entry: RefusalRecord | RefusalCount) -> str:
    """Name what was refused, or did not arrive."""
    return f"{entry.kind}, nothing arrived" if entry.lost else entry.kind
