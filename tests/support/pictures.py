"""Small pictures as files."""

import io

from PIL import Image


def png(value: int) -> bytes:
    """Return a gray picture of 4 x 4 pixels."""
    content = io.BytesIO()
    Image.new("RGB", (4, 4), (value,) * 3).save(content, "PNG")
    return content.getvalue()
