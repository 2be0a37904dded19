"""The loop: steps of AdamW on a pair's trained parameters, an average of them, validation and checkpoints.

All that is random depends on the seed and on a sample's position in the run, so a resumed run takes the same
steps, bit for bit, and a step is the same, up to rounding, however many processes share it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import DistillError, checkpoint
from .data import Dataset, Sample
from .flow import DIFFUSION, HELD_OUT, noise_like, noised, squared_error
from .options import FREE_ON_RESUME, TrainOptions
from .pair import Batch, Pair

WEIGHT, AVERAGE, MOMENT, SQUARE = "weight.", "average.", "moment.", "square."  # tensors of a checkpoint
AVERAGE_WARMUP = 10  # the average's decay is at most (1 + step) / (10 + step): early weights soon fade

Record = dict[str, Any]


class Distillation:
    """One run. `records` makes its steps; `save` and `resume` move it to and from checkpoints.

    train, held_out: of one data set. Attribute `step`: how many steps were made.
    """

    def __init__(self, options: TrainOptions, pair: Pair, data: Dataset) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        if options.batch % (world * options.micro_batch):
            raise DistillError(
                f"batch is {options.batch}, which {world} processes with a micro_batch of "
                f"{options.micro_batch} cannot share; make it a multiple of {world * options.micro_batch}."
            )
        self.options = options
        self.pair = pair
        self.data, self.held_out = data.split(options.held_out, options.seed)
        self.step = 0
        self._facts = {**pair.facts, "data": data.fingerprint}
        self._rank, self._world = (dist.get_rank() if world > 1 else 0), world
        self._weights = list(pair.trained.values())
        self._optimizer = torch.optim.AdamW(
            self._weights,
            lr=options.rate,
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
        )
        self._reader = ThreadPoolExecutor(1, "samples")
        self._ahead: dict[range, Future[tuple[list[Sample], Tensor, Tensor]]] = {}
        self._average = [weight.detach().clone() for weight in self._weights] if options.ema else []

    # ------------------------------------------------------------------------------------------------------
    # Steps

    def records(self) -> Iterator[Record]:
        """Make the remaining steps, validate and save as the options say; yields what each step gave.

        Keys: step, loss, norm (of the gradients before clipping), rate, seconds; after some steps validation.
        Before the first step a record of step 0 with the validation of the untrained student.
        """
        if self.step == 0 and self.held_out.entries:
            yield {"step": 0, "validation": self.validate()}
        while self.step < self.options.steps:
            record = self._make_step()
            last = self.step == self.options.steps
            if self.held_out.entries and (last or self.step % self.options.validate_every == 0):
                record["validation"] = self.validate()
            yield record
            if last or self.step % self.options.save_every == 0:
                self.save()

    def _make_step(self) -> Record:
        options, started = self.options, time.perf_counter()
        rate = options.rate * min(1.0, (self.step + 1) / max(options.warmup, 1))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        share = options.batch // self._world
        first = self.step * options.batch + self._rank * share
        total = torch.zeros((), device=self.pair.device)
        chunks = [
            range(at, at + options.micro_batch) for at in range(first, first + share, options.micro_batch)
        ]
        later = range(first + options.batch, first + options.batch + options.micro_batch)
        for positions, following in zip(chunks, [*chunks[1:], later], strict=True):
            loss = self._loss(*self._inputs(positions, following)) * (options.micro_batch / share)
            loss.backward()
            total += loss.detach()
        loss_value = self._mean(total)
        norm = torch.nn.utils.clip_grad_norm_(self._weights, options.clip)
        norm_value = float(getattr(norm, "full_tensor", lambda: norm)())
        self._check_finite(loss_value, norm_value, first)
        self._optimizer.step()
        self.step += 1
        self._update_average()
        seconds = time.perf_counter() - started
        return {"step": self.step, "loss": loss_value, "norm": norm_value, "rate": rate, "seconds": seconds}

    def _inputs(self, positions: range, following: range) -> tuple[Batch, Tensor, Tensor]:
        """Samples, noise and t at these positions of the run; those that follow are read meanwhile."""
        ready = self._ahead.pop(positions, None) or self._reader.submit(self._read, positions)
        self._ahead = {following: self._reader.submit(self._read, following)}
        samples, noise, t = ready.result()
        device = self.pair.device
        return Batch(samples, device), noise.to(device), t.to(device)

    def _read(self, positions: range) -> tuple[list[Sample], Tensor, Tensor]:
        seed = self.options.seed
        samples = [self.data.read(self.data.at(position, seed)) for position in positions]
        noises = [
            noise_like(s.latent, seed, position) for s, position in zip(samples, positions, strict=True)
        ]
        t = torch.tensor([self.options.draws.draw(seed, position) for position in positions])
        return samples, torch.stack(noises), t

    def _loss(self, batch: Batch, noise: Tensor, t: Tensor) -> Tensor:
        """Mean loss of the samples."""
        x_t = noised(batch.latent, noise, t)
        target = noise - batch.latent if self.options.loss == DIFFUSION else self.pair.teacher(x_t, t, batch)
        return squared_error(self.pair.student(x_t, t, batch), target)

    def _check_finite(self, loss: float, norm: float, first: int) -> None:
        if torch.tensor([loss, norm]).isfinite().all():
            return
        file = self.data.entries[self.data.at(first, self.options.seed)].file
        raise DistillError(
            f"The loss of step {self.step + 1} is {loss} and the gradients' norm {norm}: the step was not "
            "made, and earlier checkpoints are intact. Lower learning_rate or clip, or look at the step's "
            f"samples, {file} and the ones after it; then start anew or go on with --resume."
        )

    def _update_average(self) -> None:
        if self._average:
            decay = min(self.options.ema, (1 + self.step) / (AVERAGE_WARMUP + self.step))
            torch._foreach_lerp_(self._average, [weight.detach() for weight in self._weights], 1 - decay)

    def _mean(self, value: Tensor) -> float:
        """Mean over the processes."""
        if self._world > 1:
            dist.all_reduce(value)
            value = value / self._world
        return float(value)

    # ------------------------------------------------------------------------------------------------------
    # Validation

    @torch.no_grad()
    def validate(self) -> Record:
        """Velocity error on the held-out samples, of the average where there is one.

        Σ (u_student - u_teacher)² / Σ u_teacher², at each of the fixed timesteps ("at") and over all
        ("error"). The noise is the same at every validation.
        """
        times = self.options.validation_timesteps
        cases = [(sample, t) for sample in range(len(self.held_out)) for t in range(len(times))]
        sums = torch.zeros(len(times), 2, dtype=torch.float64)
        with self._averaged():
            for start in range(0, len(cases), self._world):
                # All processes take part in every forward; one left over takes a case that does not count.
                mine = start + self._rank
                sample, at = cases[min(mine, len(cases) - 1)]
                error, power = self._compare(sample, times[at])
                if mine < len(cases):
                    sums[at] += torch.stack((error, power)).double().cpu()
        if self._world > 1:
            shared = sums.to(self.pair.device)
            dist.all_reduce(shared)
            sums = shared.cpu()
        error, power = sums.unbind(1)
        if not sums.isfinite().all() or not power.all():
            raise DistillError(
                f"After step {self.step} the velocities of the held-out samples are not finite or zero: the "
                "base or the training is broken. Look at the base's weights, or lower learning_rate."
            )
        at_times = {f"{t:g}": float(value) for t, value in zip(times, error / power, strict=True)}
        return {"error": float(error.sum() / power.sum()), "at": at_times}

    def _compare(self, index: int, at: float) -> tuple[Tensor, Tensor]:
        """Squared velocity error, and square of the teacher's velocity, of a held-out sample at a time."""
        sample = self.held_out.read(index)
        batch = Batch([sample], self.pair.device)
        noise = noise_like(sample.latent, self.options.seed, index, HELD_OUT)[None].to(self.pair.device)
        t = torch.tensor([at], device=self.pair.device)
        x_t = noised(batch.latent, noise, t)
        wanted, given = self.pair.teacher(x_t, t, batch).float(), self.pair.student(x_t, t, batch).float()
        return (given - wanted).square().sum(), wanted.square().sum()

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """The average in place of the weights, where there is one."""
        kept = [weight.detach().clone() for weight in self._weights] if self._average else []
        try:
            self._put(self._average)
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for weight, value in zip(self._weights, values, strict=bool(values)):
            weight.copy_(value)

    # ------------------------------------------------------------------------------------------------------
    # Checkpoints

    def save(self) -> Path:
        """A checkpoint of this step; DistillError when it cannot be written."""
        run = {"options": self.options.to_json(), "facts": self._facts}
        return checkpoint.save(self.options.out, self.step, self._tensors(), run, self.options.keep)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint; DistillError unless it is of a run like this one."""
        self._check_same(path, checkpoint.read_run(path))
        self.restore(path)

    def restore(self, path: Path) -> None:
        """Take weights, optimiser and step from a checkpoint, whatever it was trained on."""
        checkpoint.load_into(path, self._tensors())
        self.step = checkpoint.read_run(path)["step"]
        for weight in self._weights:
            self._optimizer.state[weight]["step"].fill_(self.step)

    def _check_same(self, path: Path, run: Record) -> None:
        now, then = self.options.to_json(), run["options"]
        changed = [
            f"{name} was {then.get(name)} and is {value}"
            for name, value in now.items()
            if name not in FREE_ON_RESUME and then.get(name) != value
        ]
        facts = run["facts"]
        if facts.get("data") != self._facts["data"]:
            changed.append("the data set is not the same samples in the same order")
        if {**facts, "data": None} != {**self._facts, "data": None}:
            changed.append("the base is another model")
        if changed:
            raise DistillError(
                f"{path} cannot be resumed: {'; '.join(changed)}. Give what it was started with, or start "
                "anew in another folder."
            )

    def _tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by name. The optimiser's state is made where no step has made it yet."""
        tensors: dict[str, Tensor] = {}
        for number, (name, weight) in enumerate(self.pair.trained.items()):
            state = self._optimizer.state[weight]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
            tensors[WEIGHT + name] = weight.detach()
            tensors[MOMENT + name] = state["exp_avg"]
            tensors[SQUARE + name] = state["exp_avg_sq"]
            if self._average:
                tensors[AVERAGE + name] = self._average[number]
        return tensors
