"""What an operator reads, kept."""

from coordinator.rounds.display import Display


class Lines(Display):
    """Keeps the lines that it shows in a list; breaks off, as by Ctrl-C, at a line that begins with `until`."""

    def __init__(self, lines: list[str] | None = None, *, until: str | None = None) -> None:
        super().__init__()
        self.lines = [] if lines is None else lines
        self._until = until

    def line(self, text: str) -> None:
        self.lines.append(text)
        if self._until and text.startswith(self._until):
            raise KeyboardInterrupt
