"""Acceptance as vLLM counts it, in its library or in a server's metrics, and whether the counts fit the answers.

One count per verification step that had a draft: the prefill step, which yields an answer's first token, is none.
Its counters hold all that a step accepted, also what lies beyond the end of turn or the output limit and is thrown
away after; tau counts committed tokens only, so it is the same number wherever it is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftline.errors import RunError


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Sums over verification steps."""

    drafts: int
    accepted: int
    accepted_per_slot: tuple[int, ...]  # [B-1]

    def tau(self, tokens: int, answers: int) -> float:
        """Tokens committed per verification step, bonus token included (SPEC 7); each answer's first is prefill's."""
        return (tokens - answers) / self.drafts

    @property
    def slot_acceptance(self) -> tuple[float, ...]:
        return tuple(count / self.drafts for count in self.accepted_per_slot)

    def overrun(self, tokens: int, answers: int) -> int:
        """Tokens that the steps committed beyond those of the answers, whose first tokens come from prefill.

        Between 0 and B-1 for each answer, when every step had a draft and no other request was served.
        """
        return self.drafts + self.accepted - (tokens - answers)


def check_counts(where: str, found: Acceptance, tokens: int, answers: int) -> None:
    """Raises RunError when the counts cannot belong to these answers."""
    if found.drafts == 0:
        raise RunError(f"{where}: no verification step had a draft; answers of one token cannot measure acceptance")
    overrun, slots = found.overrun(tokens, answers), len(found.accepted_per_slot)
    if overrun < 0:
        raise RunError(
            f"{where}: {-overrun} of {tokens} tokens were decoded without a draft and tau would not be theirs; "
            "raise the engine's max_model_len, it stops drafting near that limit"
        )
    if overrun > answers * slots:
        raise RunError(
            f"{where}: the counters moved by {found.drafts + found.accepted} tokens for {tokens} tokens of ours: "
            "someone else's requests are mixed in; measure while the server is otherwise idle"
        )
