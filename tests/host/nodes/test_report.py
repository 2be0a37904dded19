"""The report node after a real sampling run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge_core.geometry import BLOCK_K, BLOCK_Q

from .conftest import HEADS, LAYERS, STEPS, Model

Patch = Callable[..., Model]
Sample = Callable[..., Tensor]
Report = Callable[..., tuple[Tensor, str, dict[str, Any]]]


@pytest.fixture
def report(rooms: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Report:
    """Runs the report node: image, text and the decoded JSON. Its preview goes to a temporary folder."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path))

    def report(model: Model, samples: Tensor, **shown: int) -> tuple[Tensor, str, dict[str, Any]]:
        output = rooms.report.SpargeSparsityReport.execute(model, {"samples": samples}, **shown)
        image, text, numbers = output.args
        assert output.ui["text"] == (text,)
        (shown,) = output.ui["images"]
        assert (tmp_path / shown["filename"]).is_file()
        return image, text, json.loads(numbers)

    return report


def test_it_says_what_the_run_did(model: Model, patch: Patch, sample: Sample, report: Report) -> None:
    patched = patch(model, sparsity=0.6, dense_layers="1")
    image, text, numbers = report(patched, sample(patched))
    assert image.ndim == 4
    assert image.shape[-1] == 3
    assert image.dtype == torch.float32
    assert 0.0 <= image.min() < image.max() <= 1.0
    assert numbers["sparse_calls"] == STEPS
    assert numbers["dense_calls"] == {"layer set to dense": STEPS}
    assert numbers["attention_ms"] > 0.0
    assert numbers["layers"] == [f"blocks.{block}" for block in range(LAYERS)]
    assert numbers["settings"]["config"]["sparsity"] == 0.6
    assert "layer set to dense" in text
    assert (
        "Settings (manual): top_k 0.03, sparsity 0.6, from 0% to 100% of the sampling, dense layers: 1"
        in text
    )
    assert "Note" not in text


