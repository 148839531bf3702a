"""The lock on a run's output directory: two processes that write there would ruin both runs."""

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path


class Lock:
    """An advisory lock on a directory, which is created if it does not exist.

    The lock is on the file `lock` in that directory. The operating system releases it when its
    process ends, however that happens.
    """

    def __init__(self, folder: Path):
        """Take the lock.

        Raises:
            ValueError: another process holds the lock; the message says which one. Or the folder
                cannot be made.
        """
        self.folder = folder
        self.path = folder / "lock"
        self.created_folder = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--output_dir {folder}: this folder cannot be made ({error.strerror})"
            ) from error
        self._open_and_lock()
        # The process that held the lock before may have removed the file just after it was opened
        # here. Then the lock is on a file that nobody else can find, and a new one is needed.
        while not self._is_file_in_place():
            self._open_and_lock()
        self.file.truncate(0)
        holder = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}"
        with suppress(OSError):  # a full disk cannot take the text, but the lock holds without it
            self.file.write(holder)
            self.file.flush()

    def _open_and_lock(self) -> None:
        self.file = open(self.path, "a+", encoding="utf-8")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.seek(0)
            holder = self.file.read().strip() or "another process"
            raise ValueError(
                f"--output_dir {self.folder} is in use by {holder}; wait for its end, or name"
                " another directory"
            ) from None
        except OSError as error:
            print(
                f"note: the file system of {self.folder} has no locks ({error.strerror}), so do not"
                " start a second run there"
            )

    def _is_file_in_place(self) -> bool:
        """Whether the opened file is the one that the path leads to now."""
        if not self.path.exists():
            return False
        return os.path.samestat(os.fstat(self.file.fileno()), self.path.stat())

    def release(self) -> None:
        """Give the directory back, and remove it if it was created here and is still empty."""
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self.file.close()
        if self.created_folder and not any(self.folder.iterdir()):
            self.folder.rmdir()
