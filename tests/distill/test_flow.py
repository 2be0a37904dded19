"""Timesteps, noise and the noised latent."""

from __future__ import annotations

import math

import pytest
import torch

from sparge_core.distill import flow


def test_x_t_goes_from_the_clip_to_noise() -> None:
    clip, noise = torch.randn(2, 3, 16, 2, 4, 4)
    x_t = flow.noised(clip, noise, torch.tensor([0.0, 0.25, 1.0]))
    torch.testing.assert_close(x_t[0], clip[0])
    torch.testing.assert_close(x_t[1], 0.75 * clip[1] + 0.25 * noise[1])
    torch.testing.assert_close(x_t[2], noise[2])


def test_the_ratio_of_noise_to_signal_is_log_normal() -> None:
    draws = flow.Timesteps(flow.LOGIT_NORMAL, mean=1.5, std=1.6, shift=1.0)
    t = torch.tensor([draws.draw(0, position) for position in range(3000)], dtype=torch.float64)
    logs = torch.log(t / (1 - t))
    assert abs(logs.mean() - 1.5) < 0.1
    assert abs(logs.std() - 1.6) < 0.1


def test_uniform_timesteps_cover_the_interval() -> None:
    draws = flow.Timesteps(flow.UNIFORM, mean=1.5, std=1.6, shift=1.0)
    t = torch.tensor([draws.draw(0, position) for position in range(2000)])
    assert torch.histc(t, 4, 0, 1).min() > 400


@pytest.mark.parametrize("shift", [0.5, 3.0])
def test_a_shift_moves_each_t_as_it_moves_a_samplers(shift: float) -> None:
    plain, moved = (flow.Timesteps(flow.UNIFORM, 0.0, 1.0, s) for s in (1.0, shift))
    for position in range(5):
        t = plain.draw(0, position)
        assert math.isclose(moved.draw(0, position), shift * t / (1 + (shift - 1) * t), rel_tol=1e-12)


def test_every_position_purpose_and_seed_has_noise_of_its_own_and_again_the_same() -> None:
    like = torch.zeros(4, 8)
    first = flow.noise_like(like, 0, 5)
    assert torch.equal(first, flow.noise_like(like, 0, 5))
    others = [
        flow.noise_like(like, 0, 6),
        flow.noise_like(like, 1, 5),
        flow.noise_like(like, 0, 5, flow.HELD_OUT),
    ]
    assert not any(torch.equal(first, other) for other in others)
