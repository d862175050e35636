"""The interpreter's side of the Python stub; see worker.py."""