@pytest.fixture
def masks(rooms: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks of all sparse calls from now on, in their order."""
    made: list[Any] = []
    block_mask = rooms.attention.block_mask

    def spy(*args: Any, **kwargs: Any) -> Any:
        made.append(block_mask(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(rooms.attention, "block_mask", spy)
    return made


def kept_pairs(mask: Any) -> Tensor:
    """double (B, H): pairs of tokens that are kept, counted one by one."""
    tokens = mask.dense().repeat_interleave(BLOCK_Q, 2).repeat_interleave(BLOCK_K, 3)
    return tokens[:, :, : mask.q_len, : mask.k_len].double().sum((2, 3))


def test_its_numbers_are_those_of_the_masks(
    model: Model, patch: Patch, sample: Sample, report: Report, masks: list[Any]
) -> None:
    patched = patch(model, sparsity=0.0, top_p=0.4)
    numbers = report(patched, sample(patched, size=(3, 20, 22)))[2]
    tokens = 3 * 10 * 11
    assert len(masks) == LAYERS * STEPS
    pairs = masks[0].counts.shape[0] * tokens**2
    by_call = [[kept_pairs(masks[step * LAYERS + layer]) for step in range(STEPS)] for layer in range(LAYERS)]
    for layer, calls in enumerate(by_call):
        heads = 1.0 - torch.stack(calls).sum((0, 1)) / (STEPS * pairs)
        assert numbers["sparsity_by_head"][layer] == pytest.approx(heads.tolist(), abs=1e-12)
        skipped = [1.0 - float(kept.sum()) / (pairs * HEADS) for kept in calls]
        assert numbers["sparsity_map"][layer] == pytest.approx(skipped, abs=1e-12)
    assert 0.0 < numbers["sparsity"] < 1.0


def test_it_shows_where_the_chosen_head_looks_on_the_grid_of_the_video(
    model: Model, patch: Patch, sample: Sample, report: Report, masks: list[Any]
) -> None:
    patched = patch(model)
    samples = sample(patched, size=(3, 20, 22))
    shown = report(patched, samples, layer=1, step=2, head=1)[2]["mask"]
    assert (shown["layer"], shown["step"], shown["head"]) == ("blocks.1", 1, 1)
    assert shown["grid"] == [3, 10, 11]
    centre = (1 * 10 + 5) * 11 + 5
    mask = masks[1 * LAYERS + 1]
    row = mask.dense()[0, :, centre // BLOCK_Q].double()
    assert shown["share"] == row[1].tolist()
    assert shown["query_tokens"][0] <= centre < shown["query_tokens"][1]
    assert report(patched, samples, layer=1, step=2)[2]["mask"]["share"] == row.mean(0).tolist()


@pytest.mark.parametrize(
    ("shown", "sentence"),
    [
        ({"layer": 0}, "layer 0 was not sparse, so it has no mask to show; sparse were blocks.1"),
        ({"layer": 99}, "layer 99 was not sparse, so it has no mask to show; sparse were blocks.1"),
        ({"step": 9}, "no layer was sparse at step 9, so there is no mask to show; sparse were 1, 2"),
        ({"layer": 1, "step": 9}, "layer 1 was sparse at step 9"),
        ({"head": 7}, "blocks.1 has heads 0 to 1, so there is no head 7 to show"),
    ],
)
def test_a_mask_that_there_is_not_is_a_note(
    shown: dict[str, int], sentence: str, model: Model, patch: Patch, sample: Sample, report: Report
) -> None:
    patched = patch(model, dense_layers="0")
    _, text, numbers = report(patched, sample(patched), **shown)
    assert sentence in text
    assert numbers["mask"] is None


def test_a_run_without_a_sparse_call_has_a_report(
    model: Model, patch: Patch, sample: Sample, report: Report
) -> None:
    patched = patch(model, backend="dense")
    image, text, numbers = report(patched, sample(patched), layer=1)
    assert image.ndim == 4
    assert text.startswith("Sparse calls: none.")
    assert (numbers["mask"], numbers["kept_mass"], numbers["probe"]) == (None, None, None)
    assert "Note" not in text


def test_the_probe_ranks_layers_by_the_error_of_their_attention(
    model: Model,
    patch: Patch,
    sample: Sample,
    report: Report,
    rooms: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patched = patch(model, sparsity=0.8)
    truth = sample(patched, steps=3)
    calls: list[tuple[int, float, float]] = []
    attend = rooms.attention.SparseAttention.attend

    def spy(self: Any, layer: Any, call: Any) -> Tensor:
        out = attend(self, layer, call)
        dense = torch.nn.functional.scaled_dot_product_attention(call.q, call.k, call.v)
        dense = dense.transpose(1, 2).flatten(2)
        if self.current.step == 1:
            calls.append((layer.block, float((out - dense).abs().sum()), float(dense.abs().sum())))
        return out

    monkeypatch.setattr(rooms.attention.SparseAttention, "attend", spy)
    probed = rooms.probe.SpargeSparsityProbe.execute(patched, steps=1).args[0]
    samples = sample(probed, steps=3)
    assert torch.equal(samples, truth)
    _, text, numbers = report(probed, samples)
    probe = numbers["probe"]
    errors = [
        sum(part for block, part, _ in calls if block == layer)
        / sum(whole for block, _, whole in calls if block == layer)
        for layer in range(LAYERS)
    ]
    assert probe["steps"] == [1]
    assert probe["error"] == pytest.approx(errors, rel=1e-4)
    assert probe["ranking"] == [
        f"blocks.{layer}" for layer in sorted(range(LAYERS), key=lambda x: -errors[x])
    ]
    assert numbers["speedup"] > 0.0  # the same calls ran both ways
    assert "Probe at step 2: relative L1 of sparse against dense attention" in text


def test_the_node_shows_how_the_run_goes_on(
    model: Model, sample: Sample, rooms: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[tuple[str, str]] = []
    bars: list[tuple[str, Any]] = []
    registry = SimpleNamespace(
        update_progress=lambda node, value, most: bars.append((node, (value, most))),
        finish_progress=lambda node: bars.append((node, "end")),
    )
    monkeypatch.setattr(rooms.host, "show_text", lambda node, text: lines.append((node, text)))
    monkeypatch.setattr(rooms.host, "get_progress_state", lambda: registry)
    layers = rooms.host.self_attention_layers(model)
    settings = rooms.attention.choose_settings(
        "manual",
        rooms.attention.SparseConfig(sparsity=0.5),
        rooms.attention.DensePolicy(min_tokens=0),
        "auto",
        None,
    )
    attention = rooms.attention.SparseAttention(settings, layers)
    sample(rooms.host.patch_self_attention(model, attention, "12"), size=(3, 20, 22))
    assert bars == [("12", (1, 2)), ("12", (2, 2)), ("12", "end")]
    assert {node for node, _ in lines} == {"12"}
    sparsity = attention.runs[-1].summary["sparsity"]
    assert re.fullmatch(rf"Step 1/2: [\d.]+% skipped; {LAYERS} sparse, 0 dense", lines[0][1])
    assert lines[-1][1] == f"Step 2/2: {sparsity:.1%} skipped; {2 * LAYERS} sparse, 0 dense"

    bars.clear()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(rooms.host.patch_self_attention(model, attention, "12"), callback=interrupt)
    assert bars[-1] == ("12", "end")


def test_it_is_about_the_run_that_made_the_latent(
    model: Model, patch: Patch, sample: Sample, report: Report
) -> None:
    patched = patch(model)
    first, second = sample(patched, steps=1), sample(patched, steps=3)
    assert report(patched, first)[2]["steps"] == 1
    assert report(patched, first.half())[2]["steps"] == 1  # as --fp16-intermediates hands it on
    assert report(patched, second)[2]["steps"] == 3
    _, text, numbers = report(patched, torch.zeros_like(first))
    assert numbers["steps"] == 3
    assert "no run of this model made this latent, so these are the numbers of its latest run" in text


def test_a_model_without_a_students_weights_is_warned_about_high_sparsity(
    model: Model, patch: Patch, sample: Sample, report: Report, rooms: SimpleNamespace
) -> None:
    settings = {"sparsity": 0.9, "top_k": 0.0}
    warning = "but the model carries no settings of a distilled student"
    large = (3, 32, 32)  # 72 blocks a head, or the one block that each row keeps would be more than a tenth
    patched = patch(model, **settings)
    assert warning in report(patched, sample(patched, size=large, steps=1))[1]

    student = model.clone()
    student.set_attachments(rooms.host.STUDENT, rooms.host.patch_of(patched).settings.config)
    trained = patch(student, **settings)
    assert warning not in report(trained, sample(trained, size=large, steps=1))[1]


def test_a_model_without_the_patch_or_a_run_gets_a_sentence_and_the_graph_goes_on(
    model: Model, patch: Patch, report: Report, caplog: pytest.LogCaptureFixture
) -> None:
    for given, sentence in (
        (model, "has not been through SpargeAttention2; connect the MODEL"),
        (patch(model), "No sampler has run with this model yet; connect the LATENT"),
    ):
        caplog.clear()
        image, text, numbers = report(given, torch.zeros(1))
        assert sentence in text
        assert numbers == {"problem": text}
        assert [record.getMessage() for record in caplog.records] == [f"SpargeAttention2: {text}"]
        assert image.shape[0] == 1
        assert image.min() < 0.5  # the sentence is in the picture, too
