"""The fork server of one Python environment: imports numpy once, then forks an interpreter
for each instance, so that instances start in milliseconds and share its pages.

Descriptor 3 is the host's: each "C" message brings a stub's connection. A stub's "S" message
brings an instance number and four descriptors: data channel, report pipe, standard error,
arguments. When an interpreter ends, its stub gets "X", the number and the wait status; when a
stub's connection ends, its interpreters are killed; when the host's ends, all of it does.
"""

import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import struct
import sys
import traceback

CONTROL_FD = 3
PR_SET_PDEATHSIG = 1

try:
    import numpy  # noqa: F401  (the point of this process)

    import nereid_stub.worker as worker

    FAULT = None
except ImportError:
    FAULT = (
        "the Python backend needs numpy in the interpreter %s:\n%s\n"
        "install it there, or name another environment in the parameter EXECUTION_ENV_PATH"
        % (sys.executable, traceback.format_exc().strip())
    )


def set_title(text):
    """Writes what ps shows over this process's own command line."""
    with open("/proc/self/stat", "rb") as f:
        fields = f.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    if start and room > 1:
        ctypes.memmove(start, text.encode()[: room - 1].ljust(room, b"\0"), room)


class Stub:
    """One stub's connection, and its interpreters by process id."""

    def __init__(self, sock):
        self.sock = sock
        self.children = {}


class ForkServer:
    def __init__(self):
        self.pid = os.getpid()
        self.selector = selectors.DefaultSelector()
        self.control = socket.socket(fileno=CONTROL_FD)
        self.selector.register(self.control, selectors.EVENT_READ, self.accept)

    def run(self):
        while True:
            for key, _ in self.selector.select():
                run = key.data()
                if run is not None:
                    return run

    def accept(self):
        data, fds, _, _ = socket.recv_fds(self.control, 1, 1)
        if not data:
            os._exit(0)  # the kernel ends the interpreters: see become_interpreter
        for fd in fds:
            stub = Stub(socket.socket(fileno=fd))
            self.selector.register(stub.sock, selectors.EVENT_READ, lambda stub=stub: self.serve(stub))

    def serve(self, stub):
        try:
            data, fds, _, _ = socket.recv_fds(stub.sock, 16, 4)
        except OSError:
            data, fds = b"", []
        if not data:
            self.selector.unregister(stub.sock)
            stub.sock.close()
            stub.sock = None
            for pid in stub.children:
                os.kill(pid, signal.SIGKILL)
            return None
        (index,) = struct.unpack("<I", data[1:5])
        channel, report, stderr, arguments = fds
        try:
            if FAULT is not None:
                os.write(report, json.dumps({"error": FAULT}).encode())
                return None
            pid = os.fork()
            if pid == 0:
                return self.become_interpreter(channel, report, stderr, arguments)
            stub.children[pid] = index
            pidfd = os.pidfd_open(pid)
            self.selector.register(pidfd, selectors.EVENT_READ, lambda: self.reap(stub, pid, pidfd))
        finally:
            for fd in fds:
                os.close(fd)
        return None

    def reap(self, stub, pid, pidfd):
        self.selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        index = stub.children.pop(pid)
        if stub.sock is not None:
            try:
                stub.sock.send(b"X" + struct.pack("<II", index, status))
            except OSError:
                pass

    def become_interpreter(self, *fds):
        """In the child: what to run once this server's stack is gone."""
        # However this server ends, so do its interpreters, also one that is busy and does not
        # look at its channel. (The signal follows the thread that forked: here, the only one.)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self.pid:
            os._exit(1)
        kept = [os.dup(fd) for fd in fds]
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            else:
                key.fileobj.close()
        self.selector.close()
        return lambda: interpreter(*kept)


def interpreter(channel, report, stderr, arguments):
    os.dup2(stderr, 1)
    os.dup2(stderr, 2)
    os.close(stderr)
    with os.fdopen(arguments, "rb") as f:
        f.seek(0)
        args = json.load(f)
    set_title(args["title"])
    worker.main(args, channel, report)


def main():
    set_title("nereid python fork server")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # so that the collector does not write to pages shared with children
    ForkServer().run()()


main()
