"""A whole data set rendered: its rows, and by name and number everything that was left out or is worth knowing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from draftline.data.chat import ChatRenderer
from draftline.errors import InputError
from draftline.records import Conversation, TokenRow

BATCH_CONVERSATIONS = 512  # texts of so many conversations go to the tokenizer at once


@dataclass(frozen=True, slots=True)
class RenderedData:
    rows: list[TokenRow]
    conversations: int  # usable and unusable ones
    unusable: Counter[str] = field(default_factory=Counter)  # conversations by reason
    notes: Counter[str] = field(default_factory=Counter)  # informational: the rows concerned are used

    @property
    def supervised_tokens(self) -> int:
        return sum(int(row.loss_mask.sum()) for row in self.rows)

    def table(self) -> str:
        """The counts for people, one line each, the most frequent first."""
        lines = [f"{number:>9,} unusable: {reason}" for reason, number in self.unusable.most_common()]
        return "\n".join(lines + [f"{number:>9,} note: {text}" for text, number in self.notes.most_common()])


def render_conversations(
    conversations: Sequence[Conversation],
    renderer: ChatRenderer,
    max_unusable_share: float,
    found_unusable: Mapping[str, int] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> RenderedData:
    """Render every conversation; `found_unusable` are those that reading already left out, counted with the rest.

    `on_progress` is told the number of conversations done. Raises InputError with the table of reasons when the share
    of unusable conversations exceeds `max_unusable_share` or no row is left.
    """
    unusable = Counter(found_unusable or {})
    data = RenderedData([], len(conversations) + unusable.total(), unusable)
    for start in range(0, len(conversations), BATCH_CONVERSATIONS):
        batch = conversations[start : start + BATCH_CONVERSATIONS]
        for rendered in renderer.render(batch):
            data.rows.extend(rendered.rows)
            data.notes.update(rendered.notes)
            if rendered.unusable is not None:
                data.unusable[rendered.unusable] += 1
        if on_progress is not None:
            on_progress(start + len(batch))
    refuse_unusable(data, max_unusable_share)
    return data


def refuse_unusable(data: RenderedData, max_unusable_share: float) -> None:
    lost = data.unusable.total()
    share = lost / data.conversations if data.conversations else 1.0
    if data.rows and share <= max_unusable_share:
        return
    limit = f"the limit data.max_unusable_share is {max_unusable_share:.1%}"
    rule = limit if data.rows else "nothing is left to train on"
    raise InputError(
        f"{lost:,} of {data.conversations:,} conversations ({share:.1%}) cannot be trained on, {rule}:\n{data.table()}",
        "mend the data, raise data.sequence_length where answers are truncated away, or raise data.max_unusable_share",
    )
