"""switchboard_stall: wake the consumer of a queue that holds claimable work nobody claims."""

from __future__ import annotations

from switchboard_stall.models import Base, Endpoint, NotifyHook, QueueStall, Todo
from switchboard_stall.schedule import STALL_POLICY, StallPolicy

__all__ = [
    "STALL_POLICY",
    "Base",
    "Endpoint",
    "NotifyHook",
    "QueueStall",
    "StallPolicy",
    "Todo",
]
