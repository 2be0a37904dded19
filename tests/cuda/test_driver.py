"""The driver API: what is missing or too old is one sentence, and every code is looked at."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from sparge_core.cuda import driver


def test_a_machine_without_a_driver_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(driver.DriverError, match="there is no NVIDIA driver"):
        driver.get()


@pytest.mark.parametrize(("platform", "name"), [("linux", "libcuda.so.1"), ("win32", "nvcuda.dll")])
def test_the_driver_has_its_platforms_name(platform: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def record(library: str) -> Any:
        asked.append(library)
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", record)
    monkeypatch.setattr(driver.sys, "platform", platform)
    with pytest.raises(driver.DriverError, match=name):
        driver.get()
    assert asked == [name]


def test_a_driver_too_old_says_both_versions_and_is_not_initialised(library: Any) -> None:
    library.version = 11080
    with pytest.raises(driver.DriverError, match=r"supports CUDA 11\.8 and 12\.0 is needed: update"):
        driver.get()
    assert library.named("cuInit") == []


def test_a_library_that_is_no_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_open", object)
    with pytest.raises(driver.DriverError, match="is not one"):
        driver.get()


def test_an_error_names_what_was_done_and_the_drivers_words(library: Any) -> None:
    library.cuDevicePrimaryCtxRetain = lambda context, device: 2
    with pytest.raises(driver.DriverError, match=r"opening GPU 1 failed: CUDA_ERROR_2 \(what it means\)"):
        driver.get().primary_context(1)


def test_a_binary_that_the_driver_does_not_know_is_told_from_a_failure(library: Any) -> None:
    library.refused = {b"newer"}
    with pytest.raises(driver.InvalidBinary):
        driver.get().load_library(b"newer")
    library.cuLibraryLoadData = lambda *arguments: 2  # out of memory: another binary would not help
    with pytest.raises(driver.DriverError) as caught:
        driver.get().load_library(b"any")
    assert not isinstance(caught.value, driver.InvalidBinary)


def test_the_context_before_comes_back_after_an_error(library: Any) -> None:
    seen = []

    def fail_within() -> None:
        with driver.get().current_context(1000):
            seen.append(library.current_context)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_within()
    assert (*seen, library.current_context) == (1000, None)


def test_a_tensor_map_is_encoded_at_an_address_that_the_driver_accepts(library: Any) -> None:
    api = driver.get()
    with api.current_context(api.primary_context(0)):
        encoded = api.encode_tensor_map(
            driver.BFLOAT16, 4096, (128, 10, 2, 1), (256, 2560, 5120), (64, 16, 1, 1)
        )
    ((misalignment, kind, pointer, sizes, strides, box),) = library.named("cuTensorMapEncodeTiled")
    assert misalignment == 0
    assert (kind, pointer) == (9, 4096)
    assert (sizes, strides, box) == ((128, 10, 2, 1), (256, 2560, 5120), (64, 16, 1, 1))
    assert len(encoded) == 128
    assert set(encoded) == {len(library.calls)}, "the bytes returned are those that the driver wrote"
