"""The channels of a split, opened: shared memory inside a host, torch.distributed between hosts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch.distributed as dist

from draftline.channel.distributed import DistributedReceiver, DistributedSender
from draftline.channel.flow import Receiver, Sender
from draftline.channel.routes import FeatureInbox, FeatureOutbox
from draftline.channel.shared import SharedReceiver, SharedSender
from draftline.errors import InputError
from draftline.train.job import Setting

GIB = 2**30


class Connections:
    """One rank's view of all the flows of a split: which are shared memory, and what the other end is called."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.ranks = setting.ranks
        plan, self.placement = self.ranks.plan, setting.recipe.placement
        self.senders = [plan.target_ranks(target)[0] for target in range(plan.targets)]
        self.drafters = plan.drafter_ranks()
        self.slots = setting.layout.slots_within(self.placement.channel_gib * GIB, plan.targets)
        if self.placement.channel == "shared_memory" and len(set(self.ranks.hosts)) > 1:
            raise InputError(
                f"placement.channel shared_memory, and the ranks are on {len(set(self.ranks.hosts))} hosts",
                "use placement.channel=auto",
            )

    def shared(self, one: int, other: int) -> bool:
        return self.placement.channel != "distributed" and self.ranks.hosts[one] == self.ranks.hosts[other]

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.ranks.plan.roles[rank].name})"

    def groups(self) -> dict[tuple[int, int], dist.ProcessGroup]:
        """A group for each pair that shares no host. Collective: every rank makes every group."""
        pairs = [(s, d) for s in self.senders for d in self.drafters if not self.shared(s, d)]
        return {pair: dist.new_group(list(pair)) for pair in pairs}

    def listen(self, folder: Path) -> dict[int, SharedReceiver]:
        """Sender's rank -> this drafter's listening end."""
        mine, setting = self.ranks.role.rank, self.setting
        if self.ranks.role.drafter is None:
            return {}
        return {
            sender: SharedReceiver(
                folder / str(sender), setting.layout, self.slots, setting.target.device, self.name(sender)
            )
            for sender in self.senders
            if self.shared(sender, mine)
        }

    def receivers(
        self, listening: dict[int, SharedReceiver], groups: dict[tuple[int, int], dist.ProcessGroup]
    ) -> list[Receiver]:
        """This drafter's ends, by target replica."""
        mine, setting = self.ranks.role.rank, self.setting
        ends: list[Receiver] = []
        for sender in self.senders:
            if sender in listening:
                listening[sender].accept()
                ends.append(Receiver(listening[sender], self.slots))
            else:
                group, device = groups[sender, mine], setting.target.device
                remote = DistributedReceiver(group, sender, self.name(sender), setting.layout, self.slots, device)
                ends.append(Receiver(remote, self.slots))
        return ends

    def connect_senders(
        self, addresses: list[dict[int, Path]], groups: dict[tuple[int, int], dist.ProcessGroup]
    ) -> list[Sender]:
        """This capturing rank's ends, by drafter; addresses: of every rank, where it listens for which sender."""
        mine, setting = self.ranks.role.rank, self.setting
        ends: list[Sender] = []
        for drafter in self.drafters:
            if mine in addresses[drafter]:
                address, device = addresses[drafter][mine], setting.target.device
                local = SharedSender(address, setting.layout, self.slots, device, self.name(drafter))
                ends.append(Sender(local, self.slots))
            else:
                remote = DistributedSender(groups[mine, drafter], drafter, self.name(drafter), self.slots)
                ends.append(Sender(remote, self.slots))
        return ends


def connect(setting: Setting) -> FeatureInbox | FeatureOutbox | None:
    """A training rank's inbox, a capturing rank's outbox, None on a shard that sends nothing. Collective."""
    ranks, role = setting.ranks, setting.ranks.role
    waiting = ranks.heart.waiting
    connections = ranks.together(lambda: Connections(setting))
    groups = connections.groups()
    with tempfile.TemporaryDirectory(prefix="draftline-") as folder:  # of sockets, which vanish once connected
        listening = ranks.together(lambda: connections.listen(Path(folder)))
        addresses = ranks.gather({sender: end.address for sender, end in listening.items()})
        if role.drafter is not None:
            return FeatureInbox(setting.stream.batch, connections.receivers(listening, groups), waiting)
        if role.shard == 0:
            return FeatureOutbox(connections.connect_senders(addresses, groups), waiting)
    return None
