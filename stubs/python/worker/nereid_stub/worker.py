"""One interpreter: loads a model.py and answers the requests of its data channel."""

import array
import importlib
import json
import mmap
import os
import socket
import sys
import time
import traceback
import weakref

import numpy as np
import triton_python_backend_utils as pb

from . import log, wire
from .arena import Arena, Full

_now = time.monotonic_ns
refcount = sys.getrefcount
_NOTHING = memoryview(b""), 0, 0
_NOWHERE = {}


class Model:
    """The author's model, and what requests need of it."""

    def __init__(self, args, sock):
        self.name = args["model_name"]
        self.version = args["model_version"]
        self.instance_name = args["instance_name"]
        config = json.loads(args["model_config"])
        self.input_names = [i["name"] for i in config.get("input", [])]
        self.output_names = [o["name"] for o in config.get("output", [])]
        self.output_index = {name: i for i, name in enumerate(self.output_names)}
        self.sock = sock
        self.arena = Arena(args["output_byte_size_limit"])
        self.segments = {}  # number -> read-only buffer of the whole segment
        self.regions = {}  # number -> writable buffer of a client's region
        self.lent = {}  # (number, offset) -> lease that the host reads
        self.cancels = set()
        self.instance = self._initialize(args, config)

    def _initialize(self, args, config):
        sys.path.append(args["version_directory"])
        sys.path.append(args["model_directory"])
        file = config.get("default_model_filename") or "model.py"
        if not os.path.exists(os.path.join(args["version_directory"], file)):
            raise FileNotFoundError("no %s in %s" % (file, args["version_directory"]))
        module = importlib.import_module("%d.%s" % (self.version, file[: -len(".py")] if file.endswith(".py") else file))
        if not hasattr(module, "TritonPythonModel"):
            raise AttributeError("%s has no class TritonPythonModel" % file)
        instance = module.TritonPythonModel()
        if not hasattr(instance, "execute"):
            raise AttributeError("class TritonPythonModel has no method execute")
        if hasattr(instance, "initialize"):
            instance.initialize({
                "model_config": args["model_config"],
                "model_instance_kind": args["instance_kind"].replace("KIND_", "", 1),
                "model_instance_name": args["instance_name"],
                "model_instance_device_id": str(args["device_id"]),
                "model_repository": args["model_directory"],
                "model_version": str(args["model_version"]),
                "model_name": args["model_name"],
            })  # fmt: skip
        return instance

    def finalize(self):
        if hasattr(self.instance, "finalize"):
            self.instance.finalize()

    def cancelled(self, request_id):
        return request_id in self.cancels

    # Memory.

    def map_segment(self, number, access, byte_size, fd):
        old = self.segments.get(number)
        if old is not None:
            os.close(fd)
            return
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if access == wire.ACCESS_REGION else 0)
        mapped = mmap.mmap(fd, byte_size, mmap.MAP_SHARED, prot)
        os.close(fd)
        if access == wire.ACCESS_REGION:
            self.regions[number] = memoryview(mapped)
        self.segments[number] = memoryview(mapped).toreadonly()

    def drop_segment(self, number):
        # Arrays that the model has kept hold the mapping; it ends with the last of them.
        self.segments.pop(number, None)
        self.regions.pop(number, None)

    def allocate(self, request, name, shape, dtype):
        index = self.output_index.get(name)
        datatype = pb._DATATYPES.get(dtype)
        if index is None or datatype is None or datatype == pb._BYTES:
            raise pb.TritonModelException(
                "cannot allocate output '%s' of type %s: the model has no such output, or the type no fixed size"
                % (name, dtype)
            )
        n = dtype.itemsize
        for size in shape:
            n *= size
        where = request._placements.get(index)
        tensor = pb.Tensor.__new__(pb.Tensor)
        if where is not None:
            data = self.placed(name, where, n)
            tensor._lease = (where[0], where[1], None, None)
        else:
            tensor._lease = self.arena.lease(n)
            data = np.ndarray(n, np.uint8, tensor._lease[3])
            request._leases.append(tensor._lease)
        tensor._name, tensor._datatype, tensor._shape, tensor._data = name, datatype, shape, data
        tensor._source = None
        tensor._array = data.view(dtype).reshape(shape)
        return tensor

    def placed(self, name, where, n):
        """The client's own memory for an output of n bytes."""
        number, offset, room = where
        if room < n:
            raise OutputTooSmall(
                "shared memory size specified with the request for output '%s' (%d bytes) should be at "
                "least %d bytes to hold the results" % (name, room, n)
            )
        return np.ndarray(n, np.uint8, self.regions[number], offset)


