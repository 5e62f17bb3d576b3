"""switchboard_stall: wake the consumer of a queue that holds claimable work nobody claims."""

from __future__ import annotations

from switchboard_stall.models import Base, Endpoint, NotifyHook, QueueStall, Todo
from switchboard_stall.ready import set_todo_ready_hook
from switchboard_stall.reaper import Duty, Reaper
from switchboard_stall.schedule import STALL_POLICY, StallPolicy
from switchboard_stall.statement import nudge_statement
from switchboard_stall.sweep import IsolationError, Nudge, nudge_stalled_queues

__all__ = [
    "STALL_POLICY",
    "Base",
    "Duty",
    "Endpoint",
    "IsolationError",
    "NotifyHook",
    "Nudge",
    "QueueStall",
    "Reaper",
    "StallPolicy",
    "Todo",
    "nudge_stalled_queues",
    "nudge_statement",
    "set_todo_ready_hook",
]
