"""The wake itself: from a todo that became ready to a signed POST at each hook that admits it.

:class:`Dispatcher` is what a service runs; the functions beside it manage an endpoint's hooks.
"""

from __future__ import annotations

from switchboard_stall.notify.body import BodyTooLarge
from switchboard_stall.notify.dispatcher import Dispatcher
from switchboard_stall.notify.hooks import (
    EndpointNotFound,
    Hook,
    HookNotFound,
    HookRefused,
    MintedSecret,
    StaleSnapshot,
    TooManyHooks,
    create_hook,
    delete_hook,
    destroy_expired_secrets,
    disable_hook,
    enable_hook,
    list_hooks,
    rotate_hook,
)
from switchboard_stall.notify.pipeline import DispatcherStats
from switchboard_stall.notify.secrets import (
    NotifyExtraMissing,
    SealedSecretError,
    SecretBox,
    SecretKeyError,
)
from switchboard_stall.notify.signing import SecretInvalid
from switchboard_stall.notify.target import HostUnresolved, TargetPolicy, TargetRefused

__all__ = [
    "BodyTooLarge",
    "Dispatcher",
    "DispatcherStats",
    "EndpointNotFound",
    "Hook",
    "HookNotFound",
    "HookRefused",
    "HostUnresolved",
    "MintedSecret",
    "NotifyExtraMissing",
    "SealedSecretError",
    "SecretBox",
    "SecretInvalid",
    "SecretKeyError",
    "StaleSnapshot",
    "TargetPolicy",
    "TargetRefused",
    "TooManyHooks",
    "create_hook",
    "delete_hook",
    "destroy_expired_secrets",
    "disable_hook",
    "enable_hook",
    "list_hooks",
    "rotate_hook",
]
