"""The published client, unmodified, against the example models."""

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

MODELS = ["addsub_go", "addsub_python"]


@pytest.fixture(params=["grpc", "http"])
def api(request, server):
    module = grpc if request.param == "grpc" else http
    client = module.InferenceServerClient(server.address(request.param))
    yield module, client
    client.close()


def inputs(module, *arrays):
    out = []
    for i, array in enumerate(arrays):
        tensor = module.InferInput(f"INPUT{i}", list(array.shape), "INT32")
        out.append(tensor.set_data_from_numpy(array))
    return out


@pytest.mark.parametrize("model", MODELS)
def test_infer(api, model):
    module, client = api
    a = np.arange(24, dtype=np.int32).reshape(2, 12)
    b = np.full((2, 12), 7, np.int32)
    result = client.infer(model, inputs(module, a, b), request_id="seven")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), a + b)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), a - b)


@pytest.mark.parametrize("model", MODELS)
def test_system_shared_memory(api, model):
    module, client = api
    a, b = np.arange(1000, dtype=np.int32).reshape(1, 1000), np.ones((1, 1000), np.int32)
    region = shm.create_shared_memory_region("io", "/nereid-test-io", 4 * a.nbytes)
    try:
        shm.set_shared_memory_region(region, [a, b])
        client.register_system_shared_memory("io", "/nereid-test-io", 4 * a.nbytes)
        tensors, outputs = [], []
        for i in (0, 1):
            tensors.append(module.InferInput(f"INPUT{i}", [1, 1000], "INT32"))
            tensors[i].set_shared_memory("io", a.nbytes, i * a.nbytes)
            outputs.append(module.InferRequestedOutput(f"OUTPUT{i}"))
            outputs[i].set_shared_memory("io", a.nbytes, (2 + i) * a.nbytes)
        client.infer(model, tensors, outputs=outputs)
        found = shm.get_contents_as_numpy(region, np.int32, [4, 1000])
        np.testing.assert_array_equal(found[2:], [(a + b)[0], (a - b)[0]])
    finally:
        client.unregister_system_shared_memory()
        shm.destroy_shared_memory_region(region)


def test_metadata_config_statistics_index(api):
    module, client = api
    as_json = {"as_json": True} if module is grpc else {}
    assert client.get_model_metadata("addsub_go", **as_json)["platform"] == "python-like"
    config = client.get_model_config("addsub_python", **as_json)
    assert config.get("config", config)["backend"] == "python"
    (stats,) = client.get_inference_statistics("addsub_go", **as_json)["model_stats"]
    assert {"queue", "compute_input", "compute_infer", "compute_output"} <= set(stats["inference_stats"])
    index = client.get_model_repository_index(**as_json)
    rows = index["models"] if isinstance(index, dict) else index
    assert {r["name"]: r["state"] for r in rows} == {m: "READY" for m in ["identity", *MODELS]}


def test_model_control_is_refused_without_the_flag(api):
    with pytest.raises(InferenceServerException, match="model-control-mode"):
        api[1].load_model("identity")
