"""The page's view of the ledger: everything that left the device, the newest first."""

import time
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from xml.etree.ElementTree import Element

from edge_client.owner.page.html import make_link, render, tag
from edge_client.storage.ledger import Kind, Ledger, LedgerLine
from fedvit.quantities import format_bytes

PAGE = 100
_WORDS: dict[Kind, str] = {
    "update": "Update of the model",
    "features": "Features of pictures",
    "training counts": "Number of pictures and losses",
    "evaluation counts": "Results of a test",
    "hello counts": "Numbers of pictures and names of classes",
    "model counts": "Numbers of models and answered pictures",
    "failure log": "Lines of the log, after a failure",
    "refused": "Refused",
}


def show_ledger(ledger: Ledger, name: str, page: int) -> bytes:
    """Return the view of the newest lines, of which each page has PAGE; the first is 1."""
    lines, total = read_page(ledger, page)
    content = [tag("h1", "What left this device")]
    if not total:
        content.append(tag("p", "Nothing has left it.", class_="state"))
        content.append(tag("p", "Each result, hello and log is listed here before it is sent."))
    else:
        first = PAGE * (page - 1) + 1
        shown = f"{first} to {first + len(lines) - 1} of {total}" if lines else f"none of {total}"
        content.append(tag("p", f"Pictures are never sent. {shown}, the newest first.", class_="note"))
    for day, of_day in groupby(lines, lambda line: time.strftime("%A, %d %B %Y", time.localtime(line.time_s))):
        content += [tag("h2", day), tag("ol", map(_describe, of_day), class_="ledger")]
    content += link_pages("/left", page, -(-total // PAGE))
    return render("What left", name, "/left", *content)


def read_page(ledger: Ledger, page: int) -> tuple[list[LedgerLine], int]:
    """Return one page of lines, the newest first, and the number of all."""
    newest, total = deque[LedgerLine](maxlen=PAGE * page), 0
    for total, line in enumerate(ledger.read(), 1):  # noqa: B007 - the number of all
        newest.append(line)
    count = min(PAGE, max(total - PAGE * (page - 1), 0))
    return [newest[index] for index in range(count - 1, -1, -1)], total


def _describe(line: LedgerLine) -> Element:
    what = _WORDS[line.kind]
    if line.kind == "update" and line.form == "single":
        what = f"{what}, of this device alone"
    if line.left_out is not None:
        what = f"{what}, {line.left_out:.0%} of the patches left out"
    where = f"round {line.round} of {line.run}" if line.run else ""
    size = format_bytes(line.bytes) if line.bytes else ""
    facts = ", ".join(filter(None, (where, size)))
    return tag(
        "li",
        tag("time", time.strftime("%H:%M:%S", time.localtime(line.time_s))),
        tag(
            "div", tag("b", what), tag("p", line.reason or line.what), tag("p", facts, class_="note") if facts else None
        ),
        class_="refused" if line.kind == "refused" else None,
    )


def link_pages(path: str, page: int, pages: int, **query: str) -> Iterator[Element]:
    """Yield links to the neighbours of a page, if there are several."""
    if pages > 1:
        before = tag("a", "Before", href=make_link(path, **query, page=str(page - 1))) if page > 1 else None
        behind = tag("a", "Next", href=make_link(path, **query, page=str(page + 1))) if page < pages else None
        yield tag("nav", [before, tag("span", f"page {page} of {pages}"), behind], class_="pages", aria_label="More")
