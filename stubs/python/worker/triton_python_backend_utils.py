"""triton_python_backend_utils: what a Triton model.py imports.

Source: the documentation of Triton's Python backend. Inputs are read-only numpy views of
memory that the host or the client filled; an output is copied once, into memory that the host
or the client reads, and not at all when it was made with allocate_output.
"""

import struct

import numpy as np

from nereid_stub import log as _log

__all__ = [
    "InferenceRequest", "InferenceResponse", "Logger", "Tensor", "TritonError",
    "TritonModelException", "allocate_output", "deserialize_bytes_tensor", "get_input_config_by_name",
    "get_input_tensor_by_name", "get_output_config_by_name", "get_output_tensor_by_name",
    "numpy_to_triton_type", "serialize_byte_tensor", "triton_string_to_numpy", "triton_to_numpy_type",
    "using_decoupled_model_transaction_policy",
]  # fmt: skip

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2

# By the number that the configuration's DataType, Triton's API and the frames all use.
_NAMES = [
    "INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "FP32", "FP64", "BYTES", "BF16",
]  # fmt: skip
_NUMPY = [
    None, np.dtype(np.bool_), np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32),
    np.dtype(np.uint64), np.dtype(np.int8), np.dtype(np.int16), np.dtype(np.int32), np.dtype(np.int64),
    np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.object_), None,
]  # fmt: skip
_BYTES, _BF16 = 13, 14
_DATATYPES = {dtype: number for number, dtype in enumerate(_NUMPY) if dtype is not None}


class TritonModelException(Exception):
    """A fault of the model or of how it uses this module."""


class TritonError:
    """An error to answer one request with."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    __slots__ = ("_message", "_code")

    def __init__(self, message, code=INTERNAL):
        self._message, self._code = str(message), int(code)

    def message(self):
        return self._message

    def code(self):
        return self._code

    def __str__(self):
        return self._message


class Tensor:
    """A named array. BYTES arrays have dtype object and elements of type bytes."""

    # _array is the numpy form, _data the raw bytes as a uint8 array; each is made when it is
    # asked for. _source is where an input lies: (buffer, offset, byte size).
    __slots__ = ("_name", "_datatype", "_shape", "_array", "_data", "_source", "_lease")

    def __init__(self, name, numpy_array):
        if not isinstance(numpy_array, np.ndarray):
            raise TritonModelException(
                "Tensor '%s' needs a numpy array, got %s" % (name, type(numpy_array).__name__)
            )
        self._name = name
        datatype = _DATATYPES.get(numpy_array.dtype)
        if datatype is None:
            if numpy_array.dtype.kind not in "SU":
                raise TritonModelException(
                    "Tensor '%s': numpy type %s has no Triton datatype" % (name, numpy_array.dtype)
                )
            datatype = _BYTES
        self._datatype = datatype
        self._shape = numpy_array.shape
        self._array = numpy_array
        self._data = self._source = self._lease = None

    @classmethod
    def _of(cls, name, datatype, shape, data, source=None):
        """A tensor of raw bytes: a uint8 array, or a part of a buffer."""
        self = cls.__new__(cls)
        self._name, self._datatype, self._shape, self._data, self._source = name, datatype, shape, data, source
        self._array = self._lease = None
        return self

    def name(self):
        return self._name

    def triton_dtype(self):
        """The datatype's number, as TRITONSERVER_DataType."""
        return self._datatype

    def shape(self):
        return list(self._shape)

    def is_cpu(self):
        return True

    def as_numpy(self):
        """The tensor as a numpy array: of an input, a read-only view without a copy."""
        array = self._array
        if array is None:
            array = self._array = self._view()
        return array

    def _view(self):
        if self._datatype == _BYTES:
            return deserialize_bytes_tensor(self._raw()).reshape(self._shape)
        dtype = _NUMPY[self._datatype]
        if dtype is None:
            raise TritonModelException(
                "Tensor '%s': numpy has no %s; use to_dlpack()" % (self._name, _NAMES[self._datatype])
            )
        if self._source is None:
            return self._data.view(dtype).reshape(self._shape)
        buffer, offset, _ = self._source
        # Made from the buffer itself, not as a view of an array: what the model derives from
        # it then refers to it, and so tells whether the memory is still in use.
        return np.ndarray(self._shape, dtype, buffer, offset)

    def to_dlpack(self):
        """A DLPack capsule of the tensor's memory."""
        from nereid_stub import dlpack

        return dlpack.export(self._raw(), self._datatype, self._shape)

    def __dlpack__(self, **_):
        return self.to_dlpack()

    def __dlpack_device__(self):
        return (1, 0)

    @staticmethod
    def from_dlpack(name, source):
        """A tensor of a DLPack capsule's memory, or of an object with __dlpack__."""
        from nereid_stub import dlpack

        try:
            data, datatype, shape = dlpack.take(source)
        except TypeError as error:
            raise TritonModelException("Tensor '%s': %s" % (name, error)) from None
        return Tensor._of(name, datatype, shape, data)

    def _raw(self):
        """The tensor's bytes as a uint8 array."""
        if self._data is None:
            if self._source is not None:
                buffer, offset, n = self._source
                self._data = np.ndarray(n, np.uint8, buffer, offset)
            elif self._datatype == _BYTES:
                self._data = np.frombuffer(_serialize(self._array), np.uint8)
            else:
                self._data = np.ascontiguousarray(self._array).reshape(-1).view(np.uint8)
        return self._data


