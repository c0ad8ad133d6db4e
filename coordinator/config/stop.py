"""The table [stop]."""

from typing import Annotated

from msgspec import Meta, Struct


class StopConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules that end a run before its last round: the table [stop]. The first rule that holds ends it.

    With accuracy or patience the run keeps its best round, and devices their own model of it.
    """

    accuracy: (
        Annotated[float, Meta(gt=0, le=1, description="Stop once the mean accuracy of the devices reaches this.")]
        | None
    ) = None
    patience: (
        Annotated[int, Meta(ge=1, description="Stop after this many evaluations without a better mean accuracy.")]
        | None
    ) = None
    seconds: (
        Annotated[
            float,
            Meta(gt=0, description="Stop after the round in which training has taken so long, without pauses."),
        ]
        | None
    ) = None
    epsilon: (
        Annotated[
            float,
            Meta(gt=0, description="Stop before the round that would exceed this epsilon of devices' updates."),
        ]
        | None
    ) = None

    @property
    def keeps_best(self) -> bool:
        """Return whether the run keeps its best round."""
        return self.accuracy is not None or self.patience is not None