class OutputTooSmall(Exception):
    """An output does not fit the client's region."""


class Worker:
    def __init__(self, model, sock):
        self.model = model
        self.sock = sock
        self.batch = []
        self.wishes = {}  # placements of a frame -> what they say
        self.faults = False  # a request of the batch has a bad input
        self.fds = array.array("i")

    def run(self):
        """Answers until the host closes the channel."""
        sock, buf = self.sock, bytearray(1 << 16)
        view = memoryview(buf)
        start = end = 0
        ancillary = socket.CMSG_SPACE(4)
        receive = sock.recvmsg_into
        header = wire.HEADER.unpack_from
        while True:
            n, messages, _, _ = receive([view[end:]], ancillary, socket.MSG_CMSG_CLOEXEC)
            if messages:
                for _, _, data in messages:
                    self.fds.frombytes(data)
            if n == 0:
                return
            end += n
            while end - start >= 16:
                size, kind, flags, count, number = header(buf, start)
                if end - start < size:
                    break
                if kind == wire.REQUEST:
                    self.batch.append(self.request(buf, start))
                    if not flags & wire.MORE:
                        batch, self.batch = self.batch, []
                        self.execute(batch)
                        batch = None
                elif kind == wire.RELEASE:
                    self.release(buf, start + 16, count)
                elif kind == wire.SEGMENT:
                    _, _, _, _, _, access, byte_size = wire.SEGMENT_BODY.unpack_from(buf, start)
                    self.model.map_segment(number, access, byte_size, self.fds.pop(0))
                elif kind == wire.DROP:
                    self.model.drop_segment(number)
                elif kind == wire.CANCEL:
                    self.model.cancels.add(number)
                start += size
            if start == end:
                start = end = 0
            elif start or size > len(buf):
                rest = bytes(view[start:end])
                if size > len(buf):
                    buf = bytearray(2 * size)
                    view = memoryview(buf)
                buf[: len(rest)] = rest
                start, end = 0, len(rest)

    def release(self, buf, at, count):
        release, lent = self.model.arena.release, self.model.lent
        for place in wire.PLACE.iter_unpack(buf[at : at + 16 * count]):
            lease = lent.pop(place, None)
            if lease is not None:
                release(lease)

    def request(self, buf, at):
        model = self.model
        head = wire.REQUEST_HEAD.unpack_from(buf, at)
        count, outputs, end = head[3], head[9], at + head[0]
        at += 56
        r = pb.InferenceRequest.__new__(pb.InferenceRequest)
        r._fault = r._sequence = None
        r._head, r._id, r._model, r._leases = head, head[4], model, []
        r._inputs = inputs = []
        tensor, dims, segments, names, of = wire.TENSOR.unpack_from, wire.DIMS, model.segments, model.input_names, pb.Tensor._of
        for _ in range(count):
            index, datatype, rank, number, offset, n = tensor(buf, at)
            shape = dims[rank].unpack_from(buf, at + 24)
            at += 24 + 8 * rank
            t = of(names[index], datatype, shape, None, (segments[number], offset, n) if n else _NOTHING)
            inputs.append(t)
            if datatype == pb._BYTES and number in model.regions:
                # The host has looked at strings that came in the request, and at no region.
                try:
                    t.as_numpy()
                except (pb.TritonModelException, ValueError) as error:
                    r._fault = "inference input '%s': %s" % (t._name, error)
                    self.faults = True
        if head[2] & wire.ALL_OUTPUTS:
            r._wanted, r._placements = model.output_index, _NOWHERE
        else:
            text = bytes(buf[at : at + 24 * outputs])
            found = self.wishes.get(text)
            if found is None:
                found = self.wish(text)
            r._wanted, r._placements = found
            at += 24 * outputs
        r._texts = buf[at:end] if end > at else b""
        return r

    def wish(self, text):
        """(wanted, placements) of the placements in a frame. Clients repeat themselves, so
        those without a place are kept."""
        wanted, placements = {}, {}
        for index, placed, _, number, offset, n in wire.TENSOR.iter_unpack(text):
            wanted[self.model.output_names[index]] = index
            if placed:
                placements[index] = (number, offset, n)
        found = wanted, placements
        if not placements and len(self.wishes) < 1024:
            self.wishes[text] = found
        return found

    def execute(self, batch):
        begin = _now()
        if self.faults:
            batch = self.refuse(batch, begin)
            if not batch:
                return
        try:
            responses = self.model.instance.execute(batch)
            if responses is None or len(responses) != len(batch):
                raise pb.TritonModelException(
                    "expected %d responses, got %s" % (len(batch), "None" if responses is None else len(responses))
                )
        except BaseException as error:  # also SystemExit: a model must not end the interpreter unheard
            responses = None
            failure = self.describe(error)
        end = _now()
        if responses is None:
            answers = [(wire.ERROR | wire.FAILED, pb.TritonError.INTERNAL, failure, (), ())] * len(batch)
            for r in batch:
                self.give_back(r, ())
        else:
            answers = [self.answer(r, responses[i]) for i, r in enumerate(batch)]
        responses = None  # what still refers to an input now is the model's
        frames = []
        for r, (flags, code, message, ranks, fields) in zip(batch, answers):
            flags |= wire.FINAL | self.keeps(r)
            frames.append(wire.response(r._id, flags, begin, end, code, message, ranks, fields))
            if self.model.cancels:
                self.model.cancels.discard(r._id)
        if self.model.arena.fresh:
            self.announce()
        self.sock.sendall(frames[0] if len(frames) == 1 else b"".join(frames))

    def refuse(self, batch, begin):
        """Answers the requests with bad inputs; the others are left."""
        self.faults = False
        for r in batch:
            if r._fault is not None:
                message = r._fault.encode("utf-8", "replace")
                self.sock.sendall(
                    wire.response(r._id, wire.FINAL | wire.ERROR, begin, _now(), pb.TritonError.INVALID_ARG, message, (), ())
                )
        return [r for r in batch if r._fault is None]

    def describe(self, error):
        lines = traceback.extract_tb(error.__traceback__)
        where = "".join("\n  %s(%d): %s" % (f.filename, f.lineno, f.name) for f in lines[1:])
        text = "Failed to process the request(s) for model instance '%s', message: %s: %s\n\nAt:%s\n" % (
            self.model.instance_name, type(error).__name__, error, where,
        )  # fmt: skip
        return text.encode("utf-8", "replace")

    def answer(self, r, response):
        """(flags, code, message, ranks, fields) of one response; its outputs are in place then."""
        used = []
        try:
            error = pb.TritonError("the model answered a request with None") if response is None else response._error
            if error is not None:
                self.give_back(r, ())
                return wire.ERROR, error._code & 0xFF, error._message.encode("utf-8", "replace"), (), ()
            ranks, fields = (), []
            for t in response._outputs:
                index = r._wanted.get(t._name)
                if index is None:
                    continue
                lease = t._lease
                if lease is not None:
                    n = t._data.nbytes
                    used.append(lease)
                else:
                    lease, n = self.place(r, t, index, used)
                shape = t._shape
                rank = len(shape)
                ranks += (rank,)
                fields += (index, t._datatype, rank, lease[0], lease[1], n)
                fields += shape
        except Exception as error:
            self.give_back(r, used)
            code = pb.TritonError.UNAVAILABLE if isinstance(error, Full) else pb.TritonError.INTERNAL
            message = str(error) if isinstance(error, (Full, OutputTooSmall)) else "%s: %s" % (type(error).__name__, error)
            return wire.ERROR, code, message.encode("utf-8", "replace"), (), ()
        if r._leases:
            self.give_back(r, (), keep=used)
        for lease in used:
            if lease[2] is not None:
                self.model.lent[lease[:2]] = lease
        return 0, 0, b"", ranks, fields

    def place(self, r, t, index, used):
        """Copies an output to where it is read; (lease, byte size)."""
        model = self.model
        source = t._array
        if source is None or t._datatype == pb._BYTES:
            source = t._raw()
        n = source.nbytes
        where = r._placements.get(index)
        if where is not None:
            target = model.placed(t._name, where, n)
            lease = where[0], where[1], None, None
        elif n == 0:
            return (0, 0, None, None), 0
        else:
            lease = model.arena.lease(n)
            used.append(lease)
            if n <= 4096:  # below it, going through bytes is quicker than through an array
                lease[3][:n] = source.tobytes()
                return lease, n
            target = np.ndarray(n, np.uint8, lease[3])
        np.copyto(target.view(source.dtype).reshape(source.shape), source)
        return lease, n

    def keeps(self, r):
        """Whether the model still refers to an input, whose memory must then stay as it is
        until it does not; the host hears of that."""
        kept = None
        for t in r._inputs:
            if refcount(t) > 3:  # the list's, the loop's and the call's
                t.as_numpy()
            root = t._array
            if root is not None and t._datatype != pb._BYTES and refcount(root) > 3:
                kept = kept or KeptInputs(self.sock, r._id)
                kept.add(root)
            root = t._data
            if root is not None and refcount(root) > 3:  # the tensor's, the local's and the call's
                kept = kept or KeptInputs(self.sock, r._id)
                kept.add(root)
        r._inputs = ()
        return 0 if kept is None else wire.KEEPS_INPUTS

    def give_back(self, r, used, keep=()):
        """Returns leases that no response carries."""
        places = {lease[:2] for lease in keep}
        for lease in {lease[:2]: lease for lease in [*r._leases, *used]}.values():
            if lease[2] is not None and lease[:2] not in places:
                self.model.arena.release(lease)
        r._leases = []

    def announce(self):
        for number, fd, byte_size in self.model.arena.fresh:
            frame = wire.segment(number, wire.ACCESS_OUTPUT, byte_size)
            sent = self.sock.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
            if sent < len(frame):
                self.sock.sendall(frame[sent:])
            os.close(fd)
        self.model.arena.fresh = []


