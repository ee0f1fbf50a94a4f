"""The one error a person caused and can mend: what was wrong, where, the rule, and the remedy."""


class InputError(Exception):
    """Bad input or a bad recipe. The command line prints it without a traceback and exits with code 2.

    what: one sentence with the option, the value, and the file and line where there is one.
    remedy: what to do about it.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what if not remedy else f"{what}\n  {remedy}")
        self.what = what
        self.remedy = remedy


class RunError(Exception):
    """A run that had to end though its input was well formed (exit code 1)."""
