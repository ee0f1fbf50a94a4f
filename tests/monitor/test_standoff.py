"""When ranks that wait for each other are a standoff, and when not."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed import HashStore

from draftline.monitor.standoff import SURE_S, Standoff, Wait

LIMIT_S = 60.0


@dataclass
class World:
    """Three ranks at a board; each looks once a second, one after the other."""

    now: float = 1000.0
    board: HashStore = field(default_factory=HashStore)
    waits: list[Wait | None] = field(default_factory=lambda: [None] * 3)

    def __post_init__(self) -> None:
        self.ranks = [Standoff(self.board, rank, 3, LIMIT_S) for rank in range(3)]

    def wait(self, rank: int, text: str) -> None:
        self.waits[rank] = Wait(text, self.now)

    def passes(self, seconds: float) -> list[tuple[int, str]]:
        """Who ended the run with what words meanwhile."""
        said = []
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            looks = [(rank, standoff.look(self.waits[rank], self.now)) for rank, standoff in enumerate(self.ranks)]
            said += [(rank, reason) for rank, reason in looks if reason is not None]
        return said


def test_all_ranks_that_wait_past_the_limit_are_told_with_what_each_waits_for() -> None:
    world = World()
    for rank, text in enumerate(("waiting for features", "waiting for room", "waiting for all ranks")):
        world.wait(rank, text)
    assert world.passes(LIMIT_S + SURE_S - 1) == []
    rank, reason = world.passes(3)[0]
    assert rank == 0
    assert reason == (
        "stalled: all ranks have waited for each other for 60 s and more: "
        "rank 0 waiting for features, rank 1 waiting for room, rank 2 waiting for all ranks"
    )


def test_one_rank_that_works_is_enough() -> None:
    world = World()
    world.wait(0, "waiting for features")
    world.wait(2, "waiting for room")
    assert world.passes(10 * LIMIT_S) == []


def test_waits_that_end_before_the_limit_are_none_however_often_they_come() -> None:
    world = World()
    for number in range(20):
        for rank in range(3):
            world.wait(rank, f"waiting for micro-batch {number}")
        assert world.passes(LIMIT_S - 1) == []


def test_a_wait_that_ends_takes_its_word_back() -> None:
    """Rank 1's ends just after all were late: rank 0 has seen all keys once, and not for long enough."""
    world = World()
    for rank in range(3):
        world.wait(rank, "waiting")
    assert world.passes(LIMIT_S + 2) == []
    world.wait(1, "waiting for the next")
    assert world.passes(LIMIT_S - 1) == []
    assert world.passes(SURE_S + 3) != []
