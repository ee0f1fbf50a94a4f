"""Overrides before torch is imported: the ledger's dates, and the declared environment variables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from draftline.config import Override
from draftline.environment import variables
from draftline.errors import InputError


def enter_overrides(overrides: Sequence[Override], today: date | None = None) -> None:
    """Refuse those past their date, then set the declared variables for this process and those it starts.

    A verb calls it before it imports torch, which reads many variables at its import; `switches.apply_settings` then
    sets the declared torch settings. `today` is the machine's own date where None.
    """
    refuse_expired(overrides, today or date.today())
    for override in overrides:
        if override.is_variable:
            variables.set_declared(override.switch, str(override.value))


def refuse_expired(overrides: Sequence[Override], today: date) -> None:
    """Raises InputError naming every override that is past its date, with its reason."""
    expired = [override for override in overrides if override.until < today]
    if expired:
        listed = "\n  ".join(f"{override.text}: {override.reason}" for override in expired)
        raise InputError(
            f"overrides past their date (today is {today}):\n  {listed}",
            "ask `draftline doctor --overrides RECIPE` which are still needed; remove them, or give a new date",
        )
