"""The .proto files are wire-compatible with the published client's: same packages, messages,
fields, numbers and labels."""

import re

import pytest
from conftest import ROOT
from google.protobuf import descriptor_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

FIELD = re.compile(r"^\s*(repeated |optional )?(map<.*>|[\w.]+) (\w+) = (\d+)( \[.*\])?;$")


def ours(path):
    """{("Message.Inner", field): (number, repeated)} and {("Enum", value): number} of a file."""
    found, stack = {}, []
    for line in (ROOT / "proto" / path).read_text().splitlines():
        line = line.split("//")[0].rstrip()
        opened = re.match(r"^\s*(message|enum|oneof|service) (\w+) \{(\})?$", line)
        if opened:
            if not opened[3]:
                stack.append("" if opened[1] == "oneof" else opened[2])
        elif line.strip() == "}":
            stack.pop()
        elif m := FIELD.match(line):
            found[".".join(filter(None, stack)), m[3]] = (int(m[4]), bool(m[1]) and m[1] != "optional " or m[2].startswith("map<"))
        elif m := re.match(r"^\s*(\w+) = (\d+);$", line):
            found[".".join(stack), m[1]] = int(m[2])
        elif m := re.match(r"^\s*rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\);$", line):
            found["rpc", m[1]] = (bool(m[2]), m[3], bool(m[4]), m[5])
    assert not stack
    return found


def theirs(module):
    file = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    assert file.package == "inference"
    found = {}

    def enum(e, scope):
        for v in e.value:
            found[".".join([*scope, e.name]), v.name] = v.number

    def message(m, scope):
        scope = [*scope, m.name]
        for f in m.field:
            found[".".join(scope), f.name] = (f.number, f.label == f.LABEL_REPEATED)
        for e in m.enum_type:
            enum(e, scope)
        for n in m.nested_type:
            if not n.options.map_entry:
                message(n, scope)

    for e in file.enum_type:
        enum(e, [])
    for m in file.message_type:
        message(m, [])
    for s in file.service:
        for r in s.method:
            found["rpc", r.name] = (r.client_streaming, r.input_type.split(".")[-1], r.server_streaming, r.output_type.split(".")[-1])
    return found


@pytest.mark.parametrize(
    "path, module", [("inference/grpc_service.proto", service_pb2), ("config/model_config.proto", model_config_pb2)]
)
def test_wire_compatible(path, module):
    mine, published = ours(path), theirs(module)
    assert len(mine) > 100
    # A newer client may know fields that we do not; what we have must be the same.
    assert {k: v for k, v in published.items() if k in mine} == mine
