"""Curves as elements of a page, in the page's own colours."""

import hashlib
import io
import re
from collections.abc import Callable
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#010203"
"""Stands for the page's text colour, which differs between light and dark."""


def svg(draw: Callable[[Axes], None], *, width: float = 5.2, height: float = 3.0) -> str:
    """A figure of so many inches as an SVG element; the same drawing gives the same text."""
    style: Any = {
        "svg.hashsalt": "fedvit", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif",
        "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
        "grid.color": INK, "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
        "boxplot.boxprops.color": INK, "boxplot.whiskerprops.color": INK, "boxplot.capprops.color": INK,
    }  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
        draw(axes)
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    text = content.getvalue()
    # names within a page must differ, and those of matplotlib are the same in every figure
    own = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>f{own}-", text)
    return text[text.index("<svg") :].replace(INK, "currentColor")
