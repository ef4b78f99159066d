"""Runs of a sweep in processes side by side, which end when the one that started them does."""

import os
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from secure_fedclust.errors import DataError, ParameterError, SecureFedClustError
from secure_fedclust.sweep.cells import Cell
from secure_fedclust.sweep.config import SweepConfig
from secure_fedclust.sweep.data import LabelledData
from secure_fedclust.sweep.runs import Outcome, run_cell

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


Runs = Generator[tuple[Cell, Outcome], None, None]


class WorkerDied(SecureFedClustError):
    """A process ended in the middle of a run, most likely for want of memory."""


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    pipe: Any
    cell: Cell | None = None


def run_here(cells: Sequence[Cell], config: SweepConfig, data: LabelledData) -> Runs:
    """One run after the other, in this process."""
    for cell in cells:
        yield cell, run_cell(cell, config, data)


def run_side_by_side(
    cells: Sequence[Cell], config: SweepConfig, data_dir: str | Path | None, digest: str, jobs: int
) -> Runs:
    """Runs as they are finished, in whatever order.

    Each process loads the data by itself, and makes no run of others than those of the digest.
    Processes are spawned and not forked, because libraries with threads of their own do not
    survive a fork; each uses one thread.
    """
    waiting = list(reversed(cells))
    context = get_context("spawn")
    workers: list[_Worker] = []
    try:
        with _one_thread_each():
            for _ in range(min(jobs, len(cells))):
                ours, theirs = context.Pipe()
                arguments = (theirs, config.to_dict(), data_dir, digest)
                process = context.Process(target=_work, args=arguments, daemon=True)
                process.start()
                theirs.close()
                workers.append(_Worker(process, ours))
        for worker in workers:
            _hand_out(worker, waiting)
        while busy := [worker for worker in workers if worker.cell is not None]:
            ready = connection.wait([worker.pipe for worker in busy])
            for worker in busy:
                if worker.pipe in ready:
                    yield _receive(worker)
                    _hand_out(worker, waiting)
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()


def _hand_out(worker: _Worker, waiting: list[Cell]) -> None:
    worker.cell = waiting.pop() if waiting else None
    if worker.cell is not None:
        with suppress(BrokenPipeError):  # it died: that is found when its answer is read
            worker.pipe.send(worker.cell)


def _receive(worker: _Worker) -> tuple[Cell, Outcome]:
    try:
        cell, outcome = worker.pipe.recv()
    except (EOFError, ConnectionError) as error:
        worker.process.join()
        raise WorkerDied(
            f"a process ended (exit code {worker.process.exitcode}) in the run {worker.cell}: if "
            "memory is short give fewer jobs; a script that gives more than one needs "
            '`if __name__ == "__main__":`; finished runs are kept, and the same command goes on'
        ) from error
    if isinstance(outcome, str):
        raise ParameterError(outcome)
    return cell, outcome


def _work(
    pipe: "Connection[Any, Any]", content: dict[str, Any], data_dir: Path | None, digest: str
) -> None:
    """What a worker does: it loads the data once, and runs what it is told.

    In place of an outcome it answers with a text if the data are not those that were checked.
    """
    # Ctrl-C reaches all processes of a terminal; the first one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    config = SweepConfig.from_dict(content)
    with suppress(EOFError, ConnectionError):  # nobody is there any more
        try:
            data = LabelledData(config, data_dir)
            if data.digest() != digest:
                raise DataError("they have other records or labels than before")
        except SecureFedClustError as error:
            said = f"the data were changed while the sweep was running: {error}: put them back"
            pipe.send((pipe.recv(), said))
            return
        while True:
            cell = pipe.recv()
            pipe.send((cell, run_cell(cell, config, data)))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Libraries read these when they are loaded: what is started now has one thread."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
