"""Endpoints of the service itself: tokens, audit, backups, and who asks."""

import asyncio
from importlib.metadata import version
from typing import Annotated, Literal

import msgspec
from fastapi import Depends, Query, Request
from msgspec import Struct

from coordinator.http_api.answers import read_body
from coordinator.http_api.routes import Routes, Site, identity_of
from coordinator.http_api.run_routes import Word
from coordinator.http_api.site import ApiSite
from coordinator.operations.access import add_token, remove_token
from coordinator.operations.auditing import AuditVerdict, LocalAudit
from coordinator.operations.backing_up import BackupLine, describe, make_backup
from coordinator.operations.documents import Done
from coordinator.record.audit import KEPT, SLACK
from coordinator.record.tables import AuditEntry
from coordinator.security.api_tokens import LONGEST_DAYS, UserRole

Part = Literal["runs", "deployment"]


class Greeting(Struct, frozen=True, kw_only=True):
    """The server, and who asks."""

    software: str
    name: str
    role: UserRole


class NewToken(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token to make."""

    name: str
    role: UserRole = "viewer"
    days: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_DAYS)] | None = None  # None: it does not expire


class MadeToken(Struct, frozen=True, kw_only=True):
    """A new token, whose text is shown once."""

    name: str
    role: UserRole
    token: str


class ListedToken(Struct, frozen=True, kw_only=True):
    """A token, without its text."""

    name: str
    role: UserRole
    made_at: str
    expires_at: str | None


class NewBackup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a backup."""

    keep: Annotated[int, msgspec.Meta(ge=1)] | None = None  # remove older backups than the newest so many


routes = Routes()


@routes.add("GET", "/me", "viewer")
async def greet(request: Request) -> Greeting:
    """Return the version of the server, and the name and role of the token."""
    sender = identity_of(request)
    return Greeting(software=version("fedvit"), name=sender.name, role=sender.role)


@routes.add("GET", "/tokens", "admin")
async def list_tokens(site: Site) -> list[ListedToken]:
    """List the tokens by name, without their texts."""
    return [
        ListedToken(name=token.name, role=token.role, made_at=token.made_at, expires_at=token.expires_at)
        for token in site.credentials.tokens.list_all()
    ]


@routes.add("POST", "/tokens", "admin")
async def make_token(site: Site, body: Annotated[NewToken, Depends(read_body(NewToken))]) -> MadeToken:
    """Make a token; its text is in this answer alone."""
    text = await site.change_folder(lambda: add_token(site.folder, body.name, body.role, body.days))
    return MadeToken(name=body.name, role=body.role, token=text)


@routes.add("DELETE", "/tokens/{name}", "admin")
async def delete_token(site: Site, name: str) -> Done:
    """Make a token invalid at once."""
    await site.change_folder(lambda: remove_token(site.folder, name))
    return Done(lines=[f"token {name} is removed"])


@routes.add("GET", "/audit", "admin")
async def list_audit(
    site: Site, last: Annotated[int, Query(ge=1, le=KEPT + SLACK)] = 50, of: Annotated[Part, Query()] = "runs"
) -> list[AuditEntry]:
    """List who changed what, when and from where; the newest last."""
    return await asyncio.to_thread(_find_audit(site, of).read, last)


@routes.add("GET", "/audit/verdict", "admin")
async def verify_audit(site: Site, of: Annotated[Part, Query()] = "runs", expect: Word = "") -> AuditVerdict:
    """Verify the chain of digests of the audit, and that an entry has the digest `expect`."""
    return await asyncio.to_thread(_find_audit(site, of).check, expect or None)


@routes.add("GET", "/backups", "admin")
async def list_backups(site: Site) -> list[BackupLine]:
    """List the backups, the oldest first."""
    return [describe(made) for made in await asyncio.to_thread(site.find_backups().list_all)]


@routes.add("POST", "/backups", "admin")
async def back_up(site: Site, body: Annotated[NewBackup, Depends(read_body(NewBackup))]) -> BackupLine:
    """Make a backup of the runs and the deployment, also while they are served."""
    backups = site.find_backups()
    deployment = site.deployment.folder if site.deployment else None
    return describe(
        await site.change_folder(lambda: make_backup(backups, site.folder, deployment, body.keep, lambda line: None))
    )


def _find_audit(site: ApiSite, of: Part) -> LocalAudit:
    return LocalAudit(site.folder, None if of == "runs" else site.find_deployment().folder)