class KeptInputs:
    """Tells the host when the last of some arrays is gone."""

    def __init__(self, sock, request_id):
        self.sock, self.request_id, self.left = sock, request_id, 0

    def add(self, data):
        self.left += 1
        weakref.finalize(data, self.gone).atexit = False

    def gone(self):
        self.left -= 1
        if self.left == 0:
            try:
                self.sock.sendall(wire.release_inputs(self.request_id))
            except OSError:
                pass  # the host is gone, and with it the need


def author_traceback(error):
    """The traceback without the frames that are this stub's own, or Python's import machinery."""
    told = traceback.TracebackException.from_exception(error)
    ours = ("<frozen ", os.path.dirname(os.path.dirname(__file__)) + "/", importlib.__file__)
    told.stack = traceback.StackSummary.from_list(f for f in told.stack if not f.filename.startswith(ours))
    return "".join(told.format()).strip()


def main(args, channel, report):
    """Runs the interpreter; it does not return."""
    try:
        sys.stdout.reconfigure(line_buffering=True)
        sock = socket.socket(fileno=channel)
        model = Model(args, sock)
        result = {}
    except BaseException as error:
        result = {"error": author_traceback(error)}
    with os.fdopen(report, "w") as f:
        json.dump(result, f)
    if result:
        os._exit(0)
    try:
        Worker(model, sock).run()
        model.finalize()
    except OSError as error:
        log.write(log.ERROR, "data channel: %s" % error)
    except BaseException as error:
        log.write(log.ERROR, "finalize: " + author_traceback(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
