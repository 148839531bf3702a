"""A run owns its directory from its first moment to its last: two processes that write there would ruin both runs."""

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path


class Lock:
    """An advisory lock on a directory, which is made if need be. It dies with its process, however that ends."""

    def __init__(self, folder: Path):
        """Raises ValueError, which says who holds it, where another process does."""
        self.made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "lock"
        while True:
            self.file = open(self.path, "a+", encoding="utf-8")
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.file.seek(0)
                holder = self.file.read().strip() or "another process"
                raise ValueError(
                    f"--output_dir {folder} is in use by {holder}; wait for its end"
                ) from None
            except OSError as error:
                print(
                    f"note: {folder}: this file system has no locks ({error.strerror}); start no second run there"
                )
            if os.path.exists(self.path) and os.path.samestat(
                os.fstat(self.file.fileno()), os.stat(self.path)
            ):
                break  # else its last holder has just removed the file that was opened here
        self.file.truncate(0)
        with suppress(OSError):  # a full disk holds the lock, if not its text
            self.file.write(
                f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}"
            )
            self.file.flush()

    def release(self) -> None:
        """Give the directory back; one that was made and stayed empty goes."""
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self.file.close()
        if self.made and not any(self.path.parent.iterdir()):
            self.path.parent.rmdir()
