"""Tokens of the HTTP API, with their traces in the audit."""

from pathlib import Path

from coordinator.record.opening import open_existing_record
from coordinator.security.api_tokens import ApiTokens, UserRole


def add_token(folder: Path, name: str, role: UserRole, valid_days: float | None) -> str:
    """Make a token for the runs of a folder; return its text. Raises ConfigError if the name cannot be used."""
    with open_existing_record(folder, writes=True) as store:
        text = ApiTokens(folder).add(name, role, valid_days)
        store.audit.add("token new", name, f"{role}{'' if valid_days is None else f', {valid_days:g} days'}")
    return text


def remove_token(folder: Path, name: str) -> None:
    """Make a token invalid. Raises ConfigError if there is none."""
    with open_existing_record(folder, writes=True) as store:
        ApiTokens(folder).remove(name)
        store.audit.add("token rm", name)
