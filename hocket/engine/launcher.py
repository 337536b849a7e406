"""Starting workers on this machine: as threads of this program, or as processes of their own.

A launched worker tells its owner when it ends. A process that fails while loading says why through
the mailbox before it exits. A worker with a stage that is split is several processes (`hocket.engine.ranks`),
which end together.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Protocol

import torch

from hocket.engine.connector import open_mailbox
from hocket.engine.messages import Failed, Shutdown
from hocket.engine.ranks import rank_address
from hocket.engine.worker import WorkerPlan, open_worker, parent_watch
from hocket.errors import HocketError

log = logging.getLogger("hocket.launcher")

_counter = itertools.count()
Ended = Callable[[str, str], None]
"""Is told, on some thread, the address of a worker that is gone, and which of its processes went first."""


class Launched(Protocol):
    """A worker that was started."""

    address: str  # of the worker's mailbox; a restarted worker has a new one

    def stop(self, timeout_s: float) -> None:
        """End it, by force if it does not end in time."""


class Launcher(Protocol):
    """Starts workers, and gives addresses that they can be reached from."""

    def client_address(self) -> str:
        """A fresh address for a mailbox of the caller's."""

    def launch(self, plan: WorkerPlan, client: str, ended: Ended) -> Launched:
        """Start a worker. `ended` is called once, when it is gone."""

    def close(self) -> None: ...


@torch.inference_mode()
def serve(plan: WorkerPlan, address: str, client: str, alive: Callable[[], bool]) -> bool:
    """Load and run one process of a worker; False when loading failed, and then `client` has been told."""
    mailbox = open_mailbox(address)
    try:
        worker = open_worker(plan, mailbox)
    except Exception as e:
        log.exception("%s cannot load", called(plan))
        message = e.message if isinstance(e, HocketError) else f"{type(e).__name__}: {e}"
        mailbox.send(client, Failed(job="", error="StartupError", message=f"{called(plan)}: {message}"))
        mailbox.flush()
        mailbox.close()
        return False
    try:
        worker.run(alive)
    finally:
        worker.close()
        mailbox.close()
    return True


def called(plan: WorkerPlan) -> str:
    """How messages name a process of a worker."""
    return f"rank {plan.rank} of worker {plan.name}" if plan.rank else f"worker {plan.name}"


def processes_of(plan: WorkerPlan, address: str, meeting: str) -> list[tuple[WorkerPlan, str]]:
    """What each process of a worker is to load, and its address; the worker itself first."""
    if plan.ranks == 1:
        return [(plan, address)]
    return [(plan.of_rank(rank, meeting), rank_address(address, rank)) for rank in range(plan.ranks)]


class ThreadLauncher:
    """For a program that speaks a few sentences: nothing to spawn, nothing to serialise."""

    def client_address(self) -> str:
        return f"local:client-{next(_counter)}"

    def launch(self, plan: WorkerPlan, client: str, ended: Ended) -> Launched:
        return _ThreadWorker(plan, f"local:{plan.name}-{next(_counter)}", client, ended)

    def close(self) -> None:
        """Threads end with their workers."""


class _ThreadWorker:
    def __init__(self, plan: WorkerPlan, address: str, client: str, ended: Ended) -> None:
        self.address = address
        self._folder = tempfile.mkdtemp(prefix="hocket-") if plan.ranks > 1 else None
        parts = processes_of(plan, address, f"{self._folder}/meeting")
        going = threading.Event()  # set by the first that ends
        lock = threading.Lock()

        def body(part: WorkerPlan, own_address: str) -> None:
            try:
                serve(part, own_address, client, lambda: not going.is_set())
            finally:
                with lock:
                    first = not going.is_set()
                    going.set()
                if first:
                    ended(address, called(part))

        self._threads = [
            threading.Thread(target=body, args=(part, own), name=own, daemon=True) for part, own in parts
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> None:
        mailbox = open_mailbox(f"{self.address}/stop")
        mailbox.send(self.address, Shutdown())
        mailbox.flush()
        mailbox.close()
        for thread in self._threads:
            thread.join(timeout_s)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class ProcessLauncher:
    """Processes, spawned: CUDA and forked processes do not mix. One a worker, or one a rank of it."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="hocket-")
        self._spawn = multiprocessing.get_context("spawn")

    def client_address(self) -> str:
        return f"ipc://{self._folder}/client-{next(_counter)}"

    def launch(self, plan: WorkerPlan, client: str, ended: Ended) -> Launched:
        file = f"{self._folder}/{plan.name.replace(':', '-')}-{next(_counter)}"
        address = f"ipc://{file}"
        processes = {
            called(part): self._spawn.Process(
                target=_process_main, args=(part, own, client), name=f"hocket {called(part)}", daemon=True
            )
            for part, own in processes_of(plan, address, f"{file}-meeting")
        }
        for process in processes.values():
            process.start()

        def watch() -> None:
            gone = wait([process.sentinel for process in processes.values()])
            first = next(name for name, process in processes.items() if process.sentinel in gone)
            for process in processes.values():  # the others would wait in a sum for ever
                process.kill()
            ended(address, first)

        threading.Thread(target=watch, name=f"watch {plan.name}", daemon=True).start()
        return _ProcessWorker(address, list(processes.values()))

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class _ProcessWorker:
    def __init__(self, address: str, processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
        self.address, self.processes = address, processes  # the worker itself first

    @property
    def process(self) -> multiprocessing.process.BaseProcess:
        return self.processes[0]

    def stop(self, timeout_s: float) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(timeout_s)
            if process.is_alive():
                process.kill()
                process.join()


def _process_main(plan: WorkerPlan, address: str, client: str) -> None:
    # What a terminal sends to all its processes is for our owner, who may want answers to be finished first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setpgrp"):  # not on Windows
        os.setpgrp()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    raise SystemExit(0 if serve(plan, address, client, parent_watch()) else 1)
