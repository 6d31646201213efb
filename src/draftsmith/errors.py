"""The errors a user is meant to read: what is wrong, the config key or file, and the fix."""

TOO_SLOW = 3
"""Exit code of a run that the throughput floor has stopped."""


class InputError(ValueError):
    """Something given from outside cannot be used.  The CLI prints it as one line and exits with code 2."""


class FallbackError(RuntimeError):
    """Training would have gone on another way than it was compiled for: slower, or with other kernels."""


class Interrupted(Exception):
    """A signal or the throughput floor asked the run to stop; it has saved.  `code` is the process's exit code:
    128 + signal, or TOO_SLOW."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
