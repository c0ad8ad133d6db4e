"""Recognises people and programs by what they send: a token of the API, the dashboard's password, or its address.

The dashboard and the API check secrets here alone, so that both have the same roles and the same delay after a wrong
one.
"""

import asyncio
import hmac
from dataclasses import dataclass, field
from typing import Literal

from coordinator.security.api_tokens import ApiTokens, ApiUser
from fedvit.errors import FedvitError

WRONG_S = 1.0
"""Time after a wrong secret in which its address may make no further attempt."""
PERSON = ApiUser("dashboard", "admin")
"""The person who has the dashboard's password."""
READER = ApiUser("dashboard", "viewer")
"""The user of this machine who opens the address that the dashboard printed."""


class TooManyAttempts(FedvitError):
    """The address of the client has just sent a wrong secret."""

    general_code = "FV1814"


Way = Literal["header", "form", "address"]
"""The header of a request to the API, the form of the dashboard, or its address; each accepts its own secrets."""


class Forbidden(FedvitError):
    """Somebody who was recognised lacks the role that a request needs."""

    general_code = "FV1812"


@dataclass
class ApiCredentials:
    """The secrets that are valid."""

    tokens: ApiTokens
    password: str | None = None
    address_token: str | None = None  # of an address of this machine
    _busy: set[str] = field(default_factory=set)  # addresses that must wait after a wrong secret

    def find(self, secret: str, way: Way) -> ApiUser | None:
        """Return who has a secret that came in one of the ways; None if it is wrong."""
        found = None if way == "address" else self.tokens.find(secret)
        people = [(self.password, PERSON, "form"), (self.address_token, READER, "address form")]
        for known, identity, ways in people:
            is_right = known is not None and hmac.compare_digest(secret.encode("utf-8", "replace"), known.encode())
            if is_right and way in ways.split():
                found = identity
        return found

    def are_valid(self, identity: ApiUser) -> bool:
        """Return whether somebody who was recognised before still would be: a token may be removed."""
        return identity.token_digest is None or self.tokens.has(identity.token_digest)

    async def check(self, secret: str, address: str, way: Way) -> ApiUser | None:
        """Return who has a secret; None, after a delay, if it is wrong. Only attempts of the same address wait for each
        other. Raises TooManyAttempts while an attempt from this address waits."""
        found = self.find(secret, way)
        if found and way == "header":  # nobody guesses a token, and others may share its address
            return found
        if address in self._busy:
            raise TooManyAttempts("FV1814", "another attempt is under way: try again in a second")
        if found:
            return found
        self._busy.add(address)
        try:
            await asyncio.sleep(WRONG_S)
        finally:
            self._busy.discard(address)
        return None
