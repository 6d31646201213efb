"""The errors a user is meant to read: what is wrong, the config key or file, and the fix."""

TOO_SLOW = 3
"""Exit code of a run that the throughput floor has stopped."""
NOT_FINITE = 4
"""Exit code of a run that NaN or Inf has stopped: started again, it would come to the same."""


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


class RunError(RuntimeError):
    """The run cannot go on, and no input is to blame.  The CLI prints it as one line and exits with code 1."""


class PeerError(RunError):
    """Another process of the run is gone or does not answer.  The line that says so has been printed."""


class SaidElsewhere(InputError):
    """Bad input that stops all processes alike: another one on this machine prints the line."""