class InferenceRequest:
    """One inference to answer."""

    # _head and _texts are the request's frame: its fixed fields, and the texts behind the
    # tensors; most models never ask for them.
    __slots__ = ("_id", "_head", "_texts", "_inputs", "_wanted", "_placements", "_sequence", "_model", "_leases", "_fault")

    def inputs(self):
        return self._inputs

    def request_id(self):
        return self._texts[: self._head[10]].decode("utf-8", "replace")

    def correlation_id(self):
        """An integer, or a string where the client gave one."""
        if self._head[12]:
            return self._texts[self._head[10] + self._head[11] :].decode("utf-8", "replace")
        return self._head[5]

    def requested_output_names(self):
        return list(self._wanted)

    def model_name(self):
        return self._model.name

    def model_version(self):
        return self._model.version

    def flags(self):
        """TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END."""
        return self._head[8] if self._sequence is None else self._sequence

    def set_flags(self, flags):
        self._sequence = flags

    def timeout(self):
        """In microseconds; 0 for none."""
        return self._head[6]

    def priority(self):
        return self._head[7]

    def parameters(self):
        """The request's parameters as a JSON object."""
        start, n = self._head[10], self._head[11]
        return self._texts[start : start + n].decode("utf-8", "replace") if n else "{}"

    def is_cancelled(self):
        return self._model.cancelled(self._id)

    def get_response_sender(self):
        raise TritonModelException("response senders (decoupled models) are not supported yet")


class InferenceResponse:
    """The answer to a request: tensors, or an error."""

    __slots__ = ("_outputs", "_error")

    def __init__(self, output_tensors=None, error=None):
        if error is not None and not isinstance(error, TritonError):
            error = TritonError(error)
        self._outputs, self._error = output_tensors or [], error

    def output_tensors(self):
        return self._outputs

    def has_error(self):
        return self._error is not None

    def error(self):
        return self._error


def get_input_tensor_by_name(inference_request, name):
    """The input of that name, or None."""
    for tensor in inference_request._inputs:
        if tensor._name == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response, name):
    """The output of that name, or None."""
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None


def allocate_output(inference_request, name, shape, dtype):
    """An output to be filled in place: its as_numpy() is memory that the host or the client
    reads, so that answering with it copies nothing. Its contents are undefined."""
    return inference_request._model.allocate(inference_request, name, tuple(shape), np.dtype(dtype))


def get_input_config_by_name(model_config, name):
    """The entry of that name in the parsed configuration's "input", or None."""
    return next((p for p in model_config.get("input", []) if p["name"] == name), None)


def get_output_config_by_name(model_config, name):
    """The entry of that name in the parsed configuration's "output", or None."""
    return next((p for p in model_config.get("output", []) if p["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config):
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_to_numpy_type(data_type):
    """The numpy type of a datatype's number."""
    dtype = _NUMPY[data_type]
    return None if dtype is None else dtype.type


def numpy_to_triton_type(data_type):
    """The number of the datatype of a numpy type."""
    return _DATATYPES[np.dtype(data_type)]


def triton_string_to_numpy(triton_type_string):
    """The numpy type of a datatype as a configuration spells it, such as "TYPE_FP32"."""
    name = triton_type_string.replace("TYPE_", "", 1).replace("STRING", "BYTES")
    return triton_to_numpy_type(_NAMES.index(name))


def _serialize(array):
    parts = []
    for element in array.reshape(-1).tolist() if array.dtype.kind == "S" else array.flat:
        if not isinstance(element, bytes):
            element = str(element).encode()
        parts.append(struct.pack("<I", len(element)))
        parts.append(element)
    return b"".join(parts)


def serialize_byte_tensor(input_tensor):
    """The raw form of an array of strings, as an array with one element of type bytes; None
    for an array without elements."""
    if input_tensor.size == 0:
        return None
    if input_tensor.dtype.kind not in "OSU":
        raise TritonModelException("cannot serialize bytes tensor: invalid datatype")
    return np.asarray(_serialize(input_tensor), dtype=np.object_)


def deserialize_bytes_tensor(encoded_tensor):
    """The elements of a raw BYTES tensor as a flat array of type object."""
    data = bytes(encoded_tensor)
    strings, at, end = [], 0, len(data)
    while at < end:
        if end - at < 4:
            raise TritonModelException("BYTES tensor ends inside a length")
        n = int.from_bytes(data[at : at + 4], "little")
        at += 4
        if n > end - at:
            raise TritonModelException("BYTES tensor ends inside an element of %d bytes" % n)
        strings.append(data[at : at + n])
        at += n
    out = np.empty(len(strings), dtype=np.object_)
    out[:] = strings
    return out


class LogLevel:
    INFO, WARNING, ERROR, VERBOSE = range(4)


class Logger:
    """Writes to the server's log."""

    LogLevel = LogLevel
    INFO, WARNING, ERROR, VERBOSE = range(4)

    @staticmethod
    def log(message, level=LogLevel.INFO):
        _log.write(_log.LEVELS[int(level)], message)

    @staticmethod
    def log_info(message):
        _log.write(_log.INFO, message)

    @staticmethod
    def log_warn(message):
        _log.write(_log.WARNING, message)

    @staticmethod
    def log_error(message):
        _log.write(_log.ERROR, message)

    @staticmethod
    def log_verbose(message):
        _log.write(_log.VERBOSE, message)



_LATER = {"MetricFamily", "Metric", "ModelConfig", "PreferredMemory", "load_model", "unload_model", "is_model_ready"}


def __getattr__(name):
    if name in _LATER:
        raise AttributeError("triton_python_backend_utils.%s is not supported yet by this server" % name)
    raise AttributeError("module 'triton_python_backend_utils' has no attribute %r" % name)
