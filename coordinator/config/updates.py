"""The table [updates]."""

from importlib import import_module
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct, field

from fedvit.errors import ConfigError
from fedvit.roles import NONE, Role

if TYPE_CHECKING:
    from fedvit.updates import Codec


class UpdatesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Codecs of transferred tensors: the table [updates]. Raises ConfigError on construction.

    A codec is one of none, fp16, int8 and top_k:share=0.05 (docs/updates.md).
    """

    up: Annotated[str, Meta(description="Codec of the updates of trained tensors.")] = NONE
    up_groups: Annotated[
        dict[str, str],
        Meta(
            description="Another codec for the updates of one group.",
            extra={"flags": ["up-group"], "metavar": "GROUP=CODEC"},
        ),
    ] = field(default_factory=dict)
    features: Annotated[str, Meta(description="Codec of the features that devices upload: none, fp16 or int8.")] = NONE
    down: Annotated[
        str, Meta(description="Codec of the changes since the previous round, for devices that have its values.")
    ] = NONE
    down_whole: Annotated[
        str, Meta(description="Codec of whole values for devices, including generated ones: none, fp16, int8.")
    ] = NONE

    def __post_init__(self) -> None:
        given = {"up": self.up, "features": self.features, "down": self.down, "down_whole": self.down_whole}
        given |= {f"up_groups.{group}": text for group, text in self.up_groups.items()}
        given = {key: text for key, text in given.items() if text != NONE}
        for key, text in given.items():
            try:
                codec = _make_codec(text)
            except ConfigError as error:
                raise ConfigError("FV1011", f"updates: {key}: {error}") from None
            if key in ("features", "down_whole") and not codec.keeps_shape:
                raise ConfigError(
                    "FV1012", f"updates: {key} = {text!r}: {codec.name} supports changes of trained tensors only"
                )

    def up_of(self, group: str) -> str:
        return _make_codec(self.up_groups.get(group, self.up)).text

    @property
    def codes_down(self) -> bool:
        return {self.down, self.down_whole} != {NONE}

    def check(self, method: str, groups: dict[str, tuple[Role, list[str]]], collects: bool) -> None:
        """Raise ConfigError, naming the method, for a codec of tensors that it never sends."""
        sender = f"method {method!r}"
        back = [group for group, (role, names) in groups.items() if role.is_sent_back and names]
        for group in self.up_groups:
            if group not in back:
                known = ", ".join(back) or "none"
                raise ConfigError(
                    "FV1012", f"updates: up_groups: group {group!r} is not sent back; of {sender} these are: {known}"
                )
        down = any(role.from_server_each_round and names for role, names in groups.values())
        senders = {"up": bool(back), "features": collects, "down": down, "down_whole": down}
        for key, sends in senders.items():
            if getattr(self, key) != NONE and not sends:
                raise ConfigError(
                    "FV1012", f"updates: {key} = {getattr(self, key)!r}: {sender} sends nothing of that kind"
                )


def _make_codec(text: str) -> "Codec":
    """Make a codec. Commands that only read a record use none, so that they need not import numpy."""
    codec: Codec = import_module("fedvit.updates").make_codec(text)
    return codec
