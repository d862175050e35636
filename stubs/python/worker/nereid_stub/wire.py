"""The frames of the data channel. docs/frame-layout.md says the same in words; the vectors in
internal/wire/testdata are read by the tests of both sides."""

import struct

REQUEST, RELEASE, CANCEL, SEGMENT, DROP, RESPONSE = 1, 2, 3, 4, 5, 16
MORE, ALL_OUTPUTS = 1, 2
FINAL, ERROR, FAILED, KEEPS_INPUTS = 1, 2, 4, 8
ACCESS_INPUT, ACCESS_REGION, ACCESS_OUTPUT = 0, 1, 2
FIRST_OUTPUT_SEGMENT = 1 << 31
MAX_MESSAGE = 32 << 10

HEADER = struct.Struct("<IBBHQ")
REQUEST_HEAD = struct.Struct("<IBBHQQQIIHHIH6x")
TENSOR = struct.Struct("<HBBIQQ")
SEGMENT_BODY = struct.Struct("<IBBHQI4xQ")
PLACE = struct.Struct("<QQ")
DIMS = [struct.Struct("<%dq" % rank) for rank in range(256)]


_RESPONSES = {(): struct.Struct("<IBBHQqqB3xI")}  # by the ranks of the outputs


def response(request_id, flags, begin, end, code, message, ranks, fields):
    """A response frame. fields has, for each output: index, datatype, rank, segment, offset,
    byte size, dimensions; all in one flat list, for they are packed in one call."""
    layout = _RESPONSES.get(ranks)
    if layout is None:
        form = "<IBBHQqqB3xI" + "".join("HBBIQQ%dq" % rank for rank in ranks)
        layout = struct.Struct(form)
        if len(_RESPONSES) < 1024:
            _RESPONSES[ranks] = layout
    message = message[:MAX_MESSAGE]
    size = layout.size + len(message)
    return (
        layout.pack(size, RESPONSE, flags, len(ranks), request_id, begin, end, code, len(message), *fields)
        + message
    )


def segment(number, access, byte_size):
    """The frame that announces a segment; its descriptor travels with it."""
    return SEGMENT_BODY.pack(SEGMENT_BODY.size, SEGMENT, 0, 0, number, access, byte_size)


def release_inputs(request_id):
    """The frame that says that nothing refers to the inputs of a request any more."""
    return HEADER.pack(HEADER.size, RELEASE, 0, 0, request_id)
