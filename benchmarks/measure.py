"""How it is measured: device time, extra memory, host time, and what the machine is."""

from __future__ import annotations

import gc
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

Run = Callable[[], object]

FLUSH_BYTES = 256 << 20  # several times any L2 cache, so that no call finds its inputs there
MIN_CALLS, MAX_CALLS = 3, 100
MAX_HOST_CALLS = 50  # far below the launch queue's length, at which issuing would wait for the device


class Clock:
    """Times calls on one device. `cell_ms`: device time that one measurement may take."""

    def __init__(self, device: torch.device, cell_ms: float) -> None:
        self.device = device
        self.cell_ms = cell_ms
        self.cuda = device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES if self.cuda else 0, dtype=torch.int8, device=device)

    def milliseconds(self, run: Run) -> float:
        """Median time of one call, between events on the device's own clock, each with a cold L2."""
        first = statistics.median(self._times(run, 1))
        calls = max(MIN_CALLS, min(MAX_CALLS, int(self.cell_ms / max(first, 1e-3))))
        return statistics.median(self._times(run, calls))

    def _times(self, run: Run, calls: int) -> list[float]:
        if not self.cuda:
            return [self._host_time(run) for _ in range(calls)]
        events = [(timing_event(), timing_event()) for _ in range(calls)]
        for start, end in events:
            self._flush.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in events]

    @staticmethod
    def _host_time(run: Run) -> float:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3

    def host_microseconds(self, run: Run, ms: float) -> float | None:
        """Median host time to issue one call on a queue with room; None on a CPU and for long calls.

        Python's collector stays off, as in timeit: what the peers import gives it much to look through.
        """
        calls = min(MAX_HOST_CALLS, int(self.cell_ms / max(ms, 1e-3)))
        if not self.cuda or calls < MIN_CALLS:
            return None
        torch.cuda.synchronize(self.device)
        collecting = gc.isenabled()
        gc.disable()
        try:
            times = [self._host_time(run) for _ in range(calls)]
        finally:
            if collecting:
                gc.enable()
        torch.cuda.synchronize(self.device)
        return statistics.median(times) * 1e3

    def extra_megabytes(self, run: Run, output_bytes: int) -> float | None:
        """Peak memory of one call beyond its inputs and its output, in 10^6 bytes; None on a CPU."""
        if not self.cuda:
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - before - output_bytes) / 1e6


def timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


@dataclass(frozen=True)
class Load:
    """How hard a GPU worked: mean clock of its multiprocessors in MHz, and mean power in watts."""

    clock_mhz: float
    power_w: float


LOAD_QUERY = "--query-gpu=utilization.gpu,clocks.sm,power.draw.instant"
LOAD_EVERY_MS = 100
BUSY = 90  # percent; samples below it are of before, after and in between


@contextmanager
def watched(device: torch.device) -> Iterator[Callable[[], Load | None]]:
    """Has nvidia-smi sample the GPU; what it yields tells, after the block, the mean of the busy samples.

    None on a CPU, without nvidia-smi, or where no sample was busy. The GPU is told by its UUID, since torch's
    numbers are not nvidia-smi's.
    """
    lines: list[str] = []
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        yield lambda: None
        return
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    command = ["nvidia-smi", f"--id=GPU-{uuid.removeprefix('GPU-')}", LOAD_QUERY]
    command += ["--format=csv,noheader,nounits", f"--loop-ms={LOAD_EVERY_MS}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield lambda: mean_load(lines)
    finally:
        process.terminate()
        lines += process.communicate()[0].splitlines()


def mean_load(lines: Sequence[str]) -> Load | None:
    """Mean of the busy ones of nvidia-smi's lines "utilisation, clock, power"; None if there are none."""
    busy = []
    for line in lines:
        try:
            utilisation, clock, power = map(float, line.split(","))
        except ValueError:  # cut off, or "[N/A]"
            continue
        if utilisation >= BUSY:
            busy.append((clock, power))
    return Load(*map(statistics.mean, zip(*busy, strict=True))) if busy else None


def machine(device: torch.device, commit: str | None) -> dict[str, str]:
    """What every result file says of where it was made."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    here = str(Path(__file__).parent)
    return {
        "gpu": gpu,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "commit": commit or _first_line("git", "-C", here, "rev-parse", "--short=12", "HEAD"),
        "date": date.today().isoformat(),
    }


def _first_line(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return "unknown"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else "unknown"
