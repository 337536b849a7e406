"""Starting workers on this machine: as threads of this program, or as processes of their own.

A launched worker tells its owner when it ends. A process that fails while loading says why through
the mailbox before it exits.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import shutil
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Protocol

import torch

from hocket.engine.connector import open_mailbox
from hocket.engine.messages import Failed, Shutdown
from hocket.engine.worker import Worker, WorkerPlan, parent_watch
from hocket.errors import HocketError

log = logging.getLogger("hocket.launcher")

_counter = itertools.count()


class Launched(Protocol):
    """A worker that was started."""

    address: str  # of the worker's mailbox; a restarted worker has a new one

    def stop(self, timeout_s: float) -> None:
        """End it, by force if it does not end in time."""


class Launcher(Protocol):
    """Starts workers, and gives addresses that they can be reached from."""

    def client_address(self) -> str:
        """A fresh address for a mailbox of the caller's."""

    def launch(self, plan: WorkerPlan, client: str, ended: Callable[[str], None]) -> Launched:
        """Start a worker. `ended(address)` is called, on some thread, when it is gone."""

    def close(self) -> None: ...


@torch.inference_mode()
def serve(plan: WorkerPlan, address: str, client: str, alive: Callable[[], bool]) -> bool:
    """Load and run one worker; False when loading failed, and then `client` has been told."""
    mailbox = open_mailbox(address)
    try:
        worker = Worker(plan, mailbox)
    except Exception as e:
        log.exception("worker %s cannot load", plan.name)
        message = e.message if isinstance(e, HocketError) else f"{type(e).__name__}: {e}"
        mailbox.send(client, Failed(job="", error="StartupError", message=f"worker {plan.name}: {message}"))
        mailbox.flush()
        mailbox.close()
        return False
    worker.run(alive)
    mailbox.close()
    return True


class ThreadLauncher:
    """For a program that speaks a few sentences: nothing to spawn, nothing to serialise."""

    def client_address(self) -> str:
        return f"local:client-{next(_counter)}"

    def launch(self, plan: WorkerPlan, client: str, ended: Callable[[str], None]) -> Launched:
        return _ThreadWorker(plan, f"local:{plan.name}-{next(_counter)}", client, ended)

    def close(self) -> None:
        """Threads end with their workers."""


class _ThreadWorker:
    def __init__(self, plan: WorkerPlan, address: str, client: str, ended: Callable[[str], None]) -> None:
        self.address = address

        def body() -> None:
            try:
                serve(plan, address, client, lambda: True)
            finally:
                ended(address)

        self._thread = threading.Thread(target=body, name=address, daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        mailbox = open_mailbox(f"{self.address}/stop")
        mailbox.send(self.address, Shutdown())
        mailbox.flush()
        mailbox.close()
        self._thread.join(timeout_s)


class ProcessLauncher:
    """One process a worker, spawned: CUDA and forked processes do not mix."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="hocket-")
        self._spawn = multiprocessing.get_context("spawn")

    def client_address(self) -> str:
        return f"ipc://{self._folder}/client-{next(_counter)}"

    def launch(self, plan: WorkerPlan, client: str, ended: Callable[[str], None]) -> Launched:
        address = f"ipc://{self._folder}/{plan.name.replace(':', '-')}-{next(_counter)}"
        process = self._spawn.Process(
            target=_process_main, args=(plan, address, client), name=f"hocket {plan.name}", daemon=True
        )
        process.start()

        def watch() -> None:
            wait([process.sentinel])
            ended(address)

        threading.Thread(target=watch, name=f"watch {plan.name}", daemon=True).start()
        return _ProcessWorker(address, process)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class _ProcessWorker:
    def __init__(self, address: str, process: multiprocessing.process.BaseProcess) -> None:
        self.address, self.process = address, process

    def stop(self, timeout_s: float) -> None:
        self.process.terminate()
        self.process.join(timeout_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _process_main(plan: WorkerPlan, address: str, client: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    raise SystemExit(0 if serve(plan, address, client, parent_watch()) else 1)
