"""The VAE of the evidence run is Wan2.1's own, by ComfyUI's loader and in its numbers."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from benchmarks.evidence.vae import Vae

pytestmark = pytest.mark.host


def test_comfyui_loads_it_at_any_width_and_computes_the_same(comfy: ModuleType) -> None:
    import comfy.sd

    torch.manual_seed(0)
    mine = Vae(16)
    theirs = comfy.sd.VAE(sd={name: weight.clone() for name, weight in mine.state_dict().items()})
    model = theirs.first_stage_model.float()
    assert model.load_state_dict(mine.state_dict()) is not None  # strict: no key is missing or left over
    video, latent = torch.rand(1, 3, 13, 32, 48) * 2 - 1, torch.randn(1, 16, 4, 4, 6)
    with torch.no_grad():
        torch.testing.assert_close(mine.encode(video), model.encode(video), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.decode(latent), model.decode(latent), atol=1e-4, rtol=1e-4)
        # One frame alone, as a picture is.
        torch.testing.assert_close(
            mine.encode(video[:, :, :1]), model.encode(video[:, :, :1]), atol=1e-4, rtol=1e-4
        )
