"""Every kind of Wan video in the real ComfyUI: dense, with every block kept, and sparse; the docs say so."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from family import DOCS, FAMILY, Member, channels, conditioning, page

from .conftest import STEPS, Model

Patch = Callable[..., Model]
Sample = Callable[..., Tensor]
Account = Callable[[Model], dict[str, Any]]

KEEP_ALL = {"top_k": 1.0, "top_p": 1.0, "sparsity": 0.0}


@pytest.fixture
def lengths(rooms: SimpleNamespace) -> Callable[[Model], set[int]]:
    """From now on collects the lengths of the queries of a patched model's self-attention calls."""

    def watch(model: Model) -> set[int]:
        attention = rooms.host.patch_of(model)
        seen: set[int] = set()
        attend = attention.attend

        def attend_and_look(layer: Any, call: Any) -> Tensor:
            seen.add(call.q.shape[1 if call.q.ndim == 3 else 2])
            return attend(layer, call)

        attention.attend = attend_and_look
        return seen

    return watch


def once(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    results: list[Tensor] = []

    def remembered(value: Tensor) -> Tensor:
        if not results:
            results.append(function(value))
        return results[0]

    return remembered


@pytest.mark.parametrize("member", FAMILY, ids=lambda member: member.name)
def test_every_kind_runs_dense_with_all_blocks_and_sparse(
    member: Member,
    load: Callable[..., Model],
    patch: Patch,
    sample: Sample,
    account: Account,
    lengths: Callable[[Model], set[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load(member.kind, config=member.config)
    assert model.model.latent_format.latent_channels == channels(member)
    if member.kind == "animate":  # looking at faces takes seconds, and gives the same each time
        faces = model.model.diffusion_model.motion_encoder
        monkeypatch.setattr(faces, "get_motion", once(faces.get_motion))
    cond = conditioning(member)
    video = {"latent": cond.pop("samples", None), "noise_mask": cond.pop("noise_mask", None)}

    def run(model: Model) -> Tensor:
        # Without guidance: one call a step.
        own = {"sampler": member.sampler, "options": dict(member.options)}
        return sample(model, cond=cond, cfg=1.0, **video, **own)

    truth = run(model)
    assert truth.isfinite().all()
    assert truth.std() > 0.1

    keep_all = patch(model, **KEEP_ALL)
    seen = lengths(keep_all)
    torch.testing.assert_close(run(keep_all), truth, rtol=1e-4, atol=1e-4)
    assert tuple(sorted(seen)) == member.tokens
    kept = account(keep_all)
    assert kept["sparsity"] == 0.0

    patched = patch(model)
    sparse = run(patched)
    assert sparse.isfinite().all()
    assert not torch.allclose(sparse, truth, atol=1e-3)
    did = account(patched)
    assert did["notes"] == []
    assert did["sparsity"] > 0.1
    assert all(share is not None for row in did["sparsity_map"] for share in row)
    modules = [name for name, _ in model.model.diffusion_model.named_modules()]
    in_blocks = [name for name in modules if name.endswith(".self_attn") and "blocks." in name]
    assert sorted(f"{layer}.self_attn" for layer in did["layers"]) == sorted(in_blocks)
    if member.dense is None:
        assert did["dense_calls"] == {}
        assert did["sparse_calls"] == len(did["layers"]) * STEPS
    else:
        assert list(did["dense_calls"]) == [member.dense]
        assert did["sparse_calls"] > 0


def test_the_docs_are_what_the_tables_say() -> None:
    assert DOCS.read_text(encoding="utf-8") == page(), "run: python scripts/host.py run scripts/family.py"
