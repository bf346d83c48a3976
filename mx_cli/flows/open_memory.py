"""Memory of this process that readers reach by path nixl-read; where it cannot be, they get its bytes by path socket."""

from __future__ import annotations

from collections.abc import Sequence

from mx_cli.base.errors import TransportFailed
from mx_cli.flows.context import Context
from mx_cli.flows.trust import is_loopback
from mx_cli.transport.nixl import Agent, Network, missing
from mx_cli.transport.nixl_env import INSTALL


def network(context: Context, address: str, *, this_host: bool = False) -> Network:
    """The network of the data path with the peer at `address`: as wished, and `this_host` alone for one on loopback."""
    settings = context.settings
    return Network(settings.interface, settings.data_ports, loopback=this_host or is_loopback(address))


def new_agent(name: str, wanted: Network, context: Context, *, gpu: bool = False, trace: bool = False) -> Agent | None:
    """See `Agent`. None without NIXL, which is said. Raises UsageError for a network that makes no sense."""
    if reason := missing():
        _say(context, f"{reason} ({INSTALL})")
        return None
    return Agent(name, wanted, gpu=gpu, trace=trace)


def opened(agent: Agent | None, regions: Sequence[tuple[int, int, int]], context: Context) -> Agent | None:
    """The agent, with these regions open to readers; None where UCX cannot do that, which is said.

    Raises MissingCapability for memory that has to be had in another way.
    """
    if agent is None:
        return None
    try:
        agent.register(regions)
        return agent
    except TransportFailed as error:
        reason = error.what
    except BaseException:
        agent.destroy()
        raise
    agent.destroy()
    _say(context, reason)
    return None


def _say(context: Context, reason: str) -> None:
    context.warn(f"readers get the bytes by path socket only: {reason}")
