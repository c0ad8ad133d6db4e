"""Files to download. A command in a process of its own makes each, so that its memory and its libraries end with it."""

import asyncio
import re
import shutil
import sys
import zipfile
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated, Any, Literal

from fastapi import Query
from starlette.responses import FileResponse, Response

from coordinator.http_api.routes import Routes, Site
from coordinator.http_api.run_routes import Word, find_name
from coordinator.http_api.site import ApiSite
from fedvit.errors import ConfigError, FedvitError, LinkDown

LONGEST_S = 900.0
_PROGRAM = (sys.executable, "-c", "from coordinator.cli import main; main()")
_ERROR = re.compile(r"coordinator: (?P<message>.*) \[(?P<code>FV\d{4})\]$", re.DOTALL)


routes = Routes()


@routes.add("GET", "/runs/{run}/report", "viewer", media="text/html")
async def download_report(site: Site, run: str) -> Response:
    """Download the report of a run, one self-contained page."""
    return await _send(site, run, "report.html", "report", kind="text/html")


@routes.add("GET", "/runs/{run}/bundle", "operator", media="application/zip")
async def download_bundle(
    site: Site,
    run: str,
    device: Word = "",
    precision: Annotated[list[Literal["fp32", "fp16", "int8"]], Query()] = [],  # noqa: B006 - FastAPI copies it
) -> Response:
    """Download the newest model of a run as a ZIP file with ONNX files."""
    words = ["export", *(["--device", device] if device else [])]
    for name in precision:
        words += ["--precision", name]
    return await _send(site, run, "bundle", *words, kind="application/zip")


async def _send(site: ApiSite, run: str, name: str, *words: str, kind: str) -> Response:
    """Send the file `name` that a command writes, or a ZIP file of the folder."""
    known = await site.read(find_name, site, run)
    folder = Path(mkdtemp(prefix="fedvit-"))
    try:
        made = folder / name
        async with site.downloads.take():
            await _run(words[0], known, *words[1:], "--out", str(made), "--runs", str(site.folder))
        if made.is_dir():
            made = await asyncio.to_thread(_pack, made)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return _OwnFile(made, media_type=kind, filename=f"{known}-{made.name}", headers={"accept-ranges": "none"})


class _OwnFile(FileResponse):
    """A file that was made for one request. Its folder in the temporary one is removed however the answer ends."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the whole file: the part of another file that a client has does not belong to this one."""
        headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
        try:
            await super().__call__({**scope, "headers": headers}, receive, send)
        finally:
            shutil.rmtree(Path(self.path).parent, ignore_errors=True)


async def _run(*words: str) -> None:
    """Run a command of the coordinator. Raises the error that it prints."""
    process = await asyncio.create_subprocess_exec(
        *_PROGRAM,
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, errors = await asyncio.wait_for(process.communicate(), LONGEST_S)
    except BaseException as error:
        process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            raise LinkDown("FV1814", f"the file was not ready within {LONGEST_S:.0f} s") from None
        raise
    if process.returncode:
        text = errors.decode("utf-8", "replace").strip()
        if found := _ERROR.search(text):
            kind = ConfigError if process.returncode == ConfigError.exit_code else FedvitError
            raise kind(found["code"], found["message"])
        raise LinkDown("FV1814", f"the file was not made: {text[-500:]}")


def _pack(folder: Path) -> Path:
    """Pack a folder into a ZIP file beside it, without compression: tensors hardly shrink."""
    packed = folder.with_suffix(".zip")
    with zipfile.ZipFile(packed, "w") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(folder.parent))
    return packed
