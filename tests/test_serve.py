"""The program itself: flags, start, stop, and what a killed server leaves behind."""

import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from conftest import ROOT, eventually

NEREID = ROOT / "bin" / "nereid"
IDENTITY = f"--model-repository={ROOT}/examples/identity/models"
TWINS = f"--model-repository={ROOT}/examples/python-like/models"


def run(*flags):
    return subprocess.run([NEREID, "serve", *flags], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "flags, phrase",
    [
        ([], "--model-repository is missing"),
        (["--model-repository=/no/such/folder"], "no such folder"),
        ([IDENTITY, "--cache-config=local,size=1"], "tritonserver's --cache-config is not supported yet"),
        ([IDENTITY, "--pinned-memory-pool-byte-size", "1"], "--pinned-memory-pool-byte-size is not supported yet"),
        ([IDENTITY, "--disable-auto-complete-config"], "not supported yet"),
        ([IDENTITY, "--model-control-mode=poll"], "poll is not supported yet"),
        ([IDENTITY, "--model-control-mode=sometimes"], "expected none or explicit"),
        ([IDENTITY, "--load-model=identity"], "needs --model-control-mode=explicit"),
        ([IDENTITY, "--log-format=xml"], "expected default or ISO8601"),
        ([IDENTITY, "--allow-http=maybe"], "expected true or false"),
        ([IDENTITY, "--backend-config=x"], "expected <backend>,<setting>=<value>"),
        ([IDENTITY, "--no-such-flag=1"], "unknown flag"),
    ],
)
def test_flags_that_are_refused(flags, phrase):
    done = run(*flags)
    assert done.returncode == 1 and phrase in done.stderr, done.stderr


def test_every_flag_of_tritonserver_is_known():
    """Source of the list: tritonserver 2.51 --help."""
    names = re.findall(r'"([a-z0-9-]+)"', re.search(r"notSupported = \[\]string\{(.*?)\n\}", (ROOT / "cmd/nereid/flags.go").read_text(), re.S)[1])
    assert len(names) > 50
    for name in names:
        assert f"--{name} is not supported yet" in run(IDENTITY, f"--{name}=1").stderr


def test_help_teaches():
    text = subprocess.run([NEREID, "serve", "--help"], capture_output=True, text=True).stdout
    for word in ("--model-repository", "--load-model", "--exit-timeout-secs", "nereid-backend-", "SIGTERM"):
        assert word in text


def test_flags_with_a_space(start):
    s = start("--model-store", f"{ROOT}/examples/identity/models", "--model-control-mode", "explicit", "--allow-metrics", "false",
              "--log-info", "false", "--id", "mine").wait_ready()  # fmt: skip
    assert "metrics" not in s.output and "not loaded" in s.output
    assert s.stop() == 0


def test_table_and_first_request(start):
    s = start(IDENTITY).wait_ready()
    assert re.search(r"^identity\s+1\s+READY", s.output, re.M)
    eventually(lambda: "curl" in s.output, "a first request is shown")
    command = s.output[s.output.index("curl") :].splitlines()[0]
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert '"data":[0.0,0.0]' in answer.stdout
    assert s.stop(signal.SIGINT) == 0


def test_broken_model_ends_the_start(start, tmp_path):
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "config.pbtxt").write_text('backend: "nobody"')
    done = run(f"--model-repository={tmp_path}", "--http-port=0", "--grpc-port=0", "--metrics-port=0")
    assert done.returncode == 1 and "nereid-backend-nobody" in done.stderr and "UNAVAILABLE" in done.stdout
    s = start(f"--model-repository={tmp_path}", IDENTITY, "--exit-on-error=false").wait_ready()
    assert re.search(r"^broken\s+1\s+UNAVAILABLE\s+.*nereid-backend-nobody", s.output, re.M)
    assert s.stop() == 0


def descendants(pid):
    out = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            child = int(path.parent.name)
            out |= {child} | descendants(child)
    return out


BUSY = """import os, time
open(os.path.dirname(__file__) + "/loading", "w").close()
time.sleep(1000)
"""


def test_killed_while_a_model_loads(start, tmp_path):
    """An interpreter that is busy, and does not look at its channel, ends too."""
    model = tmp_path / "busy" / "1"
    model.mkdir(parents=True)
    (tmp_path / "busy" / "config.pbtxt").write_text('backend: "python"')
    (model / "model.py").write_text(BUSY)
    s = start(f"--model-repository={tmp_path}")
    eventually((model / "loading").exists, "the model loads")
    family = descendants(s.process.pid)
    assert len(family) == 3  # stub, fork server, interpreter
    s.stop(signal.SIGKILL)
    eventually(lambda: not any(Path(f"/proc/{p}").exists() for p in family), "every process is gone")


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left(start, sig):
    """Also after kill -9: no process, nothing in /dev/shm or the temporary folder."""
    shared, temporary = set(os.listdir("/dev/shm")), set(os.listdir(tempfile.gettempdir()))
    s = start(IDENTITY, TWINS).wait_ready()
    family = descendants(s.process.pid)
    # 3 stubs, a fork server, 2 interpreters
    assert len(family) == 6
    names = {Path(f"/proc/{p}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip() for p in family}
    for title in ("nereid python addsub_python/1 addsub_python_0_0", "nereid python fork server"):
        assert any(n.startswith(title) for n in names), names
    assert set(os.listdir("/dev/shm")) == shared
    s.stop(sig)
    eventually(lambda: not any(Path(f"/proc/{p}").exists() for p in family), "every process is gone")
    assert set(os.listdir("/dev/shm")) == shared
    eventually(lambda: not set(os.listdir(tempfile.gettempdir())) - temporary, "no temporary file is left")
