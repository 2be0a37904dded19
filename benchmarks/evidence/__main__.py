"""`python -m benchmarks.evidence`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..measure import machine
from . import __doc__ as about
from . import autoencoder, dit, maps, plan, report, sampling, students
from .run import Run


def demo(run: Run) -> None:
    """Early, so that the model can be looked at before the tables are made."""
    students.train_demo(run)
    sampling.run_demo(run)
    report.show_demo(run)


def every_seed(run: Run) -> None:
    """`one_seed` of each in a process of its own, at once: a model as small as this keeps no GPU busy alone.

    OutOfTime when one had no more time. SystemExit, which names their exit statuses, when one failed.
    """
    command = [sys.executable, "-m", "benchmarks.evidence", *run.arguments]
    if run.clock.minutes_left is not None:
        command += ["--minutes", str(run.clock.minutes_left)]
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for seed in run.seeds:
            workers.append(subprocess.Popen([*command, "--seed", str(seed)]))
        ended = [worker.wait() for worker in workers]
    finally:
        for worker in workers:
            worker.terminate()  # does nothing to one that has ended
    if not set(ended) <= {0, STOPPED}:
        raise SystemExit(
            f"The processes of seeds {run.seeds} ended with status {ended}, where 0 is done and {STOPPED} "
            "out of time: what failed is said above. Mend it and run the same command again; it goes on."
        )
    if STOPPED in ended:
        raise plan.OutOfTime
    students.export_shipped(run)


def one_seed(run: Run) -> None:
    """Everything that is of one seed alone."""
    students.train(run)
    maps.run_all(run)
    sampling.run_all(run)


PHASES: dict[str, Callable[[Run], None]] = {
    "vae": autoencoder.train,
    "latents": autoencoder.encode,
    "dit": dit.train,
    "demo": demo,
    "seeds": every_seed,
}
TIMES = "seconds.json"
STOPPED = 3  # exit status when there was no more time


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.evidence", description=about, formatter_class=raw)
    parser.add_argument("--out", type=Path, default=Path("out/evidence"), help="folder [out/evidence]")
    parser.add_argument("--config", type=Path, default=plan.CONFIG, help="TOML file [evidence.toml]")
    parser.add_argument("--smoke", action="store_true", help="the smallest sizes, on a CPU too")
    parser.add_argument(
        "--minutes", type=float, help=f"stop after so many with status {STOPPED}; run it again to go on"
    )
    parser.add_argument("--seed", type=int, help="students, maps and videos of this one of the seeds alone")
    parser.add_argument("--commit", help="commit to name in the results, where there is no git checkout")
    arguments = tuple(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    if not cuda and not args.smoke:
        parser.error("no NVIDIA GPU is visible to torch; --smoke runs all phases without one")
    device = torch.device("cuda" if cuda else "cpu")
    torch.backends.cudnn.benchmark = True  # the VAE's convolutions have few shapes
    planned = plan.load(args.config, smoke=args.smoke)
    if args.seed not in (None, *planned.seeds):
        parser.error(f"--seed must be one of {planned.seeds}, not {args.seed}")
    run = Run(planned, args.out, device, plan.Clock(args.minutes), arguments, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    facts = machine(device, args.commit)
    run.say(", ".join(facts.values()))
    try:
        if run.seed is not None:
            one_seed(run)
            return 0
        for name, phase in PHASES.items():
            _timed(run, name, phase)
    except plan.OutOfTime:
        run.say("the time is over; run it again to go on")
        return STOPPED
    report.make(run, facts, run.read(TIMES))
    run.say(f"done: {sum(run.read(TIMES).values()) / 60:.1f} minutes in all; see {args.out / 'tables.md'}")
    return 0


def _timed(run: Run, name: str, phase: Callable[[Run], None]) -> None:
    """A phase that is not done yet; its seconds are added to those of earlier tries."""
    seconds = run.read(TIMES) if run.has(TIMES) else {}
    if run.has(f"{name}.done"):
        return
    run.clock.check()
    started = run.clock.seconds
    try:
        phase(run)
        run.write(f"{name}.done", True)
    finally:
        seconds[name] = seconds.get(name, 0.0) + run.clock.seconds - started
        run.write(TIMES, seconds)
    run.say(f"{name}: {seconds[name]:.0f} s")


if __name__ == "__main__":
    raise SystemExit(main())
