import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT0 is the sum of the inputs, OUTPUT1 their difference. ../../../main.go is its twin."""

    def initialize(self, args):
        for tensor in json.loads(args["model_config"])["input"]:
            if tensor["data_type"] != "TYPE_INT32":
                raise pb_utils.TritonModelException(
                    f"input '{tensor['name']}' must be TYPE_INT32, not {tensor['data_type']}"
                )
        self.name = args["model_instance_name"]
        self.executed = 0
        pb_utils.Logger.log_verbose(f"{self.name} is initialized")

    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            wanted = request.requested_output_names()
            results = {"OUTPUT0": a + b, "OUTPUT1": a - b}
            responses.append(
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor(n, v) for n, v in results.items() if n in wanted]
                )
            )
        self.executed += len(requests)
        return responses

    def finalize(self):
        pb_utils.Logger.log_verbose(f"{self.name} is finalized after {self.executed} requests")
