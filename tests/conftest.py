"""A real server for the tests: bin/nereid, with this interpreter as its python3."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "stubs" / "python" / "worker"))
sys.dont_write_bytecode = True


class Server:
    """A started `nereid serve` and what it printed."""

    def __init__(self, *flags):
        env = dict(os.environ, PATH=str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"])
        command = [ROOT / "bin" / "nereid", "serve", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
        self.process = subprocess.Popen(
            [*command, "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1", *flags],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
            preexec_fn=orphan_guard,
        )  # fmt: skip
        self.output = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.output += line
            if line.startswith("ready after"):
                self._ready.set()
        self._ready.set()

    def wait_ready(self):
        assert self._ready.wait(60) and self.process.poll() is None, self.output
        return self

    def address(self, name):
        return re.search(rf"^{name}\s+(\S+)$", self.output, re.M)[1]

    def stop(self, sig=signal.SIGTERM):
        self.process.send_signal(sig)
        code = self.process.wait(30)
        self._reader.join(10)
        return code


def orphan_guard():
    """In the server's process: it ends with these tests, however they end."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


@pytest.fixture(scope="session")
def server():
    started = Server(
        f"--model-repository={ROOT}/examples/identity/models", f"--model-repository={ROOT}/examples/python-like/models"
    ).wait_ready()
    yield started
    assert started.stop() == 0, started.output


@pytest.fixture
def start():
    """start(*flags) starts a server of the test's own."""
    made = []

    def run(*flags):
        made.append(Server(*flags))
        return made[-1]

    yield run
    for s in made:
        if s.process.poll() is None:
            s.stop(signal.SIGKILL)


def eventually(check, what):
    end = time.monotonic() + 20
    while not check():
        assert time.monotonic() < end, f"never came true: {what}"
        time.sleep(0.01)
