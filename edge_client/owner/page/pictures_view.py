"""The page's views of pictures: those that wait for a label, one by one with keys, and all in a grid."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from edge_client.owner.labelling import KEYS, SKIP, UNDO
from edge_client.owner.page.html import make_link, make_part, quote_name, render, tag
from edge_client.owner.page.ledger_view import link_pages
from edge_client.owner.page.pictures import LARGE, SMALL, PictureFolder
from fedvit.data.layout import UNLABELLED
from fedvit.errors import DataError
from fedvit.quantities import format_count

PAGE = 60


def show_pictures(pictures: PictureFolder, name: str, label: str | None, page: int) -> bytes:
    """Return the grid of the pictures of a class, else of those without a label."""
    content = [tag("h1", "Pictures")]
    try:
        folders = pictures.open()
        waiting = folders.list_waiting()
    except DataError as error:
        return render("Pictures", name, "/pictures", *content, _make_banner(str(error)))
    of_class: list[list[Path]] = [[] for _ in folders.classes]
    for path, index in folders.images:
        of_class[index].append(path)
    groups = {"": waiting, **dict(zip(folders.classes, of_class, strict=True))}
    shown = groups.get(label or "", [])
    chips = [
        tag(
            "a", text or "no label", tag("small", f" {len(paths)}"),
            href=make_link("/pictures", of=quote_name(text)) if text else "/pictures",
            aria_current="page" if text == (label or "") else None,
        )
        for text, paths in groups.items()
    ]  # fmt: skip
    content.append(tag("nav", chips, class_="chips", aria_label="Classes"))
    if waiting and not label:
        text = f"Label {format_count(len(waiting), 'picture')}"
        content.append(tag("p", tag("a", text, href="/label", class_="action")))
    if not shown:
        where = "New pictures belong in the folder unlabelled, or in the folder of their class." if not label else ""
        content += [tag("p", "No picture here.", class_="state"), tag("p", where)]
    on_page = shown[PAGE * (page - 1) : PAGE * page]
    content.append(tag("ul", [_show_small(pictures, path) for path in on_page], class_="grid"))
    query = {"of": quote_name(label)} if label else {}
    content += link_pages("/pictures", page, -(-len(shown) // PAGE), **query)
    return render("Pictures", name, "/pictures", *content)


def _show_small(pictures: PictureFolder, path: Path) -> Element:
    own = pictures.name_of(path)
    target = make_link("/picture", name=quote_name(own))
    if own.startswith(f"{UNLABELLED}/"):
        target = make_link("/label", picture=quote_name(path.name))
    image = tag(
        "img", src=make_link("/image", name=quote_name(own), side=str(SMALL)), alt=path.name, loading="lazy",
        width=SMALL, height=SMALL,
    )  # fmt: skip
    return tag("li", tag("a", image, href=target))


def show_picture(pictures: PictureFolder, name: str, picture: str) -> bytes:
    """Return the view of a labelled picture with the model's guess. Raises DataError."""
    path = pictures.find(picture)
    return render(
        path.name,
        name,
        "/pictures",
        tag("h1", path.name),
        tag("p", "Labelled ", tag("b", path.parent.name), "."),
        make_part("work", *_show_large(pictures, path), class_="work"),
        tag("p", tag("a", f"All of {path.parent.name}", href=make_link("/pictures", of=quote_name(path.parent.name)))),
    )


def show_labelling(pictures: PictureFolder, name: str, wanted: str, after: str, trouble: str = "") -> bytes:
    """Return the view of one picture without a label, with a button and a key for each class.

    It is `wanted` if that waits, else the first behind `after` in the order of names, else the first.
    """
    heading = tag("h1", "Label pictures")
    try:
        folders = pictures.open_classes()
        waiting = folders.list_waiting()
    except DataError as error:
        return render("Label pictures", name, "/pictures", heading, _make_banner(str(error)))
    names = [path.name for path in waiting]
    place = names.index(wanted) if wanted in names else next((i for i, own in enumerate(names) if own > after), 0)
    keys = tag("label", tag("input", type="checkbox", id="keys", checked=True), " Keys label the picture")
    work = list(_show_work(pictures, folders.classes, waiting, place)) if waiting else [_show_end()]
    return render(
        "Label pictures",
        name,
        "/pictures",
        heading,
        make_part("said", _make_banner(trouble) if trouble else _show_newest(pictures), role="status"),
        make_part("work", *work, class_="work"),
        tag("p", keys, class_="note keys"),
    )


def _show_work(
    pictures: PictureFolder, classes: Sequence[str], waiting: Sequence[Path], place: int
) -> Iterator[Element]:
    path = waiting[place]
    yield from _show_large(pictures, path)
    is_damaged = _find_damage(pictures, path) is not None
    buttons = [
        tag(
            "button", tag("kbd", key) if key else None, tag("span", label), name="label", value=quote_name(label),
            data_key=key or None, data_label=label, disabled=is_damaged,
        )
        for label, key in zip(classes, [*KEYS, *[""] * len(classes)], strict=False)
    ]  # fmt: skip
    yield tag(
        "form",
        tag("input", type="hidden", name="picture", value=quote_name(path.name)),
        tag("div", buttons, class_="classes"),
        tag(
            "div",
            _make_act("skip", SKIP, "space"),
            _make_act("undo", UNDO, UNDO, disabled=pictures.newest is None),
            class_="acts",
        ),
        method="post", action="/label",
    )  # fmt: skip
    yield tag("p", f"Picture {place + 1} of {len(waiting)} without a label: {path.name}", class_="note")


def _show_large(pictures: PictureFolder, path: Path) -> Iterator[Element]:
    own = pictures.name_of(path)
    if damage := _find_damage(pictures, path):
        yield _make_banner(damage)
        return
    source = make_link("/image", name=quote_name(own), side=str(LARGE))
    yield tag("div", tag("img", src=source, alt=f"Picture {path.name}", class_="large"), class_="frame")
    yield tag("p", id="guess", role="status", data_guess=make_link("/guess", name=quote_name(own)))


def _find_damage(pictures: PictureFolder, path: Path) -> str | None:
    """Return the reason why a picture cannot be shown; None if it can, and then it is drawn already."""
    try:
        pictures.draw(path, LARGE)
    except DataError as error:
        reason = str(error).replace(f"{pictures.folder}/", "")
        return f"{reason[:1].upper()}{reason[1:]}"
    return None


def _show_newest(pictures: PictureFolder) -> Element | None:
    newest = pictures.newest
    return tag("p", newest.name, " is ", tag("b", newest.label), " now.") if newest else None


def _show_end() -> Element:
    return tag(
        "div",
        tag("p", "No picture waits for a label.", class_="state"),
        tag("p", "The device uses the labels from its next task on."),
        tag("p", "New pictures belong in its folder ", tag("code", UNLABELLED), "."),
        tag("p", tag("a", "All pictures", href="/pictures")),
        tag("form", _make_act("undo", UNDO, UNDO), method="post", action="/label", class_="acts"),
    )


def _make_act(act: str, key: str, shown: str, *, disabled: bool = False) -> Element:
    texts = (tag("kbd", shown), tag("span", act.capitalize()))
    return tag("button", texts, name="act", value=act, data_key=key, disabled=disabled)


def _make_banner(text: str) -> Element:
    return tag("p", text, class_="banner bad")
