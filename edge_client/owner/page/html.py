"""Pages as trees of elements, so that no text can become markup."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_to_bytes, urlencode
from xml.etree.ElementTree import Element, tostring

from fedvit.terminal import escape_controls

Child = Element | str | None

PAGES = {"/": "Device", "/pictures": "Pictures", "/left": "What left"}


def tag(kind: str, /, *children: Child | Iterable[Child], **attributes: Any) -> Element:
    """Return an element. Attributes of None or False are left out; `class_` is class, `data_key` is data-key.

    >>> tostring(tag("a", "<b>", href="/", class_="wide"), encoding="unicode", method="html")
    '<a href="/" class="wide">&lt;b&gt;</a>'
    """
    written = {
        key.removesuffix("_").replace("_", "-"): "" if value is True else escape_controls(str(value))
        for key, value in attributes.items()
        if value is not None and value is not False
    }
    element = Element(kind, written)
    for child in children:
        for one in [child] if isinstance(child, Element | str) else child or ():
            _append(element, one)
    return element


def _append(element: Element, child: Child) -> None:
    if isinstance(child, Element):
        element.append(child)
    elif child is not None:
        text = escape_controls(child)
        if len(element):
            element[-1].tail = (element[-1].tail or "") + text
        else:
            element.text = (element.text or "") + text


def make_part(name: str, *children: Child | Iterable[Child], **attributes: Any) -> Element:
    """Return an element that the script replaces when the page is fetched again."""
    return tag("div", *children, id=name, data_part=True, **attributes)


def make_link(path: str, **query: str) -> str:
    """Return an address of the page.

    >>> make_link("/image", name=quote_name("cat/\\udcff.png"))
    '/image?name=cat%252F%25FF.png'
    """
    return f"{path}?{urlencode(query)}" if query else path


def quote_name(name: str | Path) -> str:
    """Return a file name, which need not be UTF-8, as text of a form."""
    return quote(os.fsencode(name), safe="")


def unquote_name(text: str) -> str:
    """Return the file name that `quote_name` made into text."""
    return os.fsdecode(unquote_to_bytes(text))


def render(title: str, device: str, here: str, *content: Child, every_s: float | None = None) -> bytes:
    """Return a page; `here` is its path among PAGES, `every_s` the time after which its parts are fetched again."""
    links = [tag("a", text, href=path, aria_current="page" if path == here else None) for path, text in PAGES.items()]
    return render_document(
        title,
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag("header", tag("nav", tag("strong", device), links, aria_label="Pages")),
        tag("main", *content, id="content", tabindex="-1", data_every=every_s),
    )


def render_document(title: str, *body: Child) -> bytes:
    """Return a document without the links to the pages."""
    page = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("title", f"{title} · fedvit"),
            tag("link", rel="icon", href="/icon.svg"),
            tag("link", rel="stylesheet", href="/page.css"),
            tag("script", src="/page.js", defer=True),
        ),
        tag("body", *body),
        lang="en",
    )
    written: bytes = tostring(page, encoding="utf-8", method="html")
    return b"<!DOCTYPE html>\n" + written
