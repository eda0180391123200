"""Ends a process whose starter is gone, however that ended: no training goes on that nobody knows of.

A parent-death signal (prctl) would do it too, but counts the thread that started the process, and a notebook's threads
come and go; so a thread looks.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

from wamlab.lab.lock import birth_of, is_gone, this_process

TIED_TO = "WAMLAB_TIED_TO"  # in the environment: "pid:born host", of whoever started this process
LOOK_S = 0.5
GRACE_S = 60.0  # for a step and a checkpoint


def tie() -> dict[str, str]:
    """Return what to put into the environment of a process that shall end when this one has ended."""
    me = this_process()
    return {TIED_TO: f"{me['pid']}:{me['born']}:{me['host']}"}


def hold_lifeline(environment: Mapping[str, str] = os.environ, *, grace_s: float = GRACE_S) -> None:
    """Interrupt this process by SIGTERM once the one it is tied to is gone, and end it ``grace_s`` later at the latest.

    Under torchrun it is tied to the agent too. Does nothing for a process that is tied to none.
    """
    owners = []
    if tied := environment.get(TIED_TO, ""):
        pid, born, host = tied.split(":", 2)
        owners.append({"pid": int(pid), "born": None if born == "None" else born, "host": host})
    if "TORCHELASTIC_RUN_ID" in environment:
        agent = os.getppid()
        owners.append(this_process() | {"pid": agent, "born": birth_of(agent)})
    if owners:
        threading.Thread(target=_look, args=(owners, grace_s), name="lifeline", daemon=True).start()


def _look(owners: list[dict[str, Any]], grace_s: float) -> None:
    while not any(map(is_gone, owners)):
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(128 + signal.SIGTERM)
