"""For methods without a server step."""

from collections.abc import Sequence

from fedvit.methods.base import RoundContext, ServerRule, ServerState, Upload


class Nothing(ServerRule):
    """The server keeps no tensors and learns nothing."""

    why_never_late = "its devices send nothing that could be late"
    why_no_regions = "its devices send nothing"

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        return state, {}
