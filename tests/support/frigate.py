"""Frigate's folder `clips`, as it writes it."""

import json
import os
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

START = 1_607_123_955
"""Time of the first event."""


def event_id(number: int) -> str:
    """Return the id of an event, as Frigate forms it."""
    return f"{START + number}.475377-mx{number:04d}"


def encode(picture: Image.Image | None = None, shade: int = 128) -> bytes:
    """Encode a picture as a snapshot; by default one of a single shade."""
    content = BytesIO()
    (picture or Image.new("RGB", (40, 30), (shade, 10, 10))).convert("RGB").save(content, "JPEG")
    return content.getvalue()


def write_snapshot(
    folder: Path, camera: str, number: int, content: bytes | None = None, *, end: str = ".jpg", age_s: float = 3600.0
) -> Path:
    """Write a snapshot whose file is so old."""
    path = folder / f"{camera}-{event_id(number)}{end}"
    path.write_bytes(encode() if content is None else content)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def write_events(folder: Path, events: dict[int, tuple[str, Any]]) -> None:
    """Write the answer of `/api/events`: label and sub label by number."""
    answer = [
        {"id": event_id(number), "camera": "yard", "label": label, "sub_label": sub, "start_time": START + number,
         "end_time": None, "zones": [], "has_snapshot": True, "data": {"score": 0.7}}
        for number, (label, sub) in events.items()
    ]  # fmt: skip
    (folder / "frigate-events.json").write_text(json.dumps(answer))
