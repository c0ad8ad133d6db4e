"""Paths of the device's owner, which do not leave the device."""

import re
from collections.abc import Collection
from pathlib import Path


class PrivatePaths:
    """Hides paths in some folders, each with everything that follows it up to the next field or the end of the line.

    >>> PrivatePaths([Path("/home/ann")]).hide("image /home/ann/my pictures/a.png is damaged")
    'image PATH'
    """

    def __init__(self, folders: Collection[Path]) -> None:
        names = {str(form) for folder in folders for form in (folder, folder.absolute(), folder.resolve())}
        names -= {"/", "."}
        paths = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        self._paths = re.compile(rf"(?:{paths}).*?(?=  | \w+=|$)", re.MULTILINE) if paths else None

    def hide(self, text: str) -> str:
        return self._paths.sub("PATH", text) if self._paths else text
