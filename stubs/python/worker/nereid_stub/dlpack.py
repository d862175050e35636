"""DLPack capsules for CPU memory, by ctypes: numpy has no bfloat16, DLPack has.

Source: dlpack.h, DLManagedTensor (the form before 1.0, which every consumer takes).
"""

import ctypes

import numpy as np

_CPU = 1


class _Device(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _DELETER)]

_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_api.PyCapsule_IsValid.restype = ctypes.c_int
_api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

_NAME = b"dltensor"

# Triton datatype -> DLPack (code, bits): 0 int, 1 uint, 2 float, 4 bfloat, 6 bool.
CODES = {
    1: (6, 8), 2: (1, 8), 3: (1, 16), 4: (1, 32), 5: (1, 64), 6: (0, 8), 7: (0, 16), 8: (0, 32),
    9: (0, 64), 10: (2, 16), 11: (2, 32), 12: (2, 64), 14: (4, 16),
}  # fmt: skip
_DATATYPES = {code: datatype for datatype, code in CODES.items()}

_alive = {}  # address of a managed tensor -> what it needs


@_DELETER
def _delete(managed):
    _alive.pop(ctypes.addressof(managed.contents), None)


# A capsule that is being destroyed has no reference left, and must not be given one: these
# take its address instead of the object.
_dying_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_dying_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule):
    """Of a capsule that nobody consumed; a consumed one has another name."""
    if _dying_is_valid(capsule, _NAME):
        _alive.pop(_dying_pointer(capsule, _NAME), None)


def export(data, datatype, shape):
    """A capsule of the tensor whose bytes are the uint8 array data, which it keeps alive."""
    if datatype not in CODES:
        raise TypeError("a BYTES tensor has no DLPack form")
    managed = _Managed()
    dims = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    managed.tensor.data = data.__array_interface__["data"][0]
    managed.tensor.device = _Device(_CPU, 0)
    managed.tensor.ndim = len(shape)
    managed.tensor.dtype = _DataType(*CODES[datatype], 1)
    managed.tensor.shape = ctypes.cast(dims, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _delete
    _alive[ctypes.addressof(managed)] = (managed, dims, data)
    return _api.PyCapsule_New(ctypes.addressof(managed), _NAME, ctypes.cast(_destroy, ctypes.c_void_p))


def take(source):
    """(uint8 array, datatype, shape) of a capsule or of an object with __dlpack__.

    The array borrows the producer's memory and keeps the capsule, which is not consumed."""
    capsule = source.__dlpack__() if hasattr(source, "__dlpack__") else source
    if not _api.PyCapsule_IsValid(capsule, _NAME):
        raise TypeError("expected an unused DLPack capsule or an object with __dlpack__")
    tensor = _Managed.from_address(_api.PyCapsule_GetPointer(capsule, _NAME)).tensor
    code = (tensor.dtype.code, tensor.dtype.bits)
    if tensor.device.device_type != _CPU:
        raise TypeError("DLPack device type %d is not supported" % tensor.device.device_type)
    if tensor.dtype.lanes != 1 or code not in _DATATYPES:
        raise TypeError("DLPack type code %d of %d bits is not supported" % code)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    item = tensor.dtype.bits // 8
    if tensor.strides:
        expected = 1
        for size, stride in zip(reversed(shape), [tensor.strides[i] for i in reversed(range(tensor.ndim))]):
            if size != 1 and stride != expected:
                raise TypeError("DLPack tensor is not contiguous in row-major order")
            expected *= size
    n = item * int(np.prod(shape, dtype=np.int64))
    if n == 0:
        return np.empty(0, np.uint8), _DATATYPES[code], shape
    memory = (ctypes.c_uint8 * n).from_address(tensor.data + tensor.byte_offset)
    memory.capsule = capsule
    return np.frombuffer(memory, np.uint8), _DATATYPES[code], shape
