"""Lines for the server's log: a priority in angle brackets, as in sd-daemon(3), on standard
error, which leads to the host."""

import os

ERROR, WARNING, INFO, VERBOSE = 3, 4, 6, 7
LEVELS = [INFO, WARNING, ERROR, VERBOSE]  # by triton_python_backend_utils.LogLevel


def write(priority, message):
    lines = str(message).splitlines() or [""]
    os.write(2, "".join("<%d>%s\n" % (priority, line) for line in lines).encode())
