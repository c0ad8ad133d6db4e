"""The pause of a device by its owner: a file in the state, which another process may write and a restart keeps."""

from pathlib import Path

from fedvit.files import atomic_write, name_failure, storage_failed, sync_folder

PAUSE_FILE = "paused"


class OwnerPause:
    """The pause of the device with this state. A paused device finishes its task, and takes no further one."""

    def __init__(self, state: Path) -> None:
        self.file = state / PAUSE_FILE

    def is_on(self) -> bool:
        """Return True while the device is paused."""
        return self.file.exists()

    def began_s(self) -> float | None:
        """Return since when the device is paused, in seconds since 1970; None if it is not."""
        try:
            return self.file.stat().st_mtime
        except FileNotFoundError:
            return None

    def begin(self) -> None:
        """Pause the device, unless it is paused. Raises StorageFailed."""
        if not self.is_on():
            with name_failure(f"cannot make {self.file.parent}"):
                self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            atomic_write(self.file, b"", private=True)

    def end(self) -> None:
        """Let the device take tasks again. Raises StorageFailed."""
        try:
            self.file.unlink(missing_ok=True)
            sync_folder(self.file.parent)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_failed(f"cannot remove {self.file}", error) from error
