"""The interpreter's own modules: frames, memory, DLPack, the helpers that models import."""

import gc
import json
import mmap
import os
import random

import numpy as np
import pytest
import triton_python_backend_utils as pb
from conftest import ROOT
from nereid_stub import dlpack, wire
from nereid_stub.arena import Arena, Full, lease_size

VECTORS = json.loads((ROOT / "internal/wire/testdata/vectors.json").read_text())


def vectors(name):
    return [v for v in VECTORS if v["Name"] == name]


def test_vectors_are_there():
    assert {v["Name"] for v in VECTORS} == {"request", "response", "segment", "release", "cancel"}


@pytest.mark.parametrize("vector", vectors("request"))
def test_request_vectors(vector):
    frame, want = bytes.fromhex(vector["Hex"]), vector["Request"]
    head = wire.REQUEST_HEAD.unpack_from(frame)
    size, kind, flags, count, number, correlation, timeout, priority, sequence, outputs, id_size, parameters_size, text_size = head
    assert (size, kind, flags, number) == (len(frame), wire.REQUEST, want["Flags"], want["ID"])
    assert (correlation, timeout) == (want["CorrelationID"], want["TimeoutMicros"])
    assert (priority, sequence) == (want["Priority"], want["SequenceFlags"])
    at = 56
    for t in want["Inputs"] or []:
        index, datatype, rank, segment, offset, byte_size = wire.TENSOR.unpack_from(frame, at)
        assert [index, datatype, segment, offset, byte_size] == [t[k] for k in ("Index", "DataType", "Segment", "Offset", "ByteSize")]
        assert list(wire.DIMS[rank].unpack_from(frame, at + 24)) == (t["Shape"] or [])
        at += 24 + 8 * rank
    assert count == len(want["Inputs"] or []) and outputs == len(want["Outputs"] or [])
    for p in want["Outputs"] or []:
        index, placed, _, segment, offset, byte_size = wire.TENSOR.unpack_from(frame, at)
        assert [index, bool(placed), segment, offset, byte_size] == [p[k] for k in ("Index", "Placed", "Segment", "Offset", "ByteSize")]
        at += 24
    for size, key in ((id_size, "RequestID"), (parameters_size, "Parameters"), (text_size, "CorrelationText")):
        assert frame[at : at + size].decode() == want[key]
        at += size
    assert at == len(frame)


@pytest.mark.parametrize("vector", vectors("response"))
def test_response_vectors(vector):
    r = vector["Response"]
    ranks, fields = (), []
    for t in r["Outputs"] or []:
        shape = t["Shape"] or []
        ranks += (len(shape),)
        fields += [t["Index"], t["DataType"], len(shape), t["Segment"], t["Offset"], t["ByteSize"], *shape]
    frame = wire.response(r["ID"], r["Flags"], r["Begin"], r["End"], r["Code"], r["Message"].encode(), ranks, fields)
    assert frame.hex() == vector["Hex"]


def test_segment_and_release_vectors():
    (segment,), (release,) = vectors("segment"), vectors("release")
    assert wire.segment(*segment["Segment"]).hex() == segment["Hex"]
    frame = bytes.fromhex(release["Hex"])
    assert wire.HEADER.unpack_from(frame)[1] == wire.RELEASE
    assert list(wire.PLACE.iter_unpack(frame[16:])) == [(p["Segment"], p["Offset"]) for p in release["Release"]]


