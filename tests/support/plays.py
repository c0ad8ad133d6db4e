"""A play that a test makes: speeches of few roles, with patterns that a small model learns."""

from pathlib import Path
from typing import Any

TEXT_MODEL: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "context": 8}
LSTM_MODEL: dict[str, Any] = {"embedding": 4, "width": 12, "depth": 2, "context": 8}


def write_play(file: Path, roles: int = 2, words: int = 60) -> Path:
    """Every role repeats a word of its own."""
    file.parent.mkdir(parents=True, exist_ok=True)
    speeches = [f"ROLE {role}:\n" + " ".join([f"w{chr(97 + role)}ord"] * words) + "!\n" for role in range(roles)]
    file.write_text("\n".join(speeches))
    return file
