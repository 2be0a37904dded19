"""Files that are no whole safetensors file: refused by what they are, and never opened as a pickle."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from sparge_core.wan import StudentError, read_student
from sparge_core.wan.header import read_header

from .conftest import Save
from .files import wan_model


def test_a_header_gives_tensors_and_metadata(save: Save) -> None:
    header = read_header(save({"a": (2, 3), "b": (5,)}, metadata={"note": "kept"}))
    assert header.metadata == {"note": "kept"}
    assert {name: (info.dtype, info.shape) for name, info in header.tensors.items()} == {
        "a": ("BF16", (2, 3)),
        "b": ("BF16", (5,)),
    }


def test_nothing_behind_the_header_is_read(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(wan_model())
    header_bytes = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    taken = []
    real_open = Path.open

    def counting_open(self: Path, *args: Any, **kwargs: Any) -> Any:
        file = real_open(self, *args, **kwargs)
        read = file.read
        taken.append(0)

        class Counting:
            def __enter__(self) -> Counting:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def seek(self, at: int) -> int:
                return file.seek(at)

            def read(self, count: int) -> bytes:
                taken[-1] += count
                return read(count)

        return Counting()

    monkeypatch.setattr(Path, "open", counting_open)
    read_student(path)
    assert 0 < sum(taken) <= header_bytes + 64 < path.stat().st_size / 10


def message(path: Path) -> str:
    with pytest.raises(StudentError) as error:
        read_student(path)
    text = str(error.value)
    assert text.startswith(path.name)
    assert "expected" in text
    assert "\n" not in text
    return text


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999999])
def test_a_file_cut_off_in_its_tensors_is_said_to_be(save: Save, share: float) -> None:
    path = save(wan_model())
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[: start + int(share * (len(data) - start))])
    assert "cut off" in message(path)


@pytest.mark.parametrize("count", [9, 20, 1000])
def test_a_file_cut_off_in_its_header_is_said_to_be(save: Save, count: int) -> None:
    path = save(wan_model())
    path.write_bytes(path.read_bytes()[:count])
    assert "cut off in its header" in message(path)


def test_an_empty_file_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").touch()
    assert "is empty" in message(tmp_path / "a.safetensors")


def test_bytes_behind_the_last_tensor_are_refused(save: Save) -> None:
    path = save(wan_model())
    path.write_bytes(path.read_bytes() + b"x" * 12)
    assert "goes on for 12 bytes" in message(path)


class Bomb:
    """Fails the test when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a pickle was opened",)


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".ckpt", ".bin", ".pkl", ".safetensors"])
@pytest.mark.parametrize("protocol", [0, 2, 4, "zip"])
def test_no_pickle_is_opened_whatever_its_name(tmp_path: Path, suffix: str, protocol: Any) -> None:
    path = tmp_path / f"student{suffix}"
    if protocol == "zip":
        torch.save({"blocks.0.self_attn.q.weight": Bomb()}, path)
    else:
        path.write_bytes(pickle.dumps({"blocks.0.self_attn.q.weight": Bomb()}, protocol))
    text = message(path)
    if suffix != ".safetensors" or protocol != 0:  # protocol 0 is text that begins like no other
        assert "pickle" in text
        assert "not opened" in text


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("blocks.0.self_attn.attn_op.local_attn.proj_l.weight", "parameters of SLA"),
        ("blocks.0.to_gate_compress.weight", "parameters of VSA"),
        ("blocks.0.ffn.0.int8_weight", "parameters of 8-bit linear layers"),
        ("blocks.0.ffn.0.weight", "a zip archive, as .pt, .pth and .ckpt files are); expected"),
    ],
)
def test_a_pickle_of_another_method_is_named_without_opening_it(tmp_path: Path, key: str, named: str) -> None:
    path = tmp_path / "student.pth"
    torch.save({key: torch.zeros(2), "bomb": Bomb()}, path)
    assert named in message(path)
    path.write_bytes(path.read_bytes()[:-40])  # no longer a whole archive
    assert "pickle" in message(path)


def test_a_safetensors_file_under_a_pickles_suffix_is_refused(save: Save) -> None:
    """ComfyUI's own loader would go by the suffix."""
    text = message(save(wan_model(), name="student.pt"))
    assert "Rename it to .safetensors" in text


def test_a_header_length_that_begins_like_a_pickle_is_none(tmp_path: Path) -> None:
    """0x80 0x02 starts pickles of protocol 2, and headers of 640 bytes."""
    text = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(0x280)
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    assert list(read_header(path).tensors) == ["a"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"GGUF\x03\x00\x00\x00" + bytes(64), "GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS"),
        (b"<!DOCTYPE html><html>404</html>", "web page"),
        (b"\x00" * 200, "no kind of file known"),
        (b"abc", "no kind of file known"),
    ],
)
def test_other_files_are_named(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "student.safetensors"
    path.write_bytes(content)
    assert named in message(path)


def with_header(path: Path, header: object, data: int) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return path


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b"{\xff\xfe}",
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [1, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}},
        {"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": [1]},
        {
            "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]},
        },
        {"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8.0]}},
        {"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}},
        {"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}},
        {"__metadata__": 5, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"__metadata__": ["x"], "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"__metadata__": {"x": {}}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.encode("utf-16-le"),
    ],
    ids=range(22),
)
def test_damaged_headers_are_refused(tmp_path: Path, header: object) -> None:
    assert "damaged header" in message(with_header(tmp_path / "a.safetensors", header, 8))


def test_what_a_file_calls_its_tensors_stays_in_one_line(tmp_path: Path) -> None:
    header = {"a\nb\x1b[31m\tc": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    text = message(with_header(tmp_path / "a.safetensors", header, 8))
    assert text.isprintable()
    assert "(a b [31m c)" in text


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_archive_is_a_pickle_too(tmp_path: Path, method: int) -> None:
    path = tmp_path / "student.pth"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("student/data.pkl", bytes(1000))
    data = bytearray(path.read_bytes())
    data[50:58] = b"\xff" * 8  # in what is compressed
    path.write_bytes(data)
    assert "not opened" in message(path)


def test_an_unknown_number_format_is_named(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}
    assert "F4" in message(with_header(tmp_path / "a.safetensors", header, 1))


def test_a_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_student(tmp_path / "none.safetensors")