def test_arena_leases_never_overlap():
    rng = random.Random(1)
    arena, live = Arena(4 << 20), {}
    for step in range(3000):
        if live and rng.random() < 0.5:
            key = rng.choice(list(live))
            lease, mark = live.pop(key)
            assert bytes(lease[3]) == bytes([mark]) * lease[2]
            arena.release(lease)
        else:
            try:
                lease = arena.lease(rng.choice([1, 100, 5000, 70_000, 500_000]))
            except Full:
                continue
            lease[3][:] = bytes([step % 256]) * lease[2]
            live[lease[:2]] = (lease, step % 256)
    assert arena.total <= 4 << 20
    for lease, _ in live.values():
        arena.release(lease)
    arena.lease(max(len(s) for s in arena.segments) * 4 // 5)  # what was cut small is one again
    for _, fd, _ in arena.fresh:
        os.close(fd)


def test_lease_sizes():
    for n in [*range(1, 5000), 2**20 - 1, 2**20, 2**20 + 1]:
        size = lease_size(n)
        assert size >= n and size % 64 == 0 and size <= max(64, n * 1.25 + 64) and lease_size(size) == size


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int16, np.float16, np.float32, np.int64, np.float64])
def test_dlpack_round_trip(dtype):
    array = np.arange(6).astype(dtype).reshape(2, 3)
    tensor = pb.Tensor("A", array)
    again = pb.Tensor.from_dlpack("B", tensor.to_dlpack())
    assert again.triton_dtype() == tensor.triton_dtype() and again.shape() == [2, 3]
    np.testing.assert_array_equal(again.as_numpy(), array)
    np.testing.assert_array_equal(np.from_dlpack(tensor), array)


def test_dlpack_memory_is_released():
    for _ in range(10):
        capsule = pb.Tensor("A", np.zeros(10, np.float32)).to_dlpack()
        np.from_dlpack(pb.Tensor("A", np.zeros(10, np.float32)))
        del capsule
    gc.collect()
    assert not dlpack._alive


def test_dlpack_of_strings_and_of_strides():
    with pytest.raises(TypeError):
        pb.Tensor("A", np.array([b"x"], dtype=object)).to_dlpack()
    with pytest.raises(pb.TritonModelException, match="contiguous"):
        pb.Tensor.from_dlpack("A", np.arange(12, dtype=np.float32).reshape(3, 4).T)


def test_bf16_has_no_numpy_form():
    tensor = pb.Tensor._of("A", 14, (2,), np.zeros(4, np.uint8))
    with pytest.raises(pb.TritonModelException, match="BF16"):
        tensor.as_numpy()
    assert pb.Tensor.from_dlpack("B", tensor.to_dlpack()).triton_dtype() == 14


def test_inputs_are_read_only_views():
    memory = memoryview(mmap.mmap(-1, 4096))
    memory[8:16] = np.array([1, 2], np.int32).tobytes()
    array = pb.Tensor._of("A", 8, (2,), None, (memory.toreadonly(), 8, 8)).as_numpy()
    assert array.tolist() == [1, 2]
    memory[8:12] = b"\x07\0\0\0"
    assert array[0] == 7  # no copy
    with pytest.raises(ValueError):
        array[0] = 1


def test_strings():
    items = [b"", b"plain", "größe".encode(), b"\0" * 300]
    array = np.array(items, dtype=object)
    raw = pb.serialize_byte_tensor(array).item()
    assert list(pb.deserialize_bytes_tensor(raw)) == items
    assert pb.Tensor("A", np.array(["ä", "b"]))._raw().tobytes() == pb.serialize_byte_tensor(np.array(["ä", "b"], dtype=object)).item()
    for cut in range(1, len(raw)):
        try:
            pb.deserialize_bytes_tensor(raw[:cut])
        except pb.TritonModelException:
            pass


def test_helpers():
    assert pb.triton_string_to_numpy("TYPE_FP32") is np.float32
    assert pb.triton_string_to_numpy("TYPE_STRING") is np.object_
    for number in range(1, 14):
        assert pb.numpy_to_triton_type(pb.triton_to_numpy_type(number)) == number
    config = {"input": [{"name": "A"}], "output": [{"name": "B"}], "model_transaction_policy": {"decoupled": True}}
    assert pb.get_input_config_by_name(config, "A") and not pb.get_input_config_by_name(config, "B")
    assert pb.get_output_config_by_name(config, "B") and pb.using_decoupled_model_transaction_policy(config)
    error = pb.TritonError("text", pb.TritonError.NOT_FOUND)
    assert (error.message(), error.code()) == ("text", 2)
    response = pb.InferenceResponse(error=error)
    assert response.has_error() and response.error() is error
    with pytest.raises(pb.TritonModelException):
        pb.Tensor("A", [1, 2])
    with pytest.raises(pb.TritonModelException):
        pb.Tensor("A", np.array([1 + 2j]))
    with pytest.raises(AttributeError, match="not supported yet"):
        pb.MetricFamily
