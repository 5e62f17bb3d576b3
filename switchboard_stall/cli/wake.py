"""How a command sends wakes: the dispatcher as the process's ready hook, with what the operator allows."""

from __future__ import annotations

from contextlib import contextmanager
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any, TypeVar

import click
from attrs import frozen

from switchboard_stall.notify import Dispatcher
from switchboard_stall.ready import set_todo_ready_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine

_F = TypeVar("_F", bound="Callable[..., Any]")


@frozen
class Allowed:
    """Where the operator lets wakes go beside public addresses over https."""

    cidrs: tuple[str, ...] = ()
    http: bool = False


def allow_options(command: _F) -> _F:
    """Give a command ``--allow-cidr`` and ``--allow-http``, as ``allow_cidr`` and ``allow_http``."""
    for option in (
        click.option("--allow-http", is_flag=True, help="Call hooks whose URL is http, too."),
        click.option(
            "--allow-cidr",
            metavar="CIDR",
            multiple=True,
            callback=_cidrs,
            help="Private addresses that hooks may have, such as 10.1.0.0/16; may be given again.",
        ),
    ):
        command = option(command)
    return command


def dispatcher(engine: Engine, allowed: Allowed) -> Dispatcher:
    """Return a dispatcher under the key in the environment, not started.

    :raises SecretKeyError: there is no key.
    """
    return Dispatcher(engine, allow_cidrs=allowed.cidrs, allow_http=allowed.http)


@contextmanager
def waking(dispatcher: Dispatcher) -> Iterator[Dispatcher]:
    """Run a dispatcher as this process's ready hook, for the length of the context."""
    with dispatcher:
        previous = set_todo_ready_hook(dispatcher.enqueue)
        try:
            yield dispatcher
        finally:
            set_todo_ready_hook(previous)


def _cidrs(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        try:
            ip_network(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    return values
