"""The frame of all pages: navigation, parts that follow the record, and errors as one line."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar
from urllib.parse import urlencode

from markupsafe import Markup, escape
from nicegui import ui

from coordinator.record.devices import RefusalCount
from coordinator.record.tables import RefusalRecord
from coordinator.rounds.status import LiveStatus, read_status
from coordinator.security.adoption_service import AdoptionService
from coordinator.security.api_tokens import ApiUser, UserRole
from coordinator.security.credentials import ApiCredentials
from coordinator.security.folder import Deployment
from coordinator.security.registry import JoinedDevice
from coordinator.views.dashboard.charts import Options
from coordinator.views.dashboard.experiments import Experiments
from coordinator.views.dashboard.reader import RecordReader, RegistryReader
from coordinator.views.service_facts import rough
from fedvit.errors import ConfigError, FedvitError
from profiles.report.page import environment
from profiles.report.tables import Column, Sheet, clock, format_value

if TYPE_CHECKING:
    from jinja2 import Environment

T = TypeVar("T")

Submit = Callable[[dict[str, Any], str | None, bool], tuple[str, str | None]]
"""Puts a configuration into the queue, under a name or its usual one; the flag says whether it may name places of the
server. Returns the run's name, and a warning."""
Act = Literal["submit", "pause", "cancel", "label", "release", "revoke", "enrol", "retry", "promote"]
_LEAST: dict[Act, UserRole] = {"revoke": "admin", "enrol": "admin"}
"""Least role of an act; others need an operator."""
SESSION = "fedvit.session"
"""Key of a request's scope with the session of who asks."""
EVERY_S = 1.0
"""Interval at which a page looks for news."""
PAGES = (
    ("/", "Fleet"),
    ("/runs", "Runs"),
    ("/devices", "Devices"),
    ("/models", "Models"),
    ("/service", "Service"),
    ("/compare", "Compare"),
)


@dataclass(frozen=True)
class Site:
    """Settings and sources that all pages share."""

    reader: RecordReader
    folder: Path  # of the runs
    experiments: Experiments
    deployment: Deployment | None  # the devices' certificates
    credentials: ApiCredentials  # who may change something
    submit: Submit

    @property
    def user(self) -> ApiUser:
        """The person who looks at a page."""
        user: ApiUser = ui.context.client.request.scope[SESSION].identity
        return user

    def may(self, act: Act) -> bool:
        """Return whether who looks at a page may do something."""
        return self.user.may(_LEAST.get(act, "operator"))

    @cached_property
    def registry(self) -> RegistryReader | None:
        """The deployment's devices; None without a deployment."""
        return RegistryReader(self.deployment) if self.deployment else None

    @cached_property
    def adoptions(self) -> AdoptionService | None:
        """The window in which devices ask for adoption; None without a deployment."""
        return AdoptionService(self.deployment) if self.deployment else None

    def read_joined(self) -> dict[str, JoinedDevice]:
        """Return the devices that have joined the deployment, by name; none without a deployment."""
        return self.registry.read().devices if self.registry else {}

    def list_revoked(self) -> set[str]:
        """Devices whose certificates were revoked."""
        return {name for name, device in self.read_joined().items() if device.revoked_at is not None}


@cache
def templates() -> "Environment":
    """Return the templates of the pages, with what all of them use."""
    pages = environment("coordinator.views.dashboard")
    pages.filters |= {"clock": clock, "rough": rough}
    pages.globals |= {"text": format_value, "anchor": anchor, "link": link}
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


class Figures(Generic[T]):
    """The charts of a page, by their titles; each is drawn from the same data, and appears once it has any."""

    def __init__(self, drawings: Mapping[str, Callable[[T], Options | None]]) -> None:
        with ui.element("div").classes("figures"):
            self._charts = [(LiveChart(title), draw) for title, draw in drawings.items()]

    def show(self, data: T) -> None:
        """Draw all charts from the same data."""
        for chart, draw in self._charts:
            chart.show(draw(data))


class LiveChart:
    """A chart that is sent when its data change."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._frame = ui.element("figure")
        self._shown: Options | None = None
        self._chart: Any = None  # made with the first data: nobody wants to see an empty chart

    def show(self, options: Options | None) -> None:
        """Draw the chart with these options; None: there is nothing to draw yet."""
        if options is None or options == self._shown:
            return
        self._shown = options
        if self._chart is None:
            with self._frame:
                ui.html(f"<figcaption>{escape(self._title)}</figcaption>", sanitize=False)
                chart = ui.echart(options, renderer="svg").classes("figure")
                self._chart = chart.props(f'role="img" aria-label="{self._title}"')
        else:
            self._chart.options.clear()
            self._chart.options.update(options)
            self._chart.update()


async def follow(refresh: Callable[[], Awaitable[None]], every_s: float = EVERY_S) -> None:
    """Fill a page, and fill it again at an interval. An error is shown as one line, and the page tries again."""
    trouble = Part("frame.html", "trouble")

    async def attempt() -> None:
        try:
            await refresh()
        except FedvitError as error:
            trouble.show(error=str(error))
        else:
            trouble.show(error=None)

    await attempt()
    ui.timer(every_s, attempt, immediate=False)


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
