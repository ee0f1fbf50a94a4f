"""The errors that a person can mend: what was wrong, where, the rule, and the remedy. Anything else is a bug."""


class PlainError(Exception):
    """Printed without a traceback.

    what: one sentence with the option, the value, and the file and line where there is one.
    remedy: what to do about it.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what if not remedy else f"{what}\n  {remedy}")
        self.what = what
        self.remedy = remedy


class InputError(PlainError):
    """Bad input or a bad recipe: exit code 2, and nothing has been harmed."""


class RunError(PlainError):
    """A run that had to end though its input was well formed: exit code 1."""


class PeerLost(RunError):
    """Another rank of the run is gone. The cause is told there: the launcher reports it, and starts again."""


class Interrupted(PlainError):
    """A run that saved itself and ended because a signal asked it to: exit code 128 + the signal's number."""

    def __init__(self, signal_name: str, signal_number: int, remedy: str) -> None:
        super().__init__(f"interrupted by {signal_name}", remedy)
        self.exit_code = 128 + signal_number
